"""The contract tests themselves: a broken kernel of every kind must be caught, and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import CONTRACTS, FP4_BLOCK16, FP8_BLOCK32, Mixes, RowFormat, Rows
from deepinfer.conformance import ConformanceFailure, Suite
from deepinfer.conformance.compare import code_difference, value_difference
from deepinfer.cpu.backend import CpuBackend

REFERENCES = Suite(CpuBackend()).reference(torch.float32).table


class Broken(CpuBackend):
    """The CPU backend with one kernel exchanged."""

    def __init__(self, op: str, function: Callable[..., Any]) -> None:
        self.op, self.function = op, function

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        return {**super().kernels(numerics), self.op: Kernel(self.function, Determinism.ROW_INVARIANT)}


def reference(op: str) -> Callable[..., Any]:
    return getattr(REFERENCES, op)


def rope_base(positions: Tensor, frequencies: Tensor) -> Any:
    return reference("rope_angles")(positions, frequencies**1.0001)


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    return reference("rope")(x, cos, -sin if x.shape[0] == 1 else sin, inverse)


def window_off_by_one(
    ring: Tensor,
    step_rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_positions: Tensor,
    first_rows: Tensor,
    window_low: Tensor,
    window: int,
) -> Any:
    rows, valid = reference("gather_window")(
        ring, step_rows, slots, positions, first_positions, first_rows, window_low, window
    )
    oldest = positions - window + 1 == window_low
    valid[:, 0] &= ~oldest
    return rows.masked_fill(~valid[..., None], 0), valid


def unordered_sum(rows: Rows, weight: Any) -> Tensor:
    order = torch.randperm(rows.values.shape[1])
    x = rows.quantised if weight.quantised else rows.values
    return (x[:, order].float() @ weight.values[:, order].float().T).to(x.dtype)


def reads_idle_rows(rows: Rows, weights: Any, is_image: Tensor, live: Tensor) -> Tensor:
    return reference("moe_block")(rows, weights, is_image, live) + 0 * rows.values.sum()


def writes_input(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = reference("rms_norm")(x, weight, eps)
    x.mul_(2)
    return out


def higher_index_wins(scores: Tensor, top_k: int) -> Tensor:
    n = scores.shape[1]
    flipped = reference("select_topk")(scores.flip(1), top_k)
    back = torch.where(flipped >= 0, n - 1 - flipped, n).sort(dim=1).values
    return back.masked_fill(back == n, -1)


def scale_one_step_up(x: Tensor) -> Any:
    codes, scales = reference("fp8_block32_quantise")(x)
    return codes, scales + 1


def depends_on_count(rows: Rows, weight: Any) -> Tensor:
    x = (rows.quantised if weight.quantised else rows.values).double()
    flat = x.float() if rows.values.shape[0] > 16 else x
    return (flat @ weight.values.to(flat.dtype).T).to(torch.float32)


def writes_last_page(pages: Tensor, rows: Tensor, physical: Tensor) -> None:
    pages[physical // pages.shape[1], physical % pages.shape[1]] = rows


def writes_padding(ring: Tensor, step_rows: Tensor, slots: Tensor, commit_rows: Tensor) -> None:
    ring[slots.clamp(min=0), commit_rows.clamp(min=0)] = step_rows


def gives_away_its_input(streams: Tensor) -> Tensor:
    mean = reference("stream_mean")(streams)
    streams[:, 0] = mean
    return streams[:, 0]


def wider_result(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference("rms_norm")(x, weight, eps).float()


def weights_with_bias(
    logits: Tensor, bias: Tensor, image_bias: Tensor, is_image: Tensor, top_k: int, scale: float
) -> Any:
    ids, weights = reference("route")(logits, bias, image_bias, is_image, top_k, scale)
    return ids, weights * (1 + 1e-3 * bias[ids])


def ignores_image_bias(
    logits: Tensor, bias: Tensor, image_bias: Tensor, is_image: Tensor, top_k: int, scale: float
) -> Any:
    return reference("route")(logits, bias, bias, is_image, top_k, scale)


def collapses_with_new_mixes(streams: Tensor, branch: Tensor | None, previous: Mixes, weights: Any) -> Any:
    spread, _, mixes = reference("hyper_connection_boundary")(streams, branch, previous, weights)
    return spread, reference("hyper_connection_boundary")(spread, None, mixes, weights)[1], mixes


def drops_the_best(
    query: Tensor,
    weights: Tensor,
    step: Any,
    cache: Any,
    parameters: Any,
    cos: Tensor,
    sin: Tensor,
    blocks: Tensor | None,
) -> Any:
    more = replace(parameters, top_k=parameters.top_k + 1)
    selection, blocks = reference("index_select")(query, weights, step, cache, more, cos, sin, blocks)
    return replace(selection, entries=selection.entries[:, 1:], physical=selection.physical[:, 1:]), blocks


def rotates_before_key(
    latent: Tensor,
    gate: Tensor | None,
    dtype: torch.dtype,
    step: Any,
    cache: Any,
    weights: Any,
    cos: Tensor,
    sin: Tensor,
) -> None:
    turned = reference("rope")(latent, cos, sin)
    reference("compress_entries")(turned, gate, dtype, step, cache, weights, torch.ones_like(cos), 0 * sin)


def main_keys_without_norm(
    features: Tensor, step: Any, rings: tuple[Tensor, ...], weights: Any, cos: Tensor, sin: Tensor
) -> None:
    flat = replace(weights, main_norm=torch.ones_like(weights.main_norm))
    reference("draft_main_keys")(features, step, rings, flat, cos, sin)


def window_scale_up(rows: Rows, weights: Any, cos: Tensor, sin: Tensor) -> Any:
    projected = reference("qkv_project")(rows, weights, cos, sin)
    window_rows = projected.window_rows.clone()
    window_rows[:, weights.head_dim :] += 1
    return replace(projected, window_rows=window_rows)


def second_best_drafts(
    anchors: Tensor,
    positions: Tensor,
    slots: Tensor,
    rings: tuple[Tensor, ...],
    weights: Any,
    frequencies: Tensor,
    choose: Callable[[Tensor, int], Tensor] | None = None,
) -> Any:
    result = reference("draft_block")(anchors, positions, slots, rings, weights, frequencies, choose)
    return replace(result, ids=result.logits.topk(2, dim=-1).indices[..., 1]) if anchors.shape[0] else result


def drafts_a_little_off(
    anchors: Tensor,
    positions: Tensor,
    slots: Tensor,
    rings: tuple[Tensor, ...],
    weights: Any,
    frequencies: Tensor,
    choose: Callable[[Tensor, int], Tensor] | None = None,
) -> Any:
    """An error that the step of an inner code would hide in a quantised drafter."""
    result = reference("draft_block")(anchors, positions, slots, rings, weights, frequencies, choose)
    return replace(result, logits=result.logits * 1.001)


def confidence_without_the_token(hidden: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    return reference("draft_confidence")(hidden, torch.zeros_like(markov), weight)


def forgets_the_shared_expert_sign(routed: Tensor, shared: Tensor) -> Tensor:
    return reference("moe_combine")(routed, -shared)


def shares_memory(streams: Tensor, pre: Tensor) -> Tensor:
    return streams[:, 0]


BROKEN = {
    "wrong rope base": ("rope_angles", rope_base, "values", "of their scale"),
    "turns the wrong way": ("rope", rope_pairs, "values", "of their scale"),
    "window off by one": ("gather_window", window_off_by_one, "values", "differ in bits"),
    "sum in any order": ("linear", unordered_sum, "repeat", "run 2 differs from run 1"),
    "reads padding rows": ("moe_block", reads_idle_rows, "poison", "must not be read shows in"),
    "writes its input": ("rms_norm", writes_input, "side_effects", "argument x was written"),
    "wrong tie rule": ("select_topk", higher_index_wins, "values", "differ in bits"),
    "scale one step up": ("fp8_block32_quantise", scale_one_step_up, "values", "1: "),
    "depends on the row count": ("linear_accumulate", depends_on_count, "rows", "row-invariance is promised"),
    "writes the place -1": ("store_entries", writes_last_page, "side_effects", "that the reference leaves"),
    "writes padding rows": ("commit_window", writes_padding, "side_effects", "argument ring was written"),
    "gives its input away": ("stream_mean", gives_away_its_input, "side_effects", "argument streams was written"),
    "another dtype": ("rms_norm", wider_result, "values", "torch.float32"),
    "weights with bias": ("route", weights_with_bias, "values", "weights: "),
    "ignores the image bias": ("route", ignores_image_bias, "values", "ids: "),
    "collapse with new mixes": ("hyper_connection_boundary", collapses_with_new_mixes, "values", "rows.values"),
    "drops the best entry": ("index_select", drops_the_best, "values", "entries: "),
    "rotates before the key": ("compress_entries", rotates_before_key, "values", "entries: "),
    "forgets a norm": ("draft_main_keys", main_keys_without_norm, "values", "ring of stage 0"),
    "window scale up": ("qkv_project", window_scale_up, "values", "window_rows: "),
    "second best drafts": ("draft_block", second_best_drafts, "values", "lowest argmax"),
    "drafts a little off": ("draft_block", drafts_a_little_off, "values", "sample 'unquantised, forced', float32"),
    "confidence without the token": ("draft_confidence", confidence_without_the_token, "values", "of their scale"),
    "wrong sign": ("moe_combine", forgets_the_shared_expert_sign, "values", "of their scale"),
    "shares memory": (
        "hyper_connection_collapse",
        shares_memory,
        "side_effects",
        "shares memory with argument streams",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_kernel_is_caught_and_named(fault: str) -> None:
    op, function, check, text = BROKEN[fault]
    suite = Suite(Broken(op, function), seed=3)
    with pytest.raises(ConformanceFailure) as caught:
        suite.check(op, "odd", check)
    message = str(caught.value)
    assert message.startswith(f"{op} [odd, sample '"), message
    assert f"{check}: " in message
    assert text in message, message


def test_same_kernel_unbroken_passes() -> None:
    suite = Suite(Broken("rms_norm", CONTRACTS["rms_norm"].reference), seed=3)
    assert suite.check("rms_norm", "odd") > 0


FP8 = RowFormat(FP8_BLOCK32, 32)


def packed(row_format: RowFormat, values: Tensor) -> Tensor:
    return reference("pack_rows")(values.float(), row_format)


def test_flip_at_a_boundary_is_allowed_and_elsewhere_not() -> None:
    # With the largest value 448 the scale is 1; 17 lies halfway between the codes 16 and 18.
    exact = torch.full((1, 32), 16.0, dtype=torch.float64)
    exact[0, 0], exact[0, 1] = 448.0, 17.0
    expected = packed(FP8, exact)
    up = exact.clone()
    up[0, 1] = 18.0
    actual = packed(FP8, up)
    assert not torch.equal(actual, expected)
    assert code_difference(actual, expected, exact, FP8, 1e-3, 1e-5) is None
    clear = exact.clone()
    clear[0, 1] = 16.2
    found = code_difference(actual, packed(FP8, clear), clear, FP8, 1e-3, 1e-5)
    assert found is not None
    assert "off by more than a rounding" in found


def test_too_many_flips_and_far_codes_are_refused() -> None:
    exact = torch.full((1, 32), 17.0, dtype=torch.float64)
    exact[0, 0] = 448.0
    up = torch.where(exact == 17.0, 18.0, exact)
    found = code_difference(packed(FP8, up), packed(FP8, exact), exact, FP8, 1e-3, 1e-5)
    assert found == "31 of 32 codes are flipped, allowed 1"
    far = torch.where(exact == 17.0, 20.0, exact)
    found = code_difference(packed(FP8, far), packed(FP8, exact), exact, FP8, 1.0, 1e-5)
    assert found is not None
    assert "off by more than a rounding" in found


def test_a_code_of_a_sum_that_cancels_is_held_to_its_row() -> None:
    # Seen with bfloat16 inside: terms of the size of the row cancel, and what is left is wrong by a rounding of theirs.
    exact = torch.zeros(1, 32, dtype=torch.float64)
    exact[0, 0], exact[0, 1] = 3.5, 2.24e-5
    expected = packed(FP8, exact)
    for value, allowed in ((3.1e-5, True), (-2e-5, True), (2e-3, False)):
        other = exact.clone()
        other[0, 1] = value
        actual = packed(FP8, other)
        assert not torch.equal(actual, expected)
        assert (code_difference(actual, expected, exact, FP8, 1e-3, 2e-5) is None) == allowed
        assert code_difference(actual, expected, exact, FP8, 1e-3, 1e-9) is not None


def test_scale_may_move_only_at_its_boundary() -> None:
    four = RowFormat(FP4_BLOCK16, 16)
    exact = torch.full((1, 16), 0.53, dtype=torch.float64)
    rows = packed(four, exact)
    moved = rows.clone()
    moved[0, four.data_bytes] += 1
    found = code_difference(moved, rows, exact, four, 1.0, 1e-5)
    assert found is not None
    assert "scales are wrong" in found


def test_a_sum_that_cancels_is_held_to_its_terms() -> None:
    right = torch.tensor([1e-9], dtype=torch.float64)
    assert value_difference(torch.tensor([1.5e-7]), right, 1e-6) is not None
    assert value_difference(torch.tensor([1.5e-7]), right, 1e-6, scale=1.0) is None
    assert value_difference(torch.tensor([1.5e-6]), right, 1e-6, scale=1.0) is not None


def test_only_so_many_rows_may_flip_and_not_far() -> None:
    right = torch.ones(4, 2, dtype=torch.float64)
    actual = right.clone()
    actual[1] += 0.1
    assert value_difference(actual, right, 1e-6) is not None
    assert value_difference(actual, right, 1e-6, flips=1) is None
    actual[2] += 0.1
    assert value_difference(actual, right, 1e-6, flips=1) is not None
    actual[1:3] = 1.2
    assert value_difference(actual, right, 1e-6, flips=4) is not None


def test_value_difference_sees_nan_infinity_shape_and_size() -> None:
    right = torch.tensor([1.0, -torch.inf, 3.0], dtype=torch.float64)
    assert value_difference(torch.tensor([1.0, -torch.inf, 3.0]), right, 1e-6) is None
    assert value_difference(torch.tensor([1.0, -torch.inf, torch.nan]), right, 1e-6) is not None
    assert value_difference(torch.tensor([1.0, torch.inf, 3.0]), right, 1e-6) is not None
    assert value_difference(torch.tensor([1.0, -torch.inf, 3.1]), right, 1e-6) is not None
    assert value_difference(torch.tensor([1.0, -torch.inf]), right, 1e-6) == "float32 [2], expected float64 [3]"
    assert value_difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0) is not None


@pytest.fixture(scope="module")
def own(pytestconfig: pytest.Config) -> Suite:
    return Suite(CpuBackend(), seed=pytestconfig.getoption("contract_seed"))


def test_every_operation_has_samples_with_the_hard_cases(own: Suite) -> None:
    """An empty call everywhere; 33 rows or more and row arguments wherever rows can be told apart."""
    from deepinfer.conformance.rows import row_count, units

    lacking: list[str] = []
    for op, contract in own.contracts.items():
        samples = list(own.samples(op, "odd"))
        if not any("empty" in sample.label for sample in samples):
            lacking.append(f"{op}: no empty call")
        for sample in samples:
            if sample.label == "empty" and sample.row_args and row_count(sample):
                lacking.append(f"{op}: sample {sample.label!r} has rows")
        if contract.determinism is Determinism.EXACT and not contract.activations:
            continue
        if max((len(units(sample)) for sample in samples), default=0) < 33:
            lacking.append(f"{op}: no sample with 33 rows")
    assert not lacking, "\n".join(lacking)


def test_operations_with_padding_have_poison(own: Suite) -> None:
    """Whatever takes slots or a step has a sample that says what must not be read."""
    lacking = []
    for op in own.contracts:
        samples = list(own.samples(op, "odd"))
        takes = {name for sample in samples for name in sample.kwargs}
        if takes & {"slots", "step", "physical", "source"} and not any(sample.unread for sample in samples):
            lacking.append(op)
    assert not lacking, lacking


def test_same_seed_gives_the_same_samples() -> None:
    from deepinfer.conformance.trees import leaves, same_bits

    first, again, other = (Suite(CpuBackend(), seed=seed) for seed in (5, 5, 6))
    pairs = zip(first.samples("rope", "odd"), again.samples("rope", "odd"), other.samples("rope", "odd"), strict=True)
    differing = 0
    for one, two, three in pairs:
        for (_, a), (_, b), (_, c) in zip(leaves(one.kwargs), leaves(two.kwargs), leaves(three.kwargs), strict=True):
            assert same_bits(a, b)
            differing += not same_bits(a, c)
    assert differing > 0

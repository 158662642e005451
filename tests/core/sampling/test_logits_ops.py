"""Bias, penalties, bans, forced tokens and log-probabilities: definitions, exact ties, row independence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.ops import logits as ops
from deepinfer.ops.contract import CONTRACTS
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slots import Feature, SlotSampling, pack_ids


@given(st.sets(st.integers(0, 69)), st.integers(70, 100))
def test_bits_are_packed_alike_on_host_and_device(ids: set[int], vocab: int) -> None:
    flags = torch.zeros(vocab, dtype=torch.bool)
    flags[sorted(ids)] = True
    assert ops.pack_bits(flags).tolist() == pack_ids(ids, vocab).tolist()


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 40), max_size=9),
    output=st.lists(st.integers(0, 40), max_size=9),
    pending=st.lists(st.integers(0, 40), max_size=4),
    repetition=st.sampled_from([0.5, 1.0, 1.7]),
    presence=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency=st.sampled_from([-1.3, 0.0, 0.4]),
)
def test_penalties_in_numpy(
    prompt: list[int], output: list[int], pending: list[int], repetition: float, presence: float, frequency: float
) -> None:
    vocab, slots = 41, 3
    row = np.random.default_rng(len(prompt)).normal(size=vocab).astype(np.float32)
    counts = torch.zeros(slots, vocab, dtype=torch.int32)
    ops.count_tokens(counts, torch.tensor([2]), torch.tensor([[*output, -1]]))
    assert counts.sum() == len(output)
    bits = torch.zeros(slots, 2, dtype=torch.int32)
    bits[2] = torch.from_numpy(pack_ids(prompt, vocab))
    scales = [torch.tensor([1.0, 1.0, value]) for value in (repetition, presence, frequency)]
    given_rows = torch.from_numpy(np.stack([row, row]))
    drafts = torch.tensor([[*pending, -1]]).repeat(2, 1)
    found = ops.apply_penalties(given_rows, torch.tensor([2, -1]), drafts, counts, bits, *scales)
    wanted = row.copy()
    emitted = [*output, *pending]
    for token in {*prompt, *emitted}:
        factor = np.float32(repetition)
        wanted[token] = wanted[token] / factor if wanted[token] > 0 else wanted[token] * factor
    for token in set(emitted):
        wanted[token] -= np.float32(frequency) * np.float32(emitted.count(token))
        wanted[token] -= np.float32(presence)
    assert found[0].numpy().tolist() == wanted.tolist()
    assert torch.equal(found[1], given_rows[1])


def test_forced_tokens_leave_bad_rows_and_late_rows_alone() -> None:
    forced = torch.tensor([[-1, -1], [9, -1]], dtype=torch.int32)
    tokens = torch.tensor([4, 4, 4, -1, 4])
    slots = torch.tensor([1, 1, 1, 1, -1])
    found = ops.force_tokens(tokens, slots, torch.tensor([0, 1, 2, 0, 0]), forced)
    assert found.tolist() == [9, 4, 4, -1, 4]


def test_bans_and_min_tokens() -> None:
    allowed, ending = torch.full((2, 1), -1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    allowed[1], ending[1] = torch.from_numpy(~pack_ids([3], 6)), torch.from_numpy(pack_ids([1], 6))
    rows = torch.zeros(4, 6)
    slots, index = torch.tensor([1, 1, 0, -1]), torch.tensor([1, 2, 0, 0])
    found = ops.forbid_tokens(rows, slots, index, allowed, ending, torch.tensor([0, 2]))
    banned = [[i for i, value in enumerate(row) if value == -torch.inf] for row in found.tolist()]
    assert banned == [[1, 3], [3], [], []]


def test_logprobs_of_a_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.cat([6 * torch.randn(3, 129_280, generator=generator), torch.zeros(1, 129_280)])
    tokens = torch.tensor([5, 129_279, -1, 70_000])
    chosen, ranks, ids, values = ops.token_logprobs(rows, tokens, 1000)
    exact = torch.log_softmax(rows.double(), -1)
    for row in (0, 1, 3):
        assert float(chosen[row]) == pytest.approx(float(exact[row, tokens[row]]), abs=4e-6)
    assert (float(chosen[2]), int(ranks[2])) == (0, -1)
    assert ranks[[0, 1]].tolist() == [int((exact[i] > exact[i, tokens[i]]).sum()) + 1 for i in (0, 1)]
    assert int(ranks[3]) == 70_001
    assert ids[3].tolist() == list(range(1000))
    ordered, order = torch.sort(rows, dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order[:, :1000])
    assert values.double().sub(exact.gather(1, ids)).abs().max() < 4e-6
    assert bool((values.diff(dim=-1) <= 0).all())
    assert ordered.shape == rows.shape


def test_logprobs_of_bad_rows_and_signed_zeros() -> None:
    rows = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf], [-0.0, 0.0], [-torch.inf, 1.0]])
    chosen, ranks, ids, values = ops.token_logprobs(rows, torch.tensor([0, 0, 0, 1, 0]), 2)
    assert ranks.tolist() == [-1, -1, -1, 2, 2]
    assert ids[3].tolist() == [0, 1]
    assert values[:3].tolist() == [[0, 0]] * 3
    assert float(chosen[3]) == pytest.approx(-np.log(2), abs=1e-6)
    assert float(chosen[4]) == -np.inf
    assert values[4].tolist() == [0, -np.inf]


@pytest.mark.parametrize("name", ["token_logprobs", "add_bias", "apply_penalties", "forbid_tokens", "force_tokens"])
def test_rows_do_not_feel_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK_ELEMENTS", 3 * 509)
    call = CONTRACTS[name].reference
    for sample in CONTRACTS[name].samples("odd", torch.Generator().manual_seed(3)):
        whole = _parts(call(**sample.kwargs))
        for row in range(sample.kwargs[sample.row_args[0]].shape[0]):
            alone = {
                key: value[row : row + 1] if key in sample.row_args else value for key, value in sample.kwargs.items()
            }
            for before, after in zip(whole, _parts(call(**alone)), strict=True):
                assert torch.equal(before[row : row + 1], after)


def _parts(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_what_a_request_needs_of_the_sampler() -> None:
    prompt = np.array([3, 4])

    def features(**params: Any) -> Feature:
        view = SlotSampling.of(SamplingParams(**params), prompt, {1})
        return Feature(0) if view is None else view.features

    assert features() is features(top_k=3, top_p=0.5, stop="a", n=2) is Feature(0)
    assert features(min_tokens=1, ignore_eos=True) == Feature(0)
    assert features(min_tokens=1) == features(banned_token_ids=[3]) == features(allowed_token_ids=[3]) == Feature.BAN
    assert features(logprobs=0) == Feature.LOGPROBS
    assert features(logprobs=0, logprobs_mode="processed") == Feature.LOGPROBS | Feature.PROCESSED
    assert features(prompt_logprobs=0, min_p=0.1) == Feature.PROMPT_LOGPROBS | Feature.MIN_P
    assert features(golden_token_ids=[-1], logit_bias={3: 1}) == Feature.FORCE | Feature.BIAS
    assert features(presence_penalty=0.1) == features(repetition_penalty=1.1) == Feature.PENALTY

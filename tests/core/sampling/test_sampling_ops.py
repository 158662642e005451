"""Filters, draws and status words: definitions, distributions, row independence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops import sampling
from deepinfer.ops.contract import CONTRACTS
from deepinfer.ops.sampling import apply_filters, sample_rows

STEP = CONTRACTS["sample_step"].compose(SimpleNamespace(apply_filters=apply_filters, sample_rows=sample_rows))
CALLS = {"apply_filters": apply_filters, "sample_rows": sample_rows, "sample_step": STEP}


def filters(
    logits: Any, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> list[bool]:
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    numbers = (torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
    scaled = apply_filters(row, *numbers, torch.tensor([min_p]))
    if min_p == 0:
        assert torch.equal(scaled, apply_filters(row, *numbers))
    return (scaled[0] > -torch.inf).tolist()


def kept_by_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[bool]:
    """The filter's contract in float64, id by id."""
    scaled = np.array(logits, np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = np.exp(scaled - scaled.max())
    mass /= mass.sum()
    keep, before = [False] * len(logits), 0.0
    for rank, index in enumerate(order):
        keep[index] = (
            (top_k < 0 or rank < top_k) and (top_p == 1 or before < top_p) and mass[index] >= min_p * mass.max()
        )
        before += mass[index]
    return keep


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=12),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.integers(-1, 13).filter(bool),
    top_p=st.sampled_from([0.1234, 0.3211, 0.5677, 0.9013, 0.99917, 1.0]),
    min_p=st.sampled_from([0.0, 0.0321, 0.2345, 0.678, 1e-30]),
)
def test_filters_are_what_they_say(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    values = [value / 4 for value in logits]
    kept = kept_by_definition(values, temperature, top_k, top_p, min_p)
    assert filters(values, temperature, top_k, top_p, min_p) == kept


def test_filter_examples() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert filters(logits, top_p=0.5) == [True, False, False, False]
    assert filters(logits, top_p=0.51) == [True, True, False, False]
    assert filters(logits, top_p=0.8) == [True, True, True, False]  # the tie goes to the lower id
    assert filters(logits, top_k=3) == [True, True, True, False]
    assert filters(logits, top_k=2, top_p=0.8) == [True, True, False, False]  # the stricter one wins
    assert filters(logits, top_k=3, top_p=0.3) == [True, False, False, False]
    assert filters([1.0, 3.0, 3.0], temperature=0) == [False, True, False]
    assert filters(logits, min_p=0.51) == [True, False, False, False]
    assert filters(logits, min_p=0.49) == [True, True, False, False]
    assert filters([2.0, 2.0, 1.0], min_p=1.0) == [True, True, False]
    # The nucleus is that of the whole distribution, not of what min-p leaves: 0.625 of the mass, not 0.625 of 0.75.
    assert filters(logits, top_p=0.625, min_p=0.4) == [True, True, False, False]
    assert filters(logits, top_p=0.45, min_p=0.1) == [True, False, False, False]
    assert filters(logits, temperature=4.0, min_p=0.8) == [True, True, False, False]
    assert filters(logits, temperature=4.0, min_p=0.7) == [True, True, True, True]
    assert filters([0.0, -0.0, 0.0], top_k=2) == [True, True, False]
    assert filters([-torch.inf, 1.0, 0.0], top_p=0.999) == [False, True, True]
    # Temperature moves the nucleus: both filters see the distribution after it.
    assert filters(logits, temperature=4.0, top_p=0.5) == [True, True, False, False]


def test_a_small_temperature_neither_overflows_nor_loses_the_best() -> None:
    scaled = apply_filters(
        torch.tensor([[3e38, -3e38, 2e38]]),
        torch.tensor([1e-6]),
        torch.tensor([-1], dtype=torch.int32),
        torch.tensor([1.0]),
    )
    assert scaled.tolist() == [[0.0, -torch.inf, -torch.inf]]


def draw(logits: Tensor, count: int, **params: Any) -> Tensor:
    """One draw for each of `count` seeds from one row of logits."""
    temperature = torch.full((count,), params.get("temperature", 1.0))
    scaled = apply_filters(
        logits.expand(count, -1),
        temperature,
        torch.full((count,), params.get("top_k", -1), dtype=torch.int32),
        torch.full((count,), params.get("top_p", 1.0)),
        torch.full((count,), params.get("min_p", 0.0)),
    )
    zero = torch.zeros(count, dtype=torch.int64)
    return sample_rows(scaled, temperature, torch.arange(count) * 7919, zero + 17, zero.int())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"temperature": 2.0}, None),
        ({"top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"min_p": 0.12, "top_p": 0.65}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.95, "top_k": 4}, [0.4 / 0.96, 0.3 / 0.96, 0.2 / 0.96, 0.06 / 0.96, 0]),
    ],
)
def test_draws_have_the_right_distribution(params: dict[str, Any], expected: list[float] | None) -> None:
    weights = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    count = 20_000
    tokens = draw(weights.log(), count, **params)
    if expected is None:
        tempered = weights ** (1 / params["temperature"])
        expected = (tempered / tempered.sum()).tolist()
    seen = torch.bincount(tokens, minlength=5).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * count
    assert (seen[wanted == 0] == 0).all()
    possible = wanted > 0
    chi_square = float(((seen - wanted)[possible].square() / wanted[possible]).sum())
    # 99.9 % quantile for at most four degrees of freedom.
    assert chi_square < 18.5


def test_a_rare_id_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    """One id with half the mass against 129,279 that share the rest evenly."""
    vocab, count = 129_280, 32
    logits = torch.zeros(vocab)
    logits[77] = float(np.log(vocab - 1))
    tokens = torch.cat([_one_draw(logits, seed) for seed in range(count)])
    hits = int((tokens == 77).sum())
    assert 4 <= hits <= 28  # 16 expected, 4.2 standard deviations either way
    others = tokens[tokens != 77]
    assert others.unique().numel() >= others.numel() - 1
    assert int(others.min()) < vocab // 4
    assert int(others.max()) > 3 * vocab // 4


def _one_draw(logits: Tensor, seed: int) -> Tensor:
    one = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int64)
    return sample_rows((logits - logits.max())[None], one, torch.tensor([seed]), zero, zero.int())


def test_the_only_kept_id_survives_infinite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "noise", lambda s, p, c, vocab: torch.full((s.numel(), vocab), torch.inf))
    assert draw(torch.tensor([0.0, 1.0, 2.0, 5.0]), 3, top_k=1).tolist() == [3, 3, 3]


def test_neighbouring_draws_share_their_noise() -> None:
    """The draw of a position is the argmax under one noise: removing ids that lost does not change it."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, generator=generator)
    for seed in range(50):
        winner = int(_one_draw(logits, seed))
        fewer = logits.clone()
        fewer[torch.randperm(50, generator=generator)[:20]] = -torch.inf
        fewer[winner] = logits[winner]
        fewer[logits.argmax()] = logits.max()
        assert int(_one_draw(fewer, seed)) == winner


@pytest.mark.parametrize("name", ["apply_filters", "sample_rows", "sample_step"])
@pytest.mark.parametrize("size", ["tiny", "odd"])
def test_rows_do_not_feel_each_other(name: str, size: Any) -> None:
    for sample in CONTRACTS[name].samples(size, torch.Generator().manual_seed(3)):
        whole = CALLS[name](**sample.kwargs)
        rows = next(iter(sample.kwargs.values())).shape[0]
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
        shuffled = CALLS[name](**{key: value[order] for key, value in sample.kwargs.items()})
        for before, after in zip(_parts(whole), _parts(shuffled), strict=True):
            assert torch.equal(before[order], after)
        for row in range(rows):
            alone = CALLS[name](**{key: value[row : row + 1] for key, value in sample.kwargs.items()})
            for before, after in zip(_parts(whole), _parts(alone), strict=True):
                assert torch.equal(before[row : row + 1], after)


def _parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_blocks_change_nothing_and_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = list(CONTRACTS["sample_step"].samples("odd", torch.Generator().manual_seed(5)))
    whole = [STEP(**sample.kwargs) for sample in samples]
    largest = 0

    def watch(scaled: Tensor, *rest: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, scaled.shape[0])
        return sample_rows(scaled, *rest)

    monkeypatch.setattr(sampling, "BLOCK_ELEMENTS", 3 * 509)
    step = CONTRACTS["sample_step"].compose(SimpleNamespace(apply_filters=apply_filters, sample_rows=watch))
    for sample, (tokens, status) in zip(samples, whole, strict=True):
        again = step(**sample.kwargs)
        assert torch.equal(again[0], tokens)
        assert torch.equal(again[1], status)
    assert largest == 3
    assert sampling.sampling_bytes(1000, 509) == 3 * 509 * sampling.BYTES_PER_ELEMENT


def test_status_words() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0, 1, 2], [0, nan, 2], [inf, 1, 2], [-inf, -inf, -inf], [-inf, 1, -inf], [nan, inf, 0]])
    rows = logits.shape[0]
    for temperature in (0.0, 1.0):
        tokens, status = STEP(
            logits,
            torch.full((rows,), temperature),
            torch.full((rows,), -1, dtype=torch.int32),
            torch.ones(rows),
            torch.arange(rows),
            torch.arange(rows),
            torch.zeros(rows, dtype=torch.int32),
        )
        assert status.tolist() == [0, 1, 1, 1, 0, 1]
        assert tokens[[1, 2, 3, 5]].tolist() == [-1] * 4
        assert tokens[4] == 1
        assert status.dtype is torch.int32
        if temperature == 0:
            assert tokens[0] == 2


def test_temperature_zero_takes_the_lower_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0]]).repeat(2, 1)
    zero = torch.zeros(2, dtype=torch.int64)
    tokens, _ = STEP(
        logits,
        torch.tensor([0.0, 1.0]),
        torch.tensor([-1, 1], dtype=torch.int32),
        torch.ones(2),
        zero,
        zero,
        zero.int(),
    )
    assert tokens.tolist() == [1, 1]


@pytest.mark.parametrize("op", CALLS)
def test_working_on_all_rows_changes_no_bit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the references do not ask which rows have limits or draw; here that is made to happen on the host."""
    function = CALLS[op]
    samples = list(CONTRACTS[op].samples("odd", torch.Generator().manual_seed(7)))
    chosen = [function(**sample.kwargs) for sample in samples]
    monkeypatch.setattr(sampling, "rows_where", lambda mask: torch.arange(mask.shape[0]))
    for sample, expected in zip(samples, chosen, strict=True):
        for ours, theirs in zip(*map(as_tuple, (function(**sample.kwargs), expected)), strict=True):
            assert torch.equal(ours, theirs), sample.label


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)

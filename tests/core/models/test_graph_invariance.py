"""A row's bits depend on its sequence alone: not on chunks, batch mates, row order, padding, pages or threads."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.driver import Driver, Part
from support.models import FEW, MANY, MODELS, property_model, random_tokens
from torch import Tensor

from deepinfer.models.deepseek_v41.spec import DeepseekV41

pytestmark = pytest.mark.parametrize("name", MODELS)


@functools.lru_cache(maxsize=64)
def _alone(model: DeepseekV41, tokens: tuple[int, ...]) -> Tensor:
    """Logits of all rows of a sequence that is run whole on fresh caches."""
    driver = Driver(model, slots=1, pages=-(-len(tokens) // model.layout.page_size))
    driver.admit(1)
    return driver.prefill(1, tokens)


def _sequences(model: DeepseekV41, lengths: list[int], seed: int) -> dict[int, tuple[int, ...]]:
    return {slot: tuple(random_tokens(model, length, 97 * seed + slot)) for slot, length in enumerate(lengths, 1)}


def _check_split(model: DeepseekV41, length: int, chunks: list[int], seed: int) -> None:
    tokens = tuple(random_tokens(model, length, seed))
    driver = Driver(model, slots=1, pages=-(-length // model.layout.page_size))
    driver.admit(1)
    assert torch.equal(driver.prefill(1, tokens, chunks), _alone(model, tokens)), chunks


LENGTH = st.integers(1, 75)
CHUNKS = st.lists(st.integers(1, 40), max_size=12)


@FEW
@given(length=LENGTH, chunks=CHUNKS, seed=st.integers(0, 3))
def test_any_chunk_split(name: str, length: int, chunks: list[int], seed: int) -> None:
    _check_split(property_model(name), length, chunks, seed)


@pytest.mark.slow
@MANY
@given(length=st.integers(1, 300), chunks=st.lists(st.integers(1, 150), max_size=12), seed=st.integers(0, 99))
def test_any_chunk_split_of_long_prompts(name: str, length: int, chunks: list[int], seed: int) -> None:
    _check_split(property_model(name), length, chunks, seed)


def test_splits_at_the_edges(name: str) -> None:
    model = property_model(name)
    window, page = model.config.sliding_window, model.layout.page_size
    capacity = model.config.candidate_topk_blocks * model.config.candidate_block_size
    length = max(capacity, model.layout.ring_length) + 9
    for first in {1, 2, page - 1, page, page + 1, window - 1, window, window + 1, capacity - 1, capacity}:
        _check_split(model, length, [first], 5)
    for first in (capacity + 1, model.layout.ring_length - 1, model.layout.ring_length + 1):
        _check_split(model, length, [first, 1, 2], 5)


def test_token_by_token(name: str) -> None:
    model = property_model(name)
    _check_split(model, model.config.sliding_window + 9, [1] * 200, 6)


def _run_interleaved(model: DeepseekV41, lengths: list[int], seed: int, data: st.DataObject) -> None:
    """Sequences advance by random numbers of rows in random order beside random mates; padding rows in between."""
    sequences = _sequences(model, lengths, seed)
    page = model.layout.page_size
    driver = Driver(model, slots=len(lengths), pages=sum(-(-length // page) for length in lengths), shuffle=seed)
    got: dict[int, list[Tensor]] = {slot: [] for slot in sequences}
    pending = dict(sequences)
    while pending:
        order = data.draw(st.permutations(sorted(pending)))
        mates = order[: data.draw(st.integers(1, len(order)))]
        counts = {slot: data.draw(st.integers(1, 33)) for slot in mates}
        parts = [Part(slot, pending[slot][: counts[slot]]) for slot in mates]
        driver.admit(*(slot for slot in mates if slot not in driver.lengths))
        gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
        bucket = sum(part.rows for part in parts) + data.draw(st.integers(0, 19))
        for slot, logits in driver.run(parts, row_bucket=bucket, gaps=gaps).items():
            got[slot].append(logits)
            pending[slot] = pending[slot][counts[slot] :]
            if not pending[slot]:
                del pending[slot]
    for slot, tokens in sequences.items():
        assert torch.equal(torch.cat(got[slot]), _alone(model, tokens)), slot


@FEW
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=4), seed=st.integers(0, 3), data=st.data())
def test_any_batch_mates_order_padding_and_pages(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    _run_interleaved(property_model(name), lengths, seed, data)


@pytest.mark.slow
@MANY
@given(lengths=st.lists(st.integers(1, 90), min_size=2, max_size=8), seed=st.integers(0, 99), data=st.data())
def test_any_larger_batch(name: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    _run_interleaved(property_model(name), lengths, seed, data)


def test_row_order_within_a_step(name: str) -> None:
    model = property_model(name)
    sequences = _sequences(model, [9, 1, 24, 3], 11)
    for order in ([1, 2, 3, 4], [4, 3, 2, 1], [3, 1, 4, 2]):
        driver = Driver(model, slots=4, pages=16)
        driver.admit(*order)
        logits = driver.run([Part(slot, sequences[slot]) for slot in order])
        for slot, tokens in sequences.items():
            assert torch.equal(logits[slot], _alone(model, tokens)), (order, slot)


def test_decode_rows_beside_prefill_rows(name: str) -> None:
    model = property_model(name)
    prompt, other = random_tokens(model, 21, 1), tuple(random_tokens(model, 40, 2))
    driver = Driver(model, slots=2, pages=16)
    driver.admit(1, 2)
    ids = [int(driver.prefill(1, prompt)[-1].argmax())]
    rows = []
    for start in range(0, 40, 10):
        logits = driver.run([Part(2, other[start : start + 10]), Part(1)], gaps=[2, 1], row_bucket=17)
        rows.append(logits[1][0])
        ids.append(int(rows[-1].argmax()))
    expected = _alone(model, tuple(prompt + ids[:-1]))
    assert torch.equal(torch.stack(rows), expected[len(prompt) :])


def test_page_order_changes_nothing(name: str) -> None:
    model = property_model(name)
    tokens = tuple(random_tokens(model, 60, 3))
    for seed in (1, 2):
        driver = Driver(model, slots=3, pages=20, shuffle=seed)
        driver.admit(3)
        assert torch.equal(driver.prefill(3, tokens, [13, 20]), _alone(model, tokens))
        assert driver.pages_of(3) != sorted(driver.pages_of(3))


def test_threads_change_no_bit(name: str) -> None:
    model = property_model(name)
    tokens = tuple(random_tokens(model, 70, 4))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            driver = Driver(model, slots=2, pages=24)
            driver.admit(1, 2)
            mixed = driver.run([Part(1, tokens[:50]), Part(2, tokens[:3])])
            rows = torch.cat((mixed[1], mixed[2], driver.decode(1)[None], driver.decode(2)[None]))
            draft = driver.draft(1, 2)
            results.append((rows, draft.logits, draft.ids, draft.confidences))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_drafts_of_a_batch(name: str) -> None:
    model = property_model(name)
    sequences = _sequences(model, [1, 17, 40], 8)
    together = Driver(model, slots=3, pages=16)
    together.admit(1, 2, 3)
    together.run([Part(slot, sequences[slot]) for slot in (2, 3, 1)])
    batch = together.draft(3, 1, 2)
    for row, slot in enumerate((3, 1, 2)):
        alone = Driver(model, slots=1, pages=8)
        alone.admit(1)
        alone.prefill(1, sequences[slot], [5, 7])
        draft = alone.draft(1)
        assert torch.equal(batch.logits[row], draft.logits[0]), slot
        assert torch.equal(batch.ids[row], draft.ids[0])
        assert torch.equal(batch.confidence_logits[row], draft.confidence_logits[0])

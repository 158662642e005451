"""Caches: poison leaks nowhere, rejected rows leave nothing, slots and pages are reused safely, windows end exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.driver import Driver, Part
from support.models import FEW, GOLDEN_SLOW, property_model, random_tokens
from support.recorder import recording_graph
from torch import Tensor

from deepinfer.cache.layout import POISON
from deepinfer.models.deepseek_v41.spec import DeepseekV41

pytestmark = pytest.mark.parametrize("name", GOLDEN_SLOW)


def _live(driver: Driver, slot: int) -> list[tuple[str, Tensor]]:
    """Everything that a later step of a sequence may read: bytes of its rings, states, entries and index keys."""
    model, length = driver.model, driver.lengths[slot]
    layout, window = model.layout, model.config.sliding_window
    # The next row at p = length reads back to p - W + 1.
    positions = torch.arange(max(0, length - window + 1), length)
    found = [
        (f"ring {index}", ring[slot, positions % layout.ring_length]) for index, ring in enumerate(driver.storage.rings)
    ]
    pages = torch.tensor(driver.pages_of(slot), dtype=torch.int64)
    for layer, cache in driver.storage.entry_caches.items():
        count = length // cache.ratio
        entries = torch.arange(count)
        page, offset = pages[entries // cache.entries_per_page], entries % cache.entries_per_page
        found.append((f"entries {layer}", cache.entries[page, offset]))
        keys = model.table.gather_index_keys(
            cache.index_keys, (page * cache.entries_per_page + offset)[None], cache.index_format
        )
        found.append((f"index keys {layer}", keys[0]))
        if cache.state is not None:
            open_group = torch.arange(length - length % cache.ratio, length)
            found.append((f"state {layer}", cache.state[slot, open_group % layout.state_length]))
    return found


def _same_live(left: Driver, right: Driver, slot: int) -> None:
    assert left.lengths[slot] == right.lengths[slot]
    for (what, ours), (_, theirs) in zip(_live(left, slot), _live(right, slot), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), what


def _fresh(model: DeepseekV41, **options: Any) -> Driver:
    driver = Driver(model, **{"slots": 2, "pages": 24, **options})
    driver.admit(1)
    return driver


def _story(driver: Driver, first: tuple[int, ...], second: tuple[int, ...]) -> list[Tensor]:
    """Two sequences in chunks with padding, decode rows, a rejected verification and drafts."""
    driver.admit(2)
    rows = [driver.run([Part(1, first[:17]), Part(2, second[:5])], gaps=[2, 3], row_bucket=40)]
    rows.append(driver.run([Part(2, second[5:]), Part(1, first[17:])], gaps=[1, 0], row_bucket=64))
    results = [logits for step in rows for logits in step.values()]
    results += driver.run([Part(1), Part(2)], row_bucket=7).values()
    results.append(driver.verify(1, [5, 6, 7, 8], rejected=2))
    draft = driver.draft(1, 2)
    results += [draft.logits, draft.ids, draft.confidences]
    return [*results, driver.decode(1), driver.decode(2)]


def test_unwritten_memory_is_never_read(name: str) -> None:
    model = property_model(name)
    first, second = tuple(random_tokens(model, 43, 1)), tuple(random_tokens(model, 26, 2))
    poisoned, zeroed, other = (_story(_fresh(model, fill=fill), first, second) for fill in (POISON, 0x00, 0x5A))
    for one, two, three in zip(poisoned, zeroed, other, strict=True):
        assert bool(torch.isfinite(one.double()).all())
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_memory_of_others_is_never_written(name: str) -> None:
    model = property_model(name)
    driver = Driver(model, slots=3, pages=40)
    driver.admit(1)
    _story(driver, tuple(random_tokens(model, 43, 1)), tuple(random_tokens(model, 26, 2)))
    owned = {page for slot in (1, 2) for page in driver.pages_of(slot)}
    others = [page for page in range(driver.storage.pages.shape[0]) if page not in owned]
    assert bool((driver.storage.pages[others] == POISON).all())
    assert bool((driver.storage.slots[[0, 3]] == POISON).all())


def test_a_step_of_padding_alone_writes_nothing(name: str) -> None:
    model = property_model(name)
    driver = _fresh(model)
    driver.prefill(1, random_tokens(model, 20, 3))
    before = driver.storage.pages.clone(), driver.storage.slots.clone()
    step = driver.step([], row_bucket=9)
    assert step.logits == {}
    driver.commit(step, [])
    assert torch.equal(before[0], driver.storage.pages)
    assert torch.equal(before[1], driver.storage.slots)


@FEW
@given(
    length=st.integers(1, 50),
    rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_rejected_rows_equal_never_having_run(name: str, length: int, rounds: list[tuple[int, int]], seed: int) -> None:
    model = property_model(name)
    prompt = random_tokens(model, length, seed)
    tokens = iter(random_tokens(model, 60, seed + 50))
    verified, plain = _fresh(model), _fresh(model)
    verified.prefill(1, prompt)
    plain.prefill(1, prompt)
    for drafts, refused in rounds:
        rejected = min(refused, drafts)
        rows = [next(tokens) for _ in range(1 + drafts)]
        logits = verified.verify(1, rows, rejected)
        kept = len(rows) - rejected
        for row in range(kept):
            assert torch.equal(plain.verify(1, rows[row : row + 1])[0], logits[row]), row
        _same_live(verified, plain, 1)
        drafted, expected = verified.draft(1, anchors=[7]), plain.draft(1, anchors=[7])
        assert torch.equal(drafted.logits, expected.logits)
    follow = random_tokens(model, 3, seed + 90)
    assert torch.equal(verified.prefill(1, follow), plain.prefill(1, follow))


def test_rejections_again_and_again_past_the_ring(name: str) -> None:
    model = property_model(name)
    prompt = random_tokens(model, model.config.sliding_window + 3, 4)
    verified, plain = _fresh(model), _fresh(model)
    verified.prefill(1, prompt)
    plain.prefill(1, prompt)
    for position in range(len(prompt), len(prompt) + model.layout.ring_length + 3, 2):
        wrong = [(position * 7 + back) % model.config.vocab_size for back in range(6)]
        logits = verified.verify(1, wrong, rejected=4)
        assert torch.equal(logits[:2], plain.verify(1, wrong[:2])), position
    _same_live(verified, plain, 1)


@FEW
@given(length=st.integers(2, 60), data=st.data())
def test_no_row_sees_later_tokens(name: str, length: int, data: st.DataObject) -> None:
    model = property_model(name)
    tokens = random_tokens(model, length, 7)
    changed = list(tokens)
    where = data.draw(st.integers(1, length - 1))
    changed[where] = (changed[where] + 1) % model.config.vocab_size
    left, right = _fresh(model).prefill(1, tokens), _fresh(model).prefill(1, changed)
    assert torch.equal(left[:where], right[:where])
    assert not torch.equal(left[where], right[where])


def test_a_slot_and_its_pages_are_reused_without_a_trace(name: str) -> None:
    model = property_model(name)
    long, short = random_tokens(model, 60, 8), random_tokens(model, 23, 9)
    driver = _fresh(model, pages=9)
    driver.prefill(1, long)
    driver.decode(1)
    driver.verify(1, [3, 4, 5], rejected=1)
    old = set(driver.pages_of(1))
    driver.release(1)
    driver.admit(1)
    reused, fresh = driver.prefill(1, short, [4, 9]), _fresh(model).prefill(1, short)
    assert set(driver.pages_of(1)) <= old
    assert torch.equal(reused, fresh)
    again = _fresh(model)
    again.prefill(1, short)
    assert torch.equal(driver.draft(1).logits, again.draft(1).logits)
    assert torch.equal(driver.decode(1), again.decode(1))


def test_two_sequences_alternate_in_one_slot(name: str) -> None:
    model = property_model(name)
    first, second = random_tokens(model, 30, 10), random_tokens(model, 30, 11)
    driver, results = Driver(model, slots=1, pages=6), []
    for tokens in (first, second, first):
        driver.admit(1)
        results.append(driver.prefill(1, tokens, [9]))
        driver.release(1)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def _decode_with_poison(model: DeepseekV41, tokens: list[int], position: int) -> Tensor:
    driver = _fresh(model)
    driver.prefill(1, tokens)
    for ring in driver.storage.rings[: model.config.num_hidden_layers]:
        ring[1, position % model.layout.ring_length] = POISON
    return driver.decode(1)


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_the_window_ends_exactly(name: str, extra: int) -> None:
    model = property_model(name)
    window = model.config.sliding_window
    tokens = random_tokens(model, window + extra, 12)
    driver = _fresh(model)
    driver.prefill(1, tokens)
    expected, position = driver.decode(1), len(tokens)
    assert torch.equal(_decode_with_poison(model, tokens, position - window), expected)
    assert bool(_decode_with_poison(model, tokens, position - window + 1).isnan().any())


def test_old_rows_are_read_before_a_long_chunk_overwrites_them(name: str) -> None:
    model = property_model(name)
    tokens = random_tokens(model, 2 * model.layout.ring_length + 11, 13)
    whole = _fresh(model).prefill(1, tokens)
    for first in (3, model.config.sliding_window, model.layout.ring_length):
        assert torch.equal(_fresh(model).prefill(1, tokens, [first]), whole)


def test_a_group_is_pooled_alike_however_its_tokens_arrive(name: str) -> None:
    model = property_model(name)
    tokens = random_tokens(model, 24, 14)
    together, apart, decoded = _fresh(model), _fresh(model), _fresh(model)
    together.prefill(1, tokens)
    apart.prefill(1, tokens, [1, 2, 2, 3, 1, 5])
    decoded.prefill(1, tokens[:3])
    for token in tokens[3:]:
        decoded.verify(1, [token])
    _same_live(together, apart, 1)
    _same_live(together, decoded, 1)


@FEW
@given(chunks=st.lists(st.integers(1, 9), max_size=10), rejected=st.integers(0, 4))
def test_ngrams_reach_across_chunks_and_rollbacks(name: str, chunks: list[int], rejected: int) -> None:
    model = property_model(name)
    tokens, wrong = random_tokens(model, 32, 15), random_tokens(model, 5, 16)

    layers = len(model.config.engram_layer_ids)
    graph, recorder = recording_graph(model, "engram_hash")
    _fresh(model, graph=graph).prefill(1, tokens)
    expected = [call.result[21:] for call in recorder.calls["engram_hash"]]
    recorder.calls.clear()
    driver = _fresh(model, graph=graph)
    driver.prefill(1, tokens[:20], chunks)
    driver.verify(1, [tokens[20], *wrong[:rejected]], rejected)
    recorder.calls.clear()
    driver.prefill(1, tokens[21:], [1, 2])
    calls = [call.result for call in recorder.calls["engram_hash"]]
    for layer in range(layers):
        assert torch.equal(torch.cat(calls[layer::layers]), expected[layer])

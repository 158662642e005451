"""The drafter (spec/model 7.8): what its blocks depend on and what they do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.driver import Driver
from support.models import GOLDEN_SLOW, property_model, random_tokens

from deepinfer.cache.layout import POISON
from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.ops.draft import DraftResult

pytestmark = pytest.mark.parametrize("name", GOLDEN_SLOW)


def _driver(model: DeepseekV41, length: int, graph: Graph | None = None) -> Driver:
    driver = Driver(model, slots=2, pages=16, graph=graph)
    driver.admit(1)
    driver.prefill(1, random_tokens(model, length, length))
    return driver


def _same(left: DraftResult, right: DraftResult) -> bool:
    return torch.equal(left.logits, right.logits) and torch.equal(left.confidence_logits, right.confidence_logits)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_only_the_window_of_the_stage_rings_is_read(name: str, length: int) -> None:
    model = property_model(name)
    driver = _driver(model, length)
    expected = driver.draft(1)
    assert bool(torch.isfinite(expected.logits).all())
    ring_length, window = model.layout.ring_length, model.config.sliding_window
    visible = {position % ring_length for position in range(max(0, length - window), length)}
    stale = [place for place in range(ring_length) if place not in visible]
    stages = driver.storage.rings[model.config.num_hidden_layers :]
    for fill in (POISON, 0x00, 0x33):
        for ring in stages:
            ring[1, stale] = fill
        assert _same(driver.draft(1), expected)
    for ring in stages:
        ring[1, max(0, length - window) % ring_length] = POISON
    assert bool(driver.draft(1).logits.isnan().any())


def test_a_draft_leaves_no_trace(name: str) -> None:
    driver = _driver(property_model(name), 20)
    before = driver.storage.slots.clone(), driver.storage.pages.clone()
    driver.draft(1)
    assert torch.equal(driver.storage.slots, before[0])
    assert torch.equal(driver.storage.pages, before[1])


def test_rejected_drafts_leave_no_trace(name: str) -> None:
    model = property_model(name)
    results = []
    for wrong in ([3, 4, 5, 6, 7], [8, 9, 10, 11, 12], []):
        driver = _driver(model, 30)
        driver.verify(1, [17, *wrong], rejected=len(wrong))
        results.append(driver.draft(1, anchors=[21]))
    assert _same(results[0], results[1])
    assert _same(results[0], results[2])


def test_rows_of_a_block_see_each_other(name: str) -> None:
    model = property_model(name)
    draft = model.weights.draft
    assert draft is not None
    driver = _driver(model, 12)
    expected = driver.draft(1, anchors=[7])
    other = dataclasses.replace(draft, noise_token=(draft.noise_token + 1) % model.config.vocab_size)
    driver.graph = Graph(model.config, dataclasses.replace(model.weights, draft=other), model.table)
    changed = driver.draft(1, anchors=[7])
    # Row 0 holds the anchor and sees the filler rows behind it.
    assert not torch.equal(changed.logits[0, 0], expected.logits[0, 0])


def test_the_anchor_reaches_every_row(name: str) -> None:
    driver = _driver(property_model(name), 12)
    left, right = driver.draft(1, anchors=[7]), driver.draft(1, anchors=[8])
    assert bool((left.confidence_logits != right.confidence_logits).all())
    assert bool((left.logits != right.logits).any(-1).all())


def test_padding_sequences_change_nothing(name: str) -> None:
    model = property_model(name)
    driver = _driver(model, 25)
    expected = driver.draft(1, anchors=[7])
    anchors, positions, slots = torch.tensor([-1, 7, -1]), torch.tensor([-1, 24, -1]), torch.tensor([-1, 1, -1])
    with torch.inference_mode():
        padded = model.draft(anchors, positions, slots, driver.storage)
    assert torch.equal(padded.logits[1], expected.logits[0])
    assert torch.equal(padded.confidence_logits[1], expected.confidence_logits[0])


def test_confidences_are_sigmoids_of_their_logits(name: str) -> None:
    result = _driver(property_model(name), 9).draft(1)
    torch.testing.assert_close(result.confidences, torch.sigmoid(result.confidence_logits))
    assert result.ids.dtype is torch.int64
    assert torch.equal(result.ids, result.logits.argmax(-1))


def test_greedy_drafting_gives_the_greedy_continuation(name: str) -> None:
    model = property_model(name)
    plain = _driver(model, 19)
    expected = [int(plain.records.next_token[1])]
    while len(expected) < 12:
        expected.append(int(plain.decode(1).argmax()))
    driver = _driver(model, 19)
    ids = [int(driver.records.next_token[1])]
    while len(ids) < 12:
        drafts = driver.draft(1, anchors=[ids[-1]]).ids[0].tolist()
        logits = driver.verify(1, [ids[-1], *drafts], rejected=0)
        best = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == best[accepted]:
            accepted += 1
        rejected = len(drafts) - accepted
        driver.records.length[1] -= rejected
        driver.lengths[1] -= rejected
        ids += best[: accepted + 1]
    assert ids[:12] == expected

"""Bounded replay of the consumer half: `compact` against its oracle `mask`, and against no replay (spec/model 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from support.driver import Driver, Part, splits_of
from support.models import property_model
from torch import Tensor

from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.models.deepseek_v41.spec import DeepseekV41

KEEP = 28
LENGTH = 90
EXACT_KEEP = 61
"""1 + (window - 1) x 4 consumer layers of the tiny preset: from here on the last row misses nothing."""


class ReplayGraph(Graph):
    """A graph whose steps all belong to one prompt with the given keep start."""

    keep_from = 0

    def forward(self, step, storage):  # type: ignore[no-untyped-def]
        keep = torch.where(step.positions >= 0, self.keep_from, -1)
        kept = int(((step.positions >= keep) & (step.positions >= 0)).sum())
        return super().forward(dataclasses.replace(step, keep_from=keep, kept_bucket=max(kept, 1)), storage)


def _driver(model: DeepseekV41, mode: Literal["compact", "mask"], keep: int, length: int = LENGTH) -> Driver:
    graph = ReplayGraph(model.config, model.weights, model.table, replay=mode)
    graph.keep_from = max(0, length - keep)
    driver = Driver(model, graph=graph)
    driver.admit(1)
    return driver


def _run(driver: Driver, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of the last row of the prompt, then of four decoded rows."""
    for start, end in splits_of(len(tokens), chunks):
        step = driver.step([Part(1, tuple(tokens[start:end]))])
        driver.commit(step, tokens=[7])
    rows = [step.logits[1][-1]]
    for _ in range(4):
        decoded = driver.step([Part(1)])
        driver.commit(decoded, tokens=[11])
        rows.append(decoded.logits[1][0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def tiny_release() -> DeepseekV41:
    return property_model("tiny-release")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(10, 500, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("chunks", [(), (LENGTH - KEEP,), (40, 30), (70, 7, 1), (33,)])
def test_compact_equals_mask_bit_for_bit(tiny_release: DeepseekV41, tokens: list[int], chunks: tuple[int, ...]) -> None:
    oracle = _driver(tiny_release, "mask", KEEP)
    compact = _driver(tiny_release, "compact", KEEP)
    assert torch.equal(_run(compact, tokens, chunks), _run(oracle, tokens, chunks))
    pages = torch.tensor(oracle.pages_of(1))
    assert torch.equal(compact.storage.pages[pages], oracle.storage.pages[pages])


def test_chunks_change_nothing(tiny_release: DeepseekV41, tokens: list[int]) -> None:
    whole = _run(_driver(tiny_release, "compact", KEEP), tokens, ())
    for chunks in ((1,), (61, 1, 1), (16, 16, 16, 16, 16)):
        assert torch.equal(_run(_driver(tiny_release, "compact", KEEP), tokens, chunks), whole)


def test_a_long_suffix_equals_no_replay_on_the_last_row(tiny_release: DeepseekV41, tokens: list[int]) -> None:
    plain = Driver(tiny_release)
    plain.admit(1)
    expected = _run(plain, tokens, ())
    assert torch.equal(_run(_driver(tiny_release, "compact", EXACT_KEEP + 5), tokens, ())[0], expected[0])
    # A short suffix is an approximation: another result says that rows are really left out.
    assert not torch.equal(_run(_driver(tiny_release, "compact", KEEP), tokens, ())[0], expected[0])


def test_drafts_follow_the_kept_rows(tiny_release: DeepseekV41, tokens: list[int]) -> None:
    blocks = []
    for mode in ("mask", "compact"):
        driver = _driver(tiny_release, mode, KEEP)
        _run(driver, tokens, (50,))
        blocks.append(driver.draft(1, anchors=[9]))
    assert torch.equal(blocks[0].ids, blocks[1].ids)
    assert torch.equal(blocks[0].logits, blocks[1].logits)

"""Exact selection beyond the samples of its contract: many chunks, scores that need all bits, both zeros."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops import indexer

pytest.importorskip("triton", reason="Triton is not installed")

from deepinfer_cuda.kernels import selection

ENTRIES = 200
BLOCK_SIZE, BLOCKS = 8, 5


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Rows of float32 numbers, bfloat16 numbers, zeros of both signs, few and no visible entries."""
    monkeypatch.setattr(selection, "CHUNK", 64)
    scores = torch.randn(6, ENTRIES, generator=torch.Generator().manual_seed(1))
    scores[1] = scores[1].bfloat16().float()
    scores[2, ::2], scores[2, 1::2] = 0.0, -0.0
    scores[3, 9:] = -torch.inf
    scores[4] = -torch.inf
    return scores


@pytest.mark.parametrize("top_k", [1, 17, 70, ENTRIES + 3])
def test_topk_equals_a_stable_sort(scores: torch.Tensor, top_k: int) -> None:
    assert torch.equal(selection.select_topk(scores, top_k), indexer.select_topk(scores, top_k))


def test_blocks_equal_the_reference(scores: torch.Tensor) -> None:
    visible = torch.tensor([ENTRIES, ENTRIES, ENTRIES - 3, 9, 0, ENTRIES])
    blocks = selection.candidate_blocks(scores, visible, BLOCK_SIZE, BLOCKS)
    assert torch.equal(blocks, indexer.candidate_blocks(scores, visible, BLOCK_SIZE, BLOCKS))
    restricted = selection.restrict_to_blocks(scores, blocks, BLOCK_SIZE)
    assert torch.equal(restricted, indexer.restrict_to_blocks(scores, blocks, BLOCK_SIZE))

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.ops.contract import CONTRACTS, Determinism
from deepinfer.ops.grammar_mask import apply_token_mask

SIZES: list[Any] = ["tiny", "odd", "real"]


def _samples(size: Any) -> list[Any]:
    samples = CONTRACTS["apply_token_mask"].samples
    assert samples is not None
    return list(samples(size, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("size", SIZES[:2])
def test_every_bit(size: Any) -> None:
    for sample in _samples(size):
        logits, mask, rows = (sample.kwargs[name] for name in ("logits", "mask", "mask_rows"))
        result = apply_token_mask(**sample.kwargs)
        assert result.shape == logits.shape
        for row in range(logits.shape[0]):
            for token in range(logits.shape[1]):
                words = mask[rows[row]].tolist() if rows[row] >= 0 else None
                is_allowed = words is None or (words[token // 32] >> token % 32) & 1
                assert result[row, token] == (logits[row, token] if is_allowed else -torch.inf)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_independent_and_inputs_are_kept(size: Any) -> None:
    for sample in _samples(size):
        copies = {name: value.clone() for name, value in sample.kwargs.items()}
        whole = apply_token_mask(**sample.kwargs)
        for name, value in copies.items():
            assert torch.equal(value, sample.kwargs[name])
        logits, mask, rows = (sample.kwargs[name] for name in ("logits", "mask", "mask_rows"))
        for row in range(logits.shape[0]):
            alone = apply_token_mask(logits[row : row + 1], mask, rows[row : row + 1])
            assert torch.equal(alone[0], whole[row])


def test_contract_is_exact_and_bad_logits_stay_visible() -> None:
    contract = CONTRACTS["apply_token_mask"]
    assert contract.determinism is Determinism.EXACT
    assert contract.family == "grammar_mask"
    logits = torch.tensor([[float("nan"), 1.0, float("inf")]])
    result = apply_token_mask(logits, torch.tensor([[0b101]], dtype=torch.int32), torch.tensor([0]))
    assert result[0, 0].isnan()
    assert result[0, 1] == -torch.inf
    assert result[0, 2] == torch.inf


def test_bits_past_the_vocabulary_do_not_matter() -> None:
    logits = torch.zeros(1, 33)
    low, high = torch.tensor([[1, 1]], dtype=torch.int32), torch.tensor([[1, -1]], dtype=torch.int32)
    rows = torch.tensor([0])
    assert torch.equal(apply_token_mask(logits, low, rows), apply_token_mask(logits, high, rows))

"""Drafts per step against the block that the checkpoint was trained for."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import tiny_checkpoint

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError

BLOCK = 5
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def served(drafts: int | None) -> tuple[Any, Any]:
    """What a prompt says with so many drafts, and the statistics of speculation."""
    options = {"batch_invariant": True, "page_size": 16, "max_model_len": 64, "max_num_seqs": 2}
    with LLM(tiny_checkpoint(), accelerator="cpu", use_nextn_decode=drafts, **options) as llm:
        (output,) = llm.generate([[7, 8, 9, 10]], PARAMS, use_tqdm=False)
        return output.outputs[0], llm.stats.speculation


@pytest.mark.parametrize("drafts", [BLOCK + 1, BLOCK + 2])
def test_more_drafts_than_the_block_are_refused_with_the_number(drafts: int) -> None:
    """H12: they would be accepted next to never, without a word."""
    message = rf"use_nextn_decode: {drafts} drafts per step .* blocks of {BLOCK}; use a value from 0 to {BLOCK}"
    with pytest.raises(ConfigError, match=message):
        served(drafts)


def test_a_negative_number_of_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use_nextn_decode: -1 is not allowed"):
        served(-1)


def test_fewer_drafts_are_served_and_recorded() -> None:
    """H12: the statistics say how many were proposed, and the output is that of any other number."""
    plain, nothing = served(0)
    assert nothing is None
    for drafts in (3, BLOCK, None):
        output, statistics = served(drafts)
        assert statistics.num_drafts == (drafts or BLOCK)
        assert statistics.drafted.tolist()[0] > 0
        assert (output.token_ids, output.logprobs) == (plain.token_ids, plain.logprobs)

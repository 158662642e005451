"""Bounded replay through the engine: the oracle, chunks, prefix hits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import tiny_checkpoint

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, InvalidRequest

KEEP = 28
"""The least for a window of 16 and drafts of 5."""

PROMPTS = [list(range(10, 10 + length)) for length in (3, KEEP, 40, 97, 130)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=1)


def _tokens(mode: str, *, keep: int = KEEP, rounds: int = 1, **settings: Any) -> list[list[Any]]:
    """Ids and log-probabilities of every prompt, by round."""
    options = {"batch_invariant": True, "page_size": 16, "use_nextn_decode": 5, **settings}
    with LLM(tiny_checkpoint(), yoco_prefill_truncation_mode=mode, yoco_prefill_keep_tokens=keep, **options) as llm:
        runs = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(rounds)]
    return [[(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in run] for run in runs]


def test_compact_and_mask_say_the_same() -> None:
    assert _tokens("compact") == _tokens("mask")


def test_replay_is_an_approximation_of_the_whole_prompt() -> None:
    off, compact = _tokens("off", keep=0)[0], _tokens("compact")[0]
    # Prompts within the kept suffix lose nothing.
    assert compact[:2] == off[:2]
    assert all(kept != whole for kept, whole in zip(compact[2:], off[2:], strict=True))


def test_chunks_and_order_of_steps_change_nothing() -> None:
    whole = _tokens("compact", max_num_batched_tokens=512)
    assert _tokens("compact", max_num_batched_tokens=33) == whole
    assert _tokens("compact", max_prefill_chunk=7, zero_overhead_scheduling=False) == whole


def test_a_prefix_hit_changes_nothing() -> None:
    cold, hot = _tokens("compact", rounds=2)
    assert hot == cold


def test_too_few_kept_tokens_are_refused_with_the_least() -> None:
    with pytest.raises(ConfigError, match=rf"27 kept tokens are too few .* use at least {KEEP}"):
        _tokens("compact", keep=27)


def test_prompt_logprobs_need_every_row() -> None:
    with (
        LLM(tiny_checkpoint(), yoco_prefill_truncation_mode="compact", yoco_prefill_keep_tokens=KEEP) as llm,
        pytest.raises(InvalidRequest, match=r"prompt_logprobs: .*DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"),
    ):
        llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=1), use_tqdm=False)

"""The engine's features on the NPU: whatever happens around a request, it says what the CPU says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams

pytest.importorskip("xgrammar")

SMALL: dict[str, Any] = {
    "accelerator": "ascend",
    "compute_dtype": "float32",
    "activation_quant": False,
    "cache_quant": False,
    "page_size": 16,
    "memory_utilization": 0.5,
    "max_model_len": 128,
    "num_pages": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
"""float32 without quantisers: a sum in another order cannot change a choice there but by great bad luck."""

PROMPTS = [
    list(range(3, 20)),
    [*range(3, 20), 400, 401, 402],
    [77],
    list(range(100, 140)),
    list(range(200, 233)),
    [5, 6, 7],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, seed=11, max_tokens=7, ignore_eos=True, top_k=50, top_p=0.9),
    SamplingParams(temperature=1, seed=12, max_tokens=8, n=2, repetition_penalty=1.2, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, presence_penalty=0.5, logit_bias={300: 3.0}),
    SamplingParams(temperature=1, seed=13, max_tokens=8, structured_output={"regex": "[a-f]{2}[0-9]{3}"}),
    SamplingParams(temperature=0, max_tokens=6, structured_output={"choices": ["yes", "no"]}),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "synchronous": {"zero_overhead_scheduling": False},
    "no drafts": {"use_nextn_decode": 0},
    "one draft": {"use_nextn_decode": 1},
    "no graphs": {"enforce_eager": True},
    "chunks of 7": {"max_prefill_chunk": 7},
    "preemption": {"preempt_every": 3},
    "preemption, synchronous, no graphs": {
        "preempt_every": 2,
        "zero_overhead_scheduling": False,
        "enforce_eager": True,
    },
    "recomputation": {"preempt_every": 3, "preemption_host_bytes": 0},
    "hot prefixes": {"prefix_snapshots": 16},
}


def take_waits() -> dict[str, int]:
    """What the host waited for since the last call; only the simulated runtime can tell."""
    simulated = sys.modules.get("simulated_operators")
    return {} if simulated is None else simulated.take_waits()


def said(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [[(part.token_ids, part.text, part.finish_reason) for part in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Any]]:
    with LLM("tiny", **{**SMALL, "accelerator": "cpu", "use_nextn_decode": 0}) as llm:
        yield said(llm)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_says_what_the_cpu_says(expected: list[Any], name: str) -> None:
    options = {**SMALL, **VARIANTS[name]}
    preempt_every = options.pop("preempt_every", 0)
    with LLM("tiny", **options) as llm:
        core = llm._core
        core.scheduler.config = replace(core.scheduler.config, preempt_every=preempt_every)
        llm.generate([[3]], SamplingParams(max_tokens=1), use_tqdm=False)  # Constants reach the device once.
        take_waits()
        assert said(llm) == expected
        assert take_waits() == {}
        if "prefix_snapshots" in options:
            assert said(llm) == expected
            assert core.scheduler.prefix.stats.hit_tokens > 0
        assert (core.stats.preemptions > 0) == (preempt_every > 0)
        assert (core.stats.recomputations > 0) == (name == "recomputation")
        drafts = options.get("use_nextn_decode", 5)
        assert (core.speculation is not None and sum(core.speculation.verified) > 0) == (drafts > 0)
        graphs = core.runner.graphs
        assert (graphs is None) == options.get("enforce_eager", False)
        assert graphs is None or graphs.replays > 0
        core.scheduler.assert_idle()

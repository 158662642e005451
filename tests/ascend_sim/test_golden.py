"""Golden set A in float32 through the public API, with torch_npu's operators on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_operators
from support.golden import GoldenSet, golden_sets, missing_golden

from deepinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "accelerator": "ascend",
    "compute_dtype": "float32",
    "activation_quant": False,
    "cache_quant": False,
    "max_model_len": 640,
    "page_size": 16,
    "num_pages": 160,
    "memory_utilization": 0.5,
}


@pytest.fixture(scope="module")
def golden() -> GoldenSet:
    found = golden_sets()
    if not found:
        missing_golden()
    return found[0]


@pytest.fixture(scope="module")
def llm(golden: GoldenSet):
    with LLM(golden.path, **OPTIONS) as llm:
        yield llm


def test_greedy_tokens_are_the_recorded_ones(llm: LLM, golden: GoldenSet) -> None:
    prompts = sorted(golden.prompts, key=lambda prompt: prompt.length)
    outputs = llm.generate([prompt.ids for prompt in prompts], GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    recorded = [prompt["off.greedy"].tolist() for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == recorded
    called = simulated_operators.take_calls()
    assert {"npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_grouped_matmul"} <= set(called)

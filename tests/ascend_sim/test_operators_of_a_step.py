"""Which operators the engine asks of the device, and which of them torch_npu would run on the host."""

from __future__ import annotations

import simulated_operators

from ascend_sim.test_golden import OPTIONS
from deepinfer import LLM, SamplingParams

TOKENS = 4
FUSED = {"npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_quant_matmul", "npu::npu_grouped_matmul"}


def family(name: str) -> str:
    """Name without overload and in-place mark: one kernel of the out= form serves all forms of an operator."""
    return name.partition(".")[0].rstrip("_")


def test_no_operator_of_a_step_runs_on_the_host():
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    release = {**OPTIONS, "compute_dtype": "bfloat16", "activation_quant": True, "cache_quant": True}
    with LLM("tiny", **release) as llm:
        llm.generate([[3]], SamplingParams(max_tokens=1), use_tqdm=False)  # Constants reach the device once.
        simulated_operators.take_calls()
        simulated_operators.take_waits()
        (output,) = llm.generate([list(range(3, 20))], greedy, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == TOKENS
    assert simulated_operators.take_waits() == {}, (
        "the host reads results behind their events, and waits for nothing else"
    )
    calls = simulated_operators.take_calls()
    assert {name for name in calls if name.startswith("npu::")} == FUSED
    known = {family(name) for name in simulated_operators.native()}
    assert {name for name in set(calls) - FUSED if family(name) not in known} == set()

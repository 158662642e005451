"""The golden continuations through the public API: every prompt alone, all together, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.golden import GoldenSet

from deepinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def _options(mode: str) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "compute_dtype": "float32",
        "activation_quant": False,
        "cache_quant": mode == "on",
        "max_model_len": 640,
        "page_size": 16,
        "num_pages": 160,
        "num_threads": 1,
        "poison_released": True,
    }


@pytest.fixture
def llm(golden: GoldenSet, mode: str) -> Iterator[LLM]:
    with LLM(golden.path, **_options(mode)) as llm:
        yield llm


def _check(llm: LLM, golden: GoldenSet, mode: str, *, together: bool) -> None:
    recorded = [prompt[f"{mode}.greedy"].tolist() for prompt in golden.prompts]
    prompts = [prompt.ids for prompt in golden.prompts]
    if together:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    else:
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [output.error for output in outputs] == [None] * len(prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == recorded
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    llm._core.scheduler.assert_idle()


def test_every_prompt_alone(llm: LLM, golden: GoldenSet, mode: str) -> None:
    _check(llm, golden, mode, together=False)


def test_all_prompts_together(llm: LLM, golden: GoldenSet, mode: str) -> None:
    _check(llm, golden, mode, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 64])
def test_all_prompts_together_in_small_steps(golden: GoldenSet, mode: str, budget: int) -> None:
    with LLM(golden.path, **_options(mode), max_num_seqs=9, max_num_batched_tokens=budget) as llm:
        _check(llm, golden, mode, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64])
def test_every_prompt_alone_in_chunks(golden: GoldenSet, mode: str, chunk: int) -> None:
    with LLM(golden.path, **_options(mode), max_prefill_chunk=chunk) as llm:
        _check(llm, golden, mode, together=False)


def test_recorded_texts_through_the_codec(golden: GoldenSet) -> None:
    with LLM(golden.path, **_options("off")) as llm:
        codec = llm.get_tokenizer()
        assert codec is not None, "install deepinfer-recipe-bindings: its plain text codec serves this tokenizer"
        for case in golden.manifest["tokenizer_cases"]:
            assert codec.encode_text(case["text"], allow_special=True) == case["ids"]
            assert codec.decode(case["ids"], skip_special=False) == case["text"]

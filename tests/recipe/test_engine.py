"""Chats through the engine with DeepSeek's own codec."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.errors import InvalidRequest
from deepinfer_recipe import RecipeCodec

HELLO = [{"role": "user", "content": "What is 2 + 2?"}]
THINK, ANSWER = "Easy.</think>", "It is 4."


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")
    with LLM(path, accelerator="cpu", max_model_len=1024, batch_invariant=True, num_threads=1) as llm:
        yield llm


def forced(llm: LLM, text: str, **options: Any) -> SamplingParams:
    """Sampling that lets a model with random weights say a text, and then end."""
    codec = llm.get_tokenizer()
    ids = [*codec.encode_text(text, allow_special=True), min(codec.eos_ids)]
    return SamplingParams(golden_token_ids=ids, max_tokens=len(ids), seed=1, **options)


def test_an_answer_with_its_reasoning(llm: LLM) -> None:
    assert isinstance(llm.get_tokenizer(), RecipeCodec)
    (output,) = llm.chat(HELLO, forced(llm, THINK + ANSWER))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].message == {"role": "assistant", "content": ANSWER, "reasoning_content": "Easy."}
    prompt = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special=False)
    assert prompt.endswith("What is 2 + 2?<｜Assistant｜><think>")


def test_options_reach_the_prompt(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, forced(llm, ANSWER), options={"thinking": {"type": "disabled"}})
    assert output.outputs[0].message["content"] == ANSWER
    prompt = llm.get_tokenizer().decode(output.prompt_token_ids, skip_special=False)
    assert prompt.endswith("<｜Assistant｜></think>")


def test_tools_may_be_called(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    (output,) = llm.chat(HELLO, forced(llm, THINK + ANSWER), tools=tools)
    assert "add" in llm.get_tokenizer().decode(output.prompt_token_ids)
    assert output.outputs[0].message["content"] == ANSWER


def test_stop_strings_end_text_and_answer(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, forced(llm, THINK + ANSWER, stop=" 4"))
    assert output.outputs[0].stop_reason == " 4"
    assert output.outputs[0].message["content"] == "It is"


def test_a_bad_conversation_hurts_only_itself(llm: LLM) -> None:
    params = forced(llm, THINK + ANSWER)
    bad, good = llm.chat([[{"role": "nobody", "content": "x"}], HELLO], params)
    assert isinstance(bad.error, InvalidRequest)
    assert good.outputs[0].message["content"] == ANSWER


def test_asynchronous_and_in_a_process(llm: LLM, tmp_path: Path) -> None:
    params = forced(llm, THINK + ANSWER)
    path = make_checkpoint(tmp_path / "tiny", "tiny")

    async def main() -> Any:
        async with AsyncLLM(path, accelerator="cpu", max_model_len=1024, num_threads=1) as engine:
            return [output async for output in engine.chat(HELLO, params)][-1]

    assert asyncio.run(main()).outputs[0].message == llm.chat(HELLO, params)[0].outputs[0].message

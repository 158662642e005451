"""Chats: the codec writes and reads them, everything between is a request like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.engine.loader import LoadedModel
from deepinfer.errors import InvalidRequest
from deepinfer.settings import Settings

HELLO = [{"role": "user", "content": "hello"}]
BYE = [{"role": "user", "content": "bye"}, {"role": "assistant", "content": "oh"}, {"role": "user", "content": "yes"}]
PARAMS = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)


class Letters:
    """Ids 6.. are the letters a..z; no chats."""

    bos_id = None

    def encode_text(self, text: str) -> list[int]:
        return [6 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + i - 6) for i in ids if 6 <= i < 32)

    def decode_stream(self, *, skip_special: bool = True) -> Any:
        return SimpleNamespace(push=self.decode, finish=lambda: "")


class Chats(Letters):
    """Writes the contents with id 2 behind each; reads the letters back. Keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def encode_chat(self, protocol: str, body: dict[str, Any]) -> Any:
        assert protocol == "chat"
        self.bodies.append(body)
        ids: list[int] = []
        for message in body["messages"]:
            if not isinstance(message, dict):
                raise InvalidRequest(f"{message!r} is not a message", field="messages")
            ids += [*self.encode_text(message["content"]), 2]
        kind = {"required": "tool_call_required"}.get(body.get("tool_choice", ""), "tool_call")
        constraint = SimpleNamespace(kind=kind) if "tools" in body else None
        return SimpleNamespace(token_ids=ids, constraint=constraint)

    def open_stream(self, chat: Any, *, id: str, cached_tokens: int) -> Any:
        ids: list[int] = []
        reasons: list[str] = []

        def result() -> dict[str, Any]:
            assert len(reasons) == 1
            return {"choices": [{"message": {"role": "assistant", "content": self.decode(ids), "for": id}}]}

        return SimpleNamespace(push=ids.extend, finish=reasons.append, result=result)


Make = Callable[[Any, Any], LLM]


def make(model: Any, codec: Any, kind: Any = LLM) -> Any:
    loaded = LoadedModel(model, Path(), codec, "fake-id", served_name="flash")
    settings = Settings(max_num_seqs=3, max_num_batched_tokens=16, use_nextn_decode=0)
    return kind.from_loaded(loaded, settings, poison_released=True)


def test_one_conversation_or_several(fake_model: Any, naive_model: Any) -> None:
    codec = Chats()
    with make(fake_model, codec) as llm:
        (one,) = llm.chat(HELLO, PARAMS)
        assert one.prompt_token_ids == [*codec.encode_text("hello"), 2]
        ids = naive_model(one.prompt_token_ids, PARAMS, 6, 3)[0]
        assert one.outputs[0].token_ids == ids
        assert one.outputs[0].message == {"role": "assistant", "content": codec.decode(ids), "for": one.request_id}
        both = llm.chat([BYE, HELLO], [PARAMS, PARAMS], priority=[1, 0])
        assert [output.outputs[0].token_ids for output in both][1] == ids
        assert len(both[0].prompt_token_ids) == 3 + 2 + 3 + 3
        several = llm.chat(HELLO, SamplingParams(seed=3, max_tokens=6, ignore_eos=True, n=2))[0]
        assert [part.message["content"] for part in several.outputs] == [part.text for part in several.outputs]
        assert llm.generate([[7]], PARAMS)[0].outputs[0].message is None


def test_without_limits_an_answer_may_fill_the_context(fake_model: Any) -> None:
    with make(fake_model, Chats()) as llm:
        answer = llm.chat(HELLO, {"ignore_eos": True, "max_tokens": None})[0].outputs[0]
        assert len(answer.token_ids) == llm.max_model_len - 6
        default = llm.chat(HELLO)[0].outputs[0]
        assert default.finish_reason in ("stop", "length")
        assert default.finish_reason == "stop" or len(default.token_ids) == llm.max_model_len - 6


def test_the_body_holds_what_the_caller_said(fake_model: Any) -> None:
    codec = Chats()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with make(fake_model, codec) as llm:
        llm.chat(HELLO, {"max_tokens": 2, "stop": "zz"}, tools=tools, options={"thinking": {"type": "disabled"}})
    assert codec.bodies == [
        {"model": "flash", "messages": HELLO, "tools": tools, "thinking": {"type": "disabled"}, "stop": ["zz"]}
    ]


def test_what_is_wrong_stays_with_its_conversation(fake_model: Any) -> None:
    with make(fake_model, Chats()) as llm:
        good, bad = llm.chat([HELLO, ["no message"]], PARAMS)
        assert good.error is None
        assert good.outputs[0].message is not None
        assert isinstance(bad.error, InvalidRequest)
        assert str(bad.error) == "messages: 'no message' is not a message"
        assert bad.outputs[0].message is None
        with pytest.raises(InvalidRequest, match="temperature: -2 is not"):
            llm.chat(HELLO, {"temperature": -2})


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ("hello", {}, "messages: 'hello' is not a list of messages like"),
        ([], {}, r"messages: \[\] is not a list of messages"),
        (HELLO, {"options": {"temperature": 0}}, "options.temperature: is not an option of a chat; options are chat_t"),
        (HELLO, {"tools": [{}], "options": {"tool_choice": "required"}}, "tool_choice: a call that must come is not"),
        (HELLO, {"tools": 5}, "tools: 5 is not a list of tools"),
        (HELLO, {"options": 5}, "options: 5 is not a dict"),
        (HELLO, {"priority": "high"}, "priority: 'high' is neither an integer nor a list"),
        (HELLO, {"priority": [1, 2]}, "priority: 2 entries for 1 prompts"),
    ],
)
def test_refusals_name_the_field(fake_model: Any, messages: Any, options: dict[str, Any], expected: str) -> None:
    with make(fake_model, Chats()) as llm, pytest.raises(InvalidRequest, match=expected):
        llm.chat(messages, PARAMS, **options)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (None, r"messages: no installed plugin can turn text .* \(pip install deepinfer-recipe-bindings\)"),
        (Letters(), r"messages: the codec Letters writes text only; .*pip install deepinfer-recipe-bindings"),
    ],
)
def test_without_a_codec_that_knows_chats(fake_model: Any, codec: Any, expected: str) -> None:
    async def ask(llm: AsyncLLM) -> None:
        async for _ in llm.chat(HELLO):
            pass

    with make(fake_model, codec) as llm, pytest.raises(InvalidRequest, match=expected):
        llm.chat(HELLO)
    with make(fake_model, codec, AsyncLLM) as engine, pytest.raises(InvalidRequest, match=expected):
        asyncio.run(ask(engine))


def test_asynchronous_chats(fake_model: Any, naive_model: Any) -> None:
    codec = Chats()

    async def main() -> None:
        async with make(fake_model, codec, AsyncLLM) as llm:
            outputs = [output async for output in llm.chat(HELLO, PARAMS, "mine")]
            ids = naive_model([*codec.encode_text("hello"), 2], PARAMS, 6, 3)[0]
            assert [output.outputs[0].message is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
            assert outputs[-1].outputs[0].message == {"role": "assistant", "content": codec.decode(ids), "for": "mine"}
            pieces = [output.outputs[0] async for output in llm.chat(HELLO, PARAMS, delta=True)]
            assert [token for piece in pieces for token in piece.token_ids] == ids
            with pytest.raises(InvalidRequest, match="messages: holds 2 conversations; call chat once for each"):
                await anext(llm.chat([HELLO, BYE]))

    asyncio.run(main())

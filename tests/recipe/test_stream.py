from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import CodecError, RecipeCodec

from .conftest import BOS, DSML, EOS, USER, body_of, chat_body, cuts, tools_of

PROTOCOLS = ("chat", "responses", "messages")
OFF = {"thinking": {"type": "disabled"}}
IdsOf = Callable[[str], list[int]]


def block(*calls: str) -> str:
    return f"<{DSML} calls>\n{''.join(calls)}</{DSML} calls>"


def call(name: str, value: str, string: str = "true") -> str:
    return (
        f'<{DSML} invoke name="{name}">\n<{DSML} parameter name="city" string="{string}">{value}</{DSML} parameter>\n'
        f"</{DSML} invoke>\n"
    )


def run(
    codec: RecipeCodec, body: Any, groups: Sequence[Sequence[int]], reason: str = "stop", protocol: str = "chat"
) -> tuple[Any, list[Any]]:
    """Feed groups of ids; returns the closed stream and its events."""
    chat = codec.encode_chat(protocol, body)  # type: ignore[arg-type]
    stream = codec.open_stream(chat, id="r-1", prompt_tokens=100, cached_tokens=40)
    events = [event for group in groups for event in stream.push(group)]
    return stream, events + stream.finish(reason)  # type: ignore[arg-type]


def message_of(stream: Any) -> dict[str, Any]:
    return stream.result()["choices"][0]["message"]


def normal(stream: Any) -> Any:
    """A result without times and random call ids."""
    text = re.sub(r"call_\d+_\w+", "CALL", json.dumps(stream.result()))
    return {key: value for key, value in json.loads(text).items() if not key.startswith(("created", "completed"))}


def deltas(events: list[Any], key: str) -> list[str]:
    choices = [json.loads(event.data)["choices"][0] for event in events]
    return [choice["delta"][key] for choice in choices if choice["delta"].get(key)]


def test_reasoning_and_answer(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("why</think>Hello 杭州 🙂!") + ids_of(EOS)
    stream, events = run(codec, chat_body(), [[token] for token in ids])
    message = message_of(stream)
    assert (message["reasoning_content"], message["content"]) == ("why", "Hello 杭州 🙂!")
    assert "".join(deltas(events, "content")) == "Hello 杭州 🙂!"
    usage = stream.result()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, len(ids))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 40
    assert stream.finished


CALLS = block(call("f", "ls 2>&1 杭州"), call("g", '{"a": [1]}', "false"))
TEXT = f"think 🙂</think>Sure: 杭州 < é\n\n{CALLS}"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS), tools=st.booleans())
def test_result_does_not_depend_on_the_cut(
    codec: RecipeCodec, ids_of: IdsOf, data: st.DataObject, protocol: str, tools: bool
) -> None:
    ids = ids_of(TEXT) + ids_of(EOS)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    points = data.draw(st.lists(st.integers(1, len(ids) + 1), max_size=8))
    body = body_of(protocol, **({"tools": tools_of(protocol, "f", "g")} if tools else {}))
    reason = data.draw(st.sampled_from(["stop", "length", "content_filter", "abort"]))
    single, events = run(codec, body, [[token] for token in ids], reason, protocol)
    cut, other = run(codec, body, cuts(ids, points), reason, protocol)
    assert normal(cut) == normal(single)
    assert len(other) <= len(events) + 1
    assert single.completion_tokens == len(ids)
    usage = single.result()["usage"]
    assert usage["output_tokens" if protocol != "chat" else "completion_tokens"] == len(ids)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS))
def test_any_ids_are_counted_and_never_leak_special_tokens(
    codec: RecipeCodec, data: st.DataObject, protocol: str
) -> None:
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=40))
    body = body_of(protocol, **({"tools": tools_of(protocol, "f")} if data.draw(st.booleans()) else {}))
    points = data.draw(st.lists(st.integers(1, 40), max_size=5))
    stream, _ = run(codec, body, cuts(ids, points) if ids else [], "stop", protocol)
    usage = stream.result()["usage"]
    assert usage["completion_tokens" if protocol == "chat" else "output_tokens"] == len(ids)
    shown = json.dumps(stream.result(), ensure_ascii=False)
    spelled = codec.decode(
        [token for token in ids if token < codec.vocabulary.size and token not in codec.vocabulary.added.values()]
    )
    for special in (BOS, EOS, USER):
        if special not in spelled:
            assert special not in shown


def test_unfinished_character_at_the_end_loses_no_text(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("Hello brave new world 🙂")[:-1]
    for groups in ([[token] for token in ids], cuts(ids, range(0, 99, 3)), [ids]):
        stream, _ = run(codec, chat_body(**OFF), groups, "length")
        assert message_of(stream)["content"] == "Hello brave new world \ufffd"
        assert stream.result()["usage"]["completion_tokens"] == len(ids)
        assert stream.result()["choices"][0]["finish_reason"] == "length"


def test_replacement_character_of_the_model_itself_survives(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream, _ = run(codec, chat_body(**OFF), [ids_of("a \ufffd")])
    assert message_of(stream)["content"] == "a \ufffd"


def test_invalid_bytes_in_the_middle(codec: RecipeCodec) -> None:
    lone = codec.vocabulary.id_of("ÿ")  # byte FF
    assert lone is not None
    ids = [*codec.encode_text("a"), lone, *codec.encode_text("b")]
    stream, _ = run(codec, chat_body(**OFF), [ids])
    assert message_of(stream)["content"] == "a\ufffdb"


def test_special_tokens_never_become_text(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of(f"a{BOS}b{USER}c{EOS}d{EOS}")
    stream, _ = run(codec, chat_body(**OFF), [[token] for token in ids])
    assert message_of(stream)["content"] == "abcd"
    assert stream.result()["usage"]["completion_tokens"] == len(ids)


def test_id_without_a_token_is_shown_and_counted(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream, _ = run(codec, chat_body(**OFF), [[*ids_of("a"), codec.vocabulary.size, *ids_of("b")]])
    assert message_of(stream)["content"] == "a\ufffdb"
    assert stream.result()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("bad", [-1, 10_000_000, 2**33])
def test_id_outside_the_vocabulary_is_an_error(codec: RecipeCodec, ids_of: IdsOf, bad: int) -> None:
    stream = codec.open_stream(codec.encode_chat("chat", chat_body(**OFF)), id="r")
    with pytest.raises(CodecError, match=f"token id {bad} is outside the vocabulary") as caught:
        stream.push([*ids_of("lost?"), bad])
    assert caught.value.status == 500
    stream.push(ids_of("kept"))
    stream.finish("stop")
    assert message_of(stream)["content"] == "kept"


# tool calls


def calls_of(stream: Any) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message_of(stream).get("tool_calls") or []]


def test_tool_call_is_streamed_in_pieces(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("</think>" + block(call("f", "a long city name, token by token")))
    stream, events = run(codec, chat_body(tools=tools_of("chat", "f")), [[token] for token in ids])
    assert calls_of(stream) == [("f", '{"city": "a long city name, token by token"}')]
    assert stream.result()["choices"][0]["finish_reason"] == "tool_calls"
    assert len(deltas(events, "tool_calls")) > 10
    assert stream.problems == ()


@pytest.mark.parametrize("value", ["ls 2>&1", "a <b> c", 'quote " and \\', "</", "｜", "杭州🙂", "x\ny"])
def test_argument_values_are_exact(codec: RecipeCodec, ids_of: IdsOf, value: str) -> None:
    head, tail = block(call("f", "\0")).split("\0")
    ids = [*ids_of("</think>" + head), *codec.encode_text(value), *ids_of(tail)]
    for size in (1, 2, 5, 50):
        stream, _ = run(codec, chat_body(tools=tools_of("chat", "f")), cuts(ids, range(0, len(ids), size)))
        assert json.loads(calls_of(stream)[0][1]) == {"city": value}
        assert not message_of(stream)["content"]


def test_call_inside_reasoning_is_found(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("thinking\n\n" + block(call("f", "x")))
    stream, _ = run(codec, chat_body(tools=tools_of("chat", "f")), [ids])
    assert calls_of(stream) == [("f", '{"city": "x"}')]
    assert message_of(stream)["reasoning_content"] == "thinking"


@pytest.mark.parametrize("wrapper", [f" <{DSML} tool>\n{{}}", f"<{DSML} tool_calls\n{{}}", f"<{DSML} calls>\n{{}}"])
def test_bad_wrappers_do_not_reach_the_content(codec: RecipeCodec, ids_of: IdsOf, wrapper: str) -> None:
    ids = ids_of("</think>" + wrapper.format(call("f", "x")))
    stream, _ = run(codec, chat_body(tools=tools_of("chat", "f")), [[token] for token in ids])
    assert [name for name, _ in calls_of(stream)] == ["f"]
    assert DSML not in (message_of(stream)["content"] or "")


def test_required_choice_starts_inside_the_block(codec: RecipeCodec, ids_of: IdsOf) -> None:
    body = chat_body(tools=tools_of("chat", "f"), tool_choice="required", **OFF)
    stream, _ = run(codec, body, [ids_of(f"{call('f', 'x')}</{DSML} calls>")])
    assert calls_of(stream) == [("f", '{"city": "x"}')]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("more", [{}, {"tool_choice": "none"}])
def test_uninvited_tool_block_does_not_leak(
    codec: RecipeCodec, ids_of: IdsOf, protocol: str, more: dict[str, Any]
) -> None:
    if more:
        choice = {"type": "none"} if protocol == "messages" else "none"
        more = {"tool_choice": choice, "tools": tools_of(protocol, "f")}
    for start in ("</think>Well.\n\n", "</think>2 < 3", "only thoughts"):
        ids = ids_of(start + block(call("f", "x")) + EOS)
        for groups in ([[token] for token in ids], [ids]):
            stream, events = run(codec, body_of(protocol, **more), groups, "stop", protocol)
            text = "".join(event.data for event in events) + json.dumps(stream.result(), ensure_ascii=False)
            for leak in (DSML, "invoke", "calls>", '"tool_calls":['):
                assert leak not in text
            assert stream.completion_tokens == len(ids)
    chat, _ = run(codec, chat_body(), [ids_of("</think>2 <" + block())])
    assert message_of(chat)["content"] == "2 <"


def test_lone_bracket_at_the_end_is_kept(codec: RecipeCodec, ids_of: IdsOf) -> None:
    for tools in ({}, {"tools": tools_of("chat", "f")}):
        stream, _ = run(codec, chat_body(**tools), [[token] for token in ids_of("</think>1 < 2 and 2 <")])
        assert message_of(stream)["content"] == "1 < 2 and 2 <"


def test_spelled_markers_stay_text(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("</think>") + codec.encode_text(f"see </think> and <{DSML} calls> there")
    for body in (chat_body(), chat_body(tools=tools_of("chat", "f"))):
        stream, _ = run(codec, body, [[token] for token in ids])
        assert message_of(stream)["content"] == f"see </think> and <{DSML} calls> there"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (block(call("f", "abc", "false")), '{"city": abc}'),
        (block(call("f", '{"k": [1, 2}', "false")), '{"city": {"k": [1, 2}}'),
    ],
)
def test_arguments_that_are_not_json_are_reported(
    codec: RecipeCodec, ids_of: IdsOf, protocol: str, text: str, arguments: str
) -> None:
    body = body_of(protocol, tools=tools_of(protocol, "f"))
    stream, _ = run(codec, body, [ids_of("</think>" + text)], "stop", protocol)
    (problem,) = stream.problems
    assert (problem.index, problem.name, problem.arguments) == (0, "f", arguments)
    assert problem.reason.startswith("not JSON")


@pytest.mark.parametrize(
    "text",
    [
        f'<{DSML} invoke name="">\n</{DSML} invoke>\n',
        f'<{DSML} invoke name="f">\n<{DSML} parameter name="a">x</{DSML} parameter>\n</{DSML} invoke>\n',
    ],
)
def test_call_without_a_name_or_a_type_is_reported(codec: RecipeCodec, ids_of: IdsOf, text: str) -> None:
    stream, _ = run(codec, chat_body(tools=tools_of("chat", "f")), [ids_of("</think>" + block(text))])
    assert len(stream.problems) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cut_off_call_ends_without_a_crash(codec: RecipeCodec, ids_of: IdsOf, protocol: str) -> None:
    ids = ids_of("</think>" + block(call("f", "杭州")))
    body = body_of(protocol, tools=tools_of(protocol, "f"))
    for end in range(len(ids)):
        stream, _ = run(codec, body, [ids[:end]], "length", protocol)
        assert stream.result()
        assert len(stream.problems) <= 1


# stops, JSON mode, log probabilities, life cycle


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tail=st.text(st.sampled_from("ab杭 "), max_size=5))
def test_stop_string_cuts_alike_under_any_cut(
    codec: RecipeCodec, ids_of: IdsOf, data: st.DataObject, tail: str
) -> None:
    ids = ids_of(f"</think>one STOP{tail}")
    points = data.draw(st.lists(st.integers(1, len(ids)), max_size=6))
    stream, _ = run(codec, chat_body(stop=["STOP"]), cuts(ids, points))
    assert message_of(stream)["content"] == "one "
    assert stream.result()["choices"][0]["finish_reason"] == "stop"


def test_stop_string_says_finished_at_once(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream = codec.open_stream(codec.encode_chat("responses", body_of("responses", stop=["STOP"])), id="r")
    assert not stream.finished
    stream.push(ids_of("</think>one STOP"))
    assert stream.finished
    assert stream.push(ids_of("more")) == []
    stream.finish("stop")
    (item,) = [item for item in stream.result()["output"] if item["type"] == "message"]
    assert item["content"][0]["text"] == "one "


def test_stop_string_in_reasoning_does_not_stop(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream, _ = run(codec, chat_body(stop=["STOP"]), [ids_of("a STOP b</think>answer")])
    assert message_of(stream)["content"] == "answer"


def test_json_mode_after_thinking(codec: RecipeCodec, ids_of: IdsOf) -> None:
    body = chat_body("json", response_format={"type": "json_object"})
    stream, _ = run(codec, body, [ids_of('hm</think>{"a":1}')])
    message = message_of(stream)
    assert json.loads(message["content"]) == {"a": 1}
    assert message["reasoning_content"] == "hm"


def test_reasoning_only_gives_empty_content(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream, _ = run(codec, chat_body(), [ids_of("only thoughts")])
    assert (message_of(stream)["content"], message_of(stream)["reasoning_content"]) == ("", "only thoughts")


def test_log_probabilities_follow_their_ids(codec: RecipeCodec, ids_of: IdsOf) -> None:
    ids = ids_of("Hm</think>🙂ok") + ids_of(EOS)
    rows = [(-float(index), [(token, -float(index))]) for index, token in enumerate(ids)]
    chat = codec.encode_chat("chat", chat_body(logprobs=True, top_logprobs=1))
    seen = []
    for size in (1, 3, len(ids)):
        stream = codec.open_stream(chat, id="r")
        for start in range(0, len(ids), size):
            stream.push(ids[start : start + size], rows[start : start + size])
        stream.finish("stop")
        content = stream.result()["choices"][0]["logprobs"]["content"]
        seen.append([entry["logprob"] for entry in content])
    first = ids.index(codec.vocabulary.added["</think>"]) + 1
    assert seen == [[-float(index) for index in range(first, len(ids) - 1)]] * 3


def test_wrong_number_of_log_probabilities(codec: RecipeCodec, ids_of: IdsOf) -> None:
    stream = codec.open_stream(codec.encode_chat("chat", chat_body(logprobs=True)), id="r")
    with pytest.raises(CodecError, match="1 log probabilities for 2 ids"):
        stream.push(ids_of("ab"), [(0.0, [])])
    stream.push(ids_of("</think>ok"))
    stream.finish("stop")
    assert message_of(stream)["content"] == "ok"


def test_several_choices_of_one_chat(codec: RecipeCodec, ids_of: IdsOf) -> None:
    chat = codec.encode_chat("chat", chat_body(n=2))
    streams = [codec.open_stream(chat, id="r") for _ in range(chat.sampling.n)]
    for stream, text in zip(streams, ("one", "two"), strict=True):
        stream.push(ids_of(f"</think>{text}"))
    for stream in streams:
        stream.finish("stop")
    assert [message_of(stream)["content"] for stream in streams] == ["one", "two"]


def test_life_cycle(codec: RecipeCodec, ids_of: IdsOf) -> None:
    chat = codec.encode_chat("chat", chat_body())
    stream = codec.open_stream(chat, id="r", model="other-name")
    assert json.loads(stream.start()[0].data)["choices"][0]["delta"]["role"] == "assistant"
    assert stream.start() == []
    with pytest.raises(ValueError, match="finish reason must be one of"):
        stream.finish("bored")  # type: ignore[arg-type]
    assert stream.finish("stop")
    assert stream.finish("stop") == []
    assert stream.push(ids_of("late")) == []
    assert stream.result()["model"] == "other-name"
    dropped = codec.open_stream(chat, id="r")
    dropped.push(ids_of("x"))
    dropped.close()
    assert dropped.finished
    assert dropped.push(ids_of("y")) == dropped.finish("abort") == []
    never = codec.open_stream(chat, id="r")
    never.close()
    assert never.finish("abort") == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_event_names(codec: RecipeCodec, ids_of: IdsOf, protocol: str) -> None:
    _, events = run(codec, body_of(protocol), [ids_of("a</think>b")], "stop", protocol)
    names = [event.event for event in events]
    if protocol == "chat":
        assert set(names) == {None}
    else:
        first, last = {
            "responses": ("response.created", "response.completed"),
            "messages": ("message_start", "message_stop"),
        }[protocol]
        assert (names[0], names[-1]) == (first, last)
        assert all(json.loads(event.data)["type"] == event.event for event in events)

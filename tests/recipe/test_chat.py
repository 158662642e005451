from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import InvalidRequest
from deepinfer_recipe import CodecError, RecipeCodec

from .conftest import (
    ASSISTANT,
    BOS,
    DSML,
    IMAGE,
    OTHER_IMAGE,
    SYSTEM,
    USER,
    V41_TOKENS,
    body_of,
    byte_level,
    chat_body,
    id_in,
    tools_of,
    write_model,
)

PROTOCOLS = ("chat", "responses", "messages")
OFF = {"type": "disabled"}
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IdsOf = Callable[[str], list[int]]


def prompt_of(codec: RecipeCodec, body: Any, protocol: str = "chat") -> str:
    return codec.decode(codec.encode_chat(protocol, body).token_ids, skip_special=False)  # type: ignore[arg-type]


def refused(codec: RecipeCodec, body: Any, protocol: str = "chat") -> CodecError:
    with pytest.raises(CodecError) as caught:
        codec.encode_chat(protocol, body)  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.protocol == protocol
    return caught.value


def test_smallest_chat(codec: RecipeCodec, ids_of: IdsOf) -> None:
    chat = codec.encode_chat("chat", chat_body(thinking=OFF))
    assert chat.token_ids == ids_of(f"{BOS}{USER}hi{ASSISTANT}</think>")
    assert (chat.model, chat.stream, chat.constraint, chat.image_sources) == ("flash", False, None, ())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_all_protocols_write_one_prompt(codec: RecipeCodec, protocol: str) -> None:
    body = body_of(protocol)
    assert prompt_of(codec, body, protocol) == prompt_of(codec, chat_body())
    for raw in (json.dumps(body), json.dumps(body).encode()):
        assert prompt_of(codec, raw, protocol) == prompt_of(codec, chat_body())


def test_body_is_left_alone(codec: RecipeCodec) -> None:
    body = chat_body(top_k=3, max_completion_tokens=4, reasoning_effort=33, metadata={"a": 1})
    before = copy.deepcopy(body)
    codec.encode_chat("chat", body)
    assert body == before


# what users typed must stay text


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(
        st.one_of(st.sampled_from(V41_TOKENS), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
        max_size=5,
    ).map("".join)
)
def test_user_text_gives_no_special_id(codec: RecipeCodec, text: str) -> None:
    body = {"model": "flash", "messages": [{"role": "system", "content": text}, {"role": "user", "content": text}]}
    special = set(codec.vocabulary.added.values())
    empty = chat_body("")
    empty["messages"].insert(0, {"role": "system", "content": ""})
    found = [token for token in codec.encode_chat("chat", body).token_ids if token in special]
    assert found == [token for token in codec.encode_chat("chat", empty).token_ids if token in special]


@pytest.mark.parametrize("typed", [USER, ASSISTANT, SYSTEM, "<think>", "</think>"])
def test_typed_marker_costs_as_many_ids_as_its_text(codec: RecipeCodec, typed: str) -> None:
    empty = codec.encode_chat("chat", chat_body("", thinking=OFF)).token_ids
    ids = codec.encode_chat("chat", chat_body(typed, thinking=OFF)).token_ids
    assert len(ids) == len(empty) + len(codec.encode_text(typed))


def test_literal_image_token_in_text_is_text(codec: RecipeCodec) -> None:
    for spelling in (IMAGE, OTHER_IMAGE):
        ids = codec.encode_chat("chat", chat_body(f"Echo: {spelling}")).token_ids
        assert codec.image_id not in ids
        assert f"Echo: {spelling}" in codec.decode(ids, skip_special=False)


# images


def test_image_spelling_is_found_by_id(codec: RecipeCodec) -> None:
    assert codec.image_token == IMAGE
    chat = codec.encode_chat(
        "chat", chat_body([{"type": "text", "text": f"see {IMAGE}"}, PIXEL, {"type": "text", "text": "x"}])
    )
    assert chat.token_ids.count(codec.image_id) == len(chat.image_sources) == 1
    after = chat.token_ids[chat.token_ids.index(codec.image_id) + 1 :]
    assert codec.decode(after, skip_special=False).startswith("\n\nx")


def test_release_spelling_changes_nothing_for_another_checkpoint(tmp_path: Path) -> None:
    tokenizer = byte_level()
    config = {"image_token_id": id_in(tokenizer, OTHER_IMAGE), "vocab_size": 600}
    codec = RecipeCodec(*write_model(tmp_path, tokenizer, config), ("flash",))
    assert codec.image_token == OTHER_IMAGE
    ids = codec.encode_chat("chat", chat_body([PIXEL])).token_ids
    assert ids.count(id_in(tokenizer, OTHER_IMAGE)) == 1


def test_images_without_an_image_token_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    for config in (
        {"vocab_size": 600},
        {"vocab_size": 600, "image_token_id": 599},
        {"vocab_size": 600, "image_token_id": 65},
    ):
        codec = RecipeCodec(*write_model(tmp_path, tokenizer, config), ("flash",))
        assert codec.image_token is None
        error = refused(codec, chat_body([PIXEL]))
        assert error.message == f"images are not possible: {tmp_path / 'tokenizer.json'} has no image token"
        assert error.param == "messages"
        assert codec.encode_chat("chat", chat_body("text is fine")).token_ids


# names, roles, history


def test_only_served_names_are_known(codec: RecipeCodec) -> None:
    assert codec.encode_chat("chat", chat_body() | {"model": "flash-alias"}).model == "flash-alias"
    for name in ("DeepSeek-V4-Pro", "gpt", "", None, 7):
        error = refused(codec, chat_body() | {"model": name})
        assert error.param == "model"
        assert "served: flash, flash-alias" in error.message
    assert refused(codec, {"messages": []}).param == "model"


def test_official_name_where_none_is_given(model: tuple[Path, Path]) -> None:
    codec = RecipeCodec(*model)
    assert codec.encode_chat("chat", chat_body() | {"model": "DeepSeek-V4.1-Flash"}).token_ids


def test_developer_is_system(codec: RecipeCodec) -> None:
    roles = [
        {"model": "flash", "messages": [{"role": role, "content": "be brief"}, {"role": "user", "content": "x"}]}
        for role in ("system", "developer")
    ]
    assert prompt_of(codec, roles[0]) == prompt_of(codec, roles[1])


def call_history(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    return {"model": "flash", "messages": messages, "tools": tools_of("chat", "f")}


def test_tool_arguments_as_object(codec: RecipeCodec) -> None:
    as_text = prompt_of(codec, call_history('{"city": "杭州"}'))
    assert prompt_of(codec, call_history({"city": "杭州"})) == as_text
    assert f'<{DSML} parameter name="city" string="true">杭州</{DSML} parameter>' in as_text


def test_broken_tool_arguments_in_history_are_tolerated(codec: RecipeCodec) -> None:
    for broken in ("{bad", "", "[1]", '"text"', '{"a": NaN}'):
        assert f'<{DSML} invoke name="f">' in prompt_of(codec, call_history(broken))


def test_reasoning_of_a_history_under_either_name(codec: RecipeCodec) -> None:
    one, two = (
        prompt_of(codec, call_history("{}", **{name: "because"})) for name in ("reasoning", "reasoning_content")
    )
    assert one == two
    assert "because" in one


def test_old_reasoning_is_dropped_without_tools(codec: RecipeCodec) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "SECRET"},
        {"role": "user", "content": "c"},
    ]
    assert "SECRET" not in prompt_of(codec, {"model": "flash", "messages": messages})


def test_prefix_is_continued(codec: RecipeCodec) -> None:
    body = chat_body(thinking=OFF)
    body["messages"].append({"role": "assistant", "content": "Once", "prefix": True})
    assert prompt_of(codec, body).endswith(f"{ASSISTANT}</think>Once")


# effort


@pytest.mark.parametrize(("name", "number"), [("low", 50), ("minimal", 50), ("medium", 75), ("high", 75), ("max", 100)])
def test_named_effort(codec: RecipeCodec, name: str, number: int) -> None:
    prompt = prompt_of(codec, chat_body(reasoning_effort=name))
    assert prompt.startswith(f"{BOS}{SYSTEM}Reasoning Effort: {number} (range 1-100")
    assert prompt == prompt_of(codec, chat_body(reasoning_effort=number))


@settings(max_examples=25, deadline=None)
@given(number=st.integers(1, 100), text=st.sampled_from(["x", "Reasoning Effort: 75", USER]))
def test_whole_number_effort(codec: RecipeCodec, number: int, text: str) -> None:
    plain, numbered = (
        codec.encode_chat("chat", chat_body(text, reasoning_effort=effort)) for effort in ("high", number)
    )
    old, new = (codec.decode(chat.token_ids, skip_special=False) for chat in (plain, numbered))
    assert new == old.replace("Reasoning Effort: 75", f"Reasoning Effort: {number}", 1)
    special = codec.vocabulary.added.values()
    kept = [[token for token in chat.token_ids if token in special] for chat in (plain, numbered)]
    assert kept[0] == kept[1]


def test_whole_number_effort_elsewhere(codec: RecipeCodec) -> None:
    assert "Reasoning Effort: 33 " in prompt_of(codec, body_of("responses", reasoning={"effort": 33}), "responses")
    assert "Reasoning Effort: 33 " in prompt_of(codec, body_of("messages", output_config={"effort": 33}), "messages")
    assert "Reasoning Effort: 33 " in prompt_of(codec, chat_body(chat_template_kwargs={"reasoning_effort": 33}))
    assert "Effort" not in prompt_of(codec, chat_body(reasoning_effort=33, thinking=OFF))


@pytest.mark.parametrize("effort", [0, 101, -1, 2**40])
def test_effort_out_of_range(codec: RecipeCodec, effort: int) -> None:
    error = refused(codec, chat_body(reasoning_effort=effort))
    assert error.param == "reasoning_effort"
    assert f"from 1 to 100, not {effort}" in error.message


@pytest.mark.parametrize("effort", [True, 7.5, "enormous", [1]])
def test_effort_of_another_kind(codec: RecipeCodec, effort: Any) -> None:
    assert refused(codec, chat_body(reasoning_effort=effort)).status == 400


def test_thinking_switches(codec: RecipeCodec) -> None:
    off = prompt_of(codec, chat_body(thinking=OFF))
    assert off == prompt_of(codec, chat_body(reasoning_effort="none"))
    assert off == prompt_of(codec, chat_body(chat_template_kwargs={"thinking": False}))
    assert off == prompt_of(codec, chat_body(chat_template_kwargs={"enable_thinking": False}))
    on = prompt_of(codec, chat_body())
    assert on.endswith("<think>")
    assert on == prompt_of(codec, chat_body(chat_template_kwargs={"thinking": True}))
    clash = refused(codec, chat_body(thinking=OFF, chat_template_kwargs={"thinking": True}))
    assert clash.param == "chat_template_kwargs.thinking"
    assert refused(codec, chat_body(chat_template_kwargs={"x": 1})).param == "chat_template_kwargs.x"
    assert refused(codec, chat_body(chat_template_kwargs={"thinking": "no"})).param == "chat_template_kwargs.thinking"
    assert refused(codec, chat_body(chat_template_kwargs=[])).param == "chat_template_kwargs"


# tools and constraints


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tools_become_a_constraint(codec: RecipeCodec, protocol: str) -> None:
    chat = codec.encode_chat(protocol, body_of(protocol, tools=tools_of(protocol, "f", "g")))  # type: ignore[arg-type]
    assert chat.constraint is not None
    assert chat.constraint.kind == "tool_call"
    assert [tool["function"]["name"] for tool in json.loads(chat.constraint.schema)] == ["f", "g"]


def test_named_choice_allows_only_that_tool(codec: RecipeCodec) -> None:
    for protocol, choice, off in (
        ("chat", {"type": "function", "function": {"name": "g"}}, {"thinking": OFF}),
        ("messages", {"type": "tool", "name": "g"}, {"thinking": OFF}),
        ("responses", {"type": "function", "name": "g"}, {"reasoning": {"effort": "none"}}),
    ):
        body = body_of(protocol, tools=tools_of(protocol, "f", "g"), tool_choice=choice, **off)
        constraint = codec.encode_chat(protocol, body).constraint  # type: ignore[arg-type]
        assert constraint is not None
        assert constraint.kind == "tool_call_required"
        assert [tool["function"]["name"] for tool in json.loads(constraint.schema)] == ["g"]


def test_required_choice(codec: RecipeCodec) -> None:
    body = chat_body(tools=tools_of("chat", "f"), tool_choice="required")
    assert "thinking" in refused(codec, body).message.lower()
    prompt = prompt_of(codec, {**body, "thinking": OFF})
    assert prompt.endswith(f"<{DSML} calls>\n")


def test_choice_none_hides_the_tools(codec: RecipeCodec) -> None:
    body = chat_body(tools=tools_of("chat", "f"), tool_choice="none")
    assert prompt_of(codec, body) == prompt_of(codec, chat_body())
    assert codec.encode_chat("chat", body).constraint is None


def test_tools_with_system_share_one_header(codec: RecipeCodec) -> None:
    body = chat_body(tools=tools_of("chat", "f"))
    body["messages"].insert(0, {"role": "system", "content": "be brief"})
    assert prompt_of(codec, body).count(SYSTEM) == 1


def test_json_formats(codec: RecipeCodec) -> None:
    any_json = codec.encode_chat("chat", chat_body("json", response_format={"type": "json_object"})).constraint
    assert any_json is not None
    assert (any_json.kind, any_json.schema) == ("json", "")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    given_schema = codec.encode_chat("chat", chat_body(response_format=schema)).constraint
    assert given_schema is not None
    assert json.loads(given_schema.schema) == {"type": "object"}
    assert "json" in refused(codec, chat_body("x", response_format={"type": "json_object"})).message


# bad bodies


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{}", b'{"model": NaN}', b'{"a": Infinity}', b"\x00",
     b'{"model": "flash"} {}', b"[" * 100_000, b'{"a":' * 5000],
)  # fmt: skip
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_not_a_json_object(codec: RecipeCodec, protocol: str, raw: bytes) -> None:
    assert refused(codec, raw, protocol).status == 400


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], ""),
        (None, "expected a sequence"),
        ("x", ""),
        ([1], ""),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], ""),
        ([{"role": "oracle", "content": "x"}], "oracle"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "video"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], ""),
    ],
)
def test_bad_messages(codec: RecipeCodec, messages: Any, word: str) -> None:
    error = refused(codec, {"model": "flash", "messages": messages})
    assert error.status == 400
    assert word in error.message
    assert error.param == "messages"
    assert "invalid request body" not in error.message


def test_lone_surrogates_and_odd_values_name_their_place(codec: RecipeCodec) -> None:
    cases: list[tuple[Any, str | None, str]] = [
        (chat_body("a\ud800"), "messages[0].content", "lone surrogate at position 1"),
        (json.dumps(chat_body("a\ud800")), "messages[0].content", "lone surrogate"),
        (chat_body(temperature=float("nan")), "temperature", "nan is not a JSON number"),
        (chat_body(seed=2**80), "seed", "does not fit 64 bits"),
        (chat_body(stop={1: 2}), "stop", "the key 1 is not a string"),
        (chat_body(stop=b"x"), "stop", "a bytes is not a JSON value"),
    ]
    for body, param, message in cases:
        error = refused(codec, body)
        assert (error.status, error.param) == (400, param)
        assert message in error.message


def test_deep_nesting_is_refused(codec: RecipeCodec) -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"properties": deep}
    body = chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}])
    assert "nested deeper than 100 levels" in refused(codec, body).message


@settings(max_examples=120, deadline=None)
@given(
    protocol=st.sampled_from(PROTOCOLS),
    key=st.sampled_from(["messages", "input", "tools", "tool_choice", "stop", "thinking", "response_format", "text",
                         "reasoning", "system", "temperature", "n", "max_tokens", "output_config", "stream_options",
                         "logprobs", "top_logprobs", "seed", "metadata", "stop_sequences"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "a"]), inner, max_size=3),
        max_leaves=6,
    ),
)  # fmt: skip
def test_any_value_is_served_or_refused_with_a_codec_error(
    codec: RecipeCodec, protocol: str, key: str, value: Any
) -> None:
    body = body_of(protocol) | {key: value}
    try:
        chat = codec.encode_chat(protocol, body)  # type: ignore[arg-type]
    except CodecError as caught:
        error: CodecError | None = caught
    else:
        error = None
        assert chat.token_ids[0] == codec.bos_id
    if error is not None:
        assert error.status in (400, 413)
        assert json.loads(error.body_json())


def test_limits_hold_before_anything_is_encoded(model: tuple[Path, Path]) -> None:
    codec = RecipeCodec(*model, served_names=("flash",), max_text_bytes=1000, max_body_bytes=4000)
    assert codec.encode_chat("chat", chat_body("x" * 900)).token_ids
    big = refused(codec, chat_body("x" * 2000))
    assert (big.status, big.code) == (413, "request_too_large")
    assert "limit is 1000" in big.message
    assert refused(codec, json.dumps(chat_body("x" * 5000))).status == 413
    assert refused(codec, json.dumps(chat_body("x" * 5000)).encode()).status == 413
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}}
    assert codec.encode_chat("chat", chat_body([image])).image_sources
    assert refused(codec, chat_body([image, image])).status == 413
    smuggled = chat_body([{"type": "text", "text": "data:" + "x" * 2000}])
    assert refused(codec, smuggled).status == 413


def test_unknown_protocol(codec: RecipeCodec) -> None:
    with pytest.raises(CodecError, match="unknown protocol 'ftp'"):
        codec.encode_chat("ftp", {})  # type: ignore[arg-type]


def test_messages_errors_have_their_own_envelope(codec: RecipeCodec) -> None:
    error = refused(codec, body_of("messages", temperature=9), "messages")
    assert error.body()["type"] == "error"
    assert "temperature" in error.body()["error"]["message"]


def test_same_ids_as_the_recipe_itself(codec: RecipeCodec, model: tuple[Path, Path]) -> None:
    tokenizer = deepseek_recipe.Tokenizer.from_file(str(model[1]))
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
    body = chat_body("杭州 🙂 <think>", tools=tools_of("chat", "f"))
    options = deepseek_recipe.ConversionOptions().with_model_alias(
        "flash", deepseek_recipe.ModelVersion.DeepseekV41Flash
    )
    expected = encoding.encode(deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation)
    assert codec.encode_chat("chat", body).token_ids == expected

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_recipe import CodecError, RecipeCodec
from deepinfer_recipe.parameters import HONOURABLE

from .conftest import body_of, chat_body, tools_of

PROTOCOLS = ("chat", "responses", "messages")


def refused(codec: RecipeCodec, protocol: str, body: Any) -> CodecError:
    with pytest.raises(CodecError) as caught:
        codec.encode_chat(protocol, body)  # type: ignore[arg-type]
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("protocol", "name", "value"),
    [
        *[("chat", "min_p", 0.1), ("chat", "frequency_penalty", 0.5), ("chat", "presence_penalty", -1)],
        *[("chat", "repetition_penalty", 1.1), ("chat", "logit_bias", {"1": 5}), ("chat", "min_tokens", 3)],
        *[("chat", "parallel_tool_calls", False), ("chat", "store", True), ("chat", "documents", [])],
        *[("chat", "functions", []), ("chat", "no_such_thing", 1), ("chat", "max_output_tokens", 3)],
        *[("responses", "previous_response_id", "r"), ("responses", "store", True), ("responses", "background", True)],
        *[("responses", "truncation", "auto"), ("responses", "include", ["x"]), ("responses", "max_tokens", 3)],
        *[("responses", "max_completion_tokens", 3), ("responses", "n", 2), ("responses", "conversation", "c")],
        *[("messages", "stop", ["x"]), ("messages", "container", "c"), ("messages", "mcp_servers", [1])],
        *[("messages", "n", 2), ("messages", "logprobs", True)],
    ],
)
def test_ignored_parameters_are_refused_by_name(codec: RecipeCodec, protocol: str, name: str, value: Any) -> None:
    error = refused(codec, protocol, body_of(protocol, **{name: value}))
    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert "not supported" in error.message


@pytest.mark.parametrize(
    ("protocol", "more", "param"),
    [
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}, "tools": tools_of("messages", "f")}, "tool_choice"),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": tools_of("messages", "f")},
            "tool_choice.disable_parallel_tool_use",
        ),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("messages", {"max_tokens": 400_000}, "max_tokens"),
        (
            "chat",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
def test_values_that_would_be_dropped_are_refused_by_name(
    codec: RecipeCodec, protocol: str, more: dict[str, Any], param: str
) -> None:
    assert refused(codec, protocol, body_of(protocol) | more).param == param


def test_values_that_ask_for_nothing_are_accepted(codec: RecipeCodec) -> None:
    nothing = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_p": 0, "n": 1,
        "parallel_tool_calls": True, "store": False, "user": "u", "metadata": {"k": "v"}, "service_tier": "auto",
        "top_k": -1, "min_tokens": 0, "no_such_thing": None, "stop": None, "tools": None, "tool_choice": "auto",
    }  # fmt: skip
    plain, full = codec.encode_chat("chat", chat_body()), codec.encode_chat("chat", chat_body(**nothing))
    assert plain.token_ids == full.token_ids
    assert plain.sampling == full.sampling
    more = {"truncation": "disabled", "background": False, "include": ["reasoning.encrypted_content"], "stop": []}
    assert codec.encode_chat("responses", body_of("responses", **more)).token_ids == plain.token_ids


def test_false_is_not_zero(codec: RecipeCodec) -> None:
    assert refused(codec, "chat", chat_body(frequency_penalty=False)).param == "frequency_penalty"
    assert refused(codec, "chat", chat_body(n=True)).param == "n"


def test_honoured_parameters_reach_the_sampling(codec: RecipeCodec) -> None:
    body = chat_body(
        top_k=5, n=3, seed=7, stop=["END"], stop_token_ids=[1, 2], ignore_eos=True, max_completion_tokens=9,
        temperature=0.3, top_p=0.9, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    sampling = codec.encode_chat("chat", body).sampling
    assert (sampling.top_k, sampling.n, sampling.seed, sampling.stop) == (5, 3, 7, ("END",))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((1, 2), True, 9)
    assert (sampling.temperature, sampling.top_p) == (0.3, 0.9), "as written: neither widened from 32 bits nor replaced"
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)


def test_other_protocols_have_extras_too(codec: RecipeCodec) -> None:
    messages = codec.encode_chat("messages", body_of("messages", top_k=5, seed=7, stop_sequences=["a"])).sampling
    assert (messages.top_k, messages.seed, messages.stop, messages.max_tokens) == (5, 7, ("a",), 64)
    responses = codec.encode_chat("responses", body_of("responses", stop=["a", "b"], max_output_tokens=3)).sampling
    assert (responses.stop, responses.max_tokens) == (("a", "b"), 3)


def test_thinking_budget_is_handed_on(codec: RecipeCodec) -> None:
    body = body_of("messages", thinking={"type": "enabled", "budget_tokens": 2048})
    assert codec.encode_chat("messages", body).sampling.thinking_budget == 2048


def test_thinking_sampling_of_the_official_service(model: tuple[Path, Path]) -> None:
    codec = RecipeCodec(*model, served_names=("flash",), thinking_sampling="recipe")
    assert codec.encode_chat("chat", chat_body(temperature=0.0)).sampling.temperature == 1.0
    off = {"thinking": {"type": "disabled"}}
    assert codec.encode_chat("chat", chat_body(temperature=0.0, **off)).sampling.temperature == 0.0


def test_greedy_is_honoured_in_thinking_mode(codec: RecipeCodec) -> None:
    assert codec.encode_chat("chat", chat_body(temperature=0)).sampling.temperature == 0.0
    assert codec.encode_chat("chat", chat_body()).sampling.temperature == 1.0


def test_clashing_limits(codec: RecipeCodec) -> None:
    error = refused(codec, "chat", chat_body(max_tokens=3, max_completion_tokens=4))
    assert error.param == "max_completion_tokens"
    assert codec.encode_chat("chat", chat_body(max_tokens=4, max_completion_tokens=4)).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1.5), ("top_k", -2), ("top_k", "5"), ("n", 0), ("n", 1000), ("n", 2.0),
        ("max_completion_tokens", 0), ("max_completion_tokens", "9"), ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]), ("stop_token_ids", 3), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(codec: RecipeCodec, name: str, value: Any) -> None:
    error = refused(codec, "chat", chat_body(**{name: value}))
    assert error.param == name
    assert "must be" in error.message
    assert repr(value) in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", 2.1), ("temperature", True), ("temperature", "1"), ("top_p", 0), ("top_p", 1.1),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("seed", -1), ("top_logprobs", 21), ("stop", ["x"] * 17),
        ("stream", "yes"), ("logprobs", 1),
    ],
)  # fmt: skip
def test_bad_values_of_the_protocol_are_refused(codec: RecipeCodec, name: str, value: Any) -> None:
    error = refused(codec, "chat", chat_body(**{name: value}))
    assert error.param == name or name in error.message


def test_an_engine_that_can_more(model: tuple[Path, Path]) -> None:
    codec = RecipeCodec(*model, served_names=("flash",), honoured=HONOURABLE)
    body = chat_body(
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -1},
        min_tokens=2,
    )
    sampling = codec.encode_chat("chat", body).sampling
    assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.min_tokens) == (1.2, {5: -1.0}, 2)
    for name, value in (("logit_bias", {"x": 1}), ("logit_bias", {"1": 900}), ("logit_bias", [1]), ("min_p", 2),
                        ("repetition_penalty", 0)):  # fmt: skip
        assert refused(codec, "chat", chat_body(**{name: value})).param == name


def test_settings_of_the_codec_are_checked(model: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="unknown parameters"):
        RecipeCodec(*model, honoured=("beam_width",))
    with pytest.raises(ValueError, match="thinking_sampling must be"):
        RecipeCodec(*model, thinking_sampling="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_output_limit(codec: RecipeCodec, protocol: str) -> None:
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    chat = codec.encode_chat(protocol, body_of(protocol) | {limit: 100})  # type: ignore[arg-type]
    length = len(chat.token_ids)
    assert chat.resolve_max_tokens(length + 100) == 100
    with pytest.raises(CodecError) as caught:
        chat.resolve_max_tokens(length + 99)
    assert caught.value.protocol == protocol
    with pytest.raises(CodecError):
        chat.resolve_max_tokens(length + 100, extra_prompt_tokens=1)


def test_default_output_limit_fits_the_room(codec: RecipeCodec) -> None:
    chat = codec.encode_chat("chat", chat_body())
    length = len(chat.token_ids)
    assert chat.resolve_max_tokens(1 << 20) == 65536
    assert chat.resolve_max_tokens(length + 6) == 6
    with pytest.raises(CodecError):
        chat.resolve_max_tokens(length - 1)

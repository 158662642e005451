"""Every top-level parameter of a body is read by the recipe, honoured here, known to change nothing, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .chat import ProtocolName
from .errors import CodecError

__all__ = ["DEFAULT_HONOURED", "HONOURABLE", "split_parameters"]

_RECIPE: dict[ProtocolName, frozenset[str]] = {
    "chat": frozenset(
        [
            "model",
            "messages",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "max_tokens",
            "stop",
            "logprobs",
            "top_logprobs",
            "seed",
            "tools",
            "tool_choice",
            "response_format",
            "reasoning_effort",
            "thinking",
        ]
    ),
    "responses": frozenset(
        [
            "model",
            "input",
            "instructions",
            "stream",
            "temperature",
            "top_p",
            "max_output_tokens",
            "top_logprobs",
            "tools",
            "tool_choice",
            "text",
            "reasoning",
            "user",
        ]
    ),
    "messages": frozenset(
        [
            "model",
            "messages",
            "system",
            "stream",
            "temperature",
            "top_p",
            "max_tokens",
            "stop_sequences",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "metadata",
        ]
    ),
}

_INERT = frozenset(
    [
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "cache_control",
    ]
)
"""They name the caller or steer billing, caching and extra report fields: the output is the same without them."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "store": (False,),
    "top_k": (0, -1),
    "truncation": ("disabled",),
}
"""Values that ask for nothing; clients send them as defaults."""

DEFAULT_HONOURED = frozenset({"ignore_eos", "max_completion_tokens", "n", "seed", "stop", "stop_token_ids", "top_k"})
"""What the engine can do beyond what the recipe reads."""


def _number(low: float, high: float, *, above: bool = False) -> Callable[[Any], Any]:
    def check(value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high or (above and value == low):
            raise ValueError(f"must be a number {'above' if above else 'from'} {low} {'up ' if above else ''}to {high}")
        return float(value)

    return check


def _whole(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return check


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or any(not isinstance(item, str) for item in values) or len(values) > 16:
        raise ValueError("must be a string or a list of at most 16 strings")
    return tuple(item for item in values if item)


def _bias(value: Any) -> dict[int, float]:
    check = _number(-100, 100)
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id and bias")
    result = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit()):
            raise ValueError(f"has the key {token!r}, which is not a token id")
        result[int(token)] = check(bias)
    return result


HONOURABLE: dict[str, Callable[[Any], Any]] = {
    "frequency_penalty": _number(-2, 2),
    "ignore_eos": _switch,
    "logit_bias": _bias,
    "max_completion_tokens": _whole(1, (1 << 31) - 1),
    "min_p": _number(0, 1),
    "min_tokens": _whole(0, (1 << 31) - 1),
    "n": _whole(1, 128),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 2, above=True),
    "seed": _whole(0, (1 << 63) - 1),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "top_k": _whole(-1, (1 << 31) - 1),
}
"""Parameters that a codec can be told to hand on (`honoured=`), each with its check."""

_EVERYWHERE = frozenset({"min_p", "repetition_penalty", "seed", "top_k"})
_FOR: dict[ProtocolName, frozenset[str]] = {
    "chat": frozenset(HONOURABLE),
    "responses": _EVERYWHERE | {"stop"},
    "messages": _EVERYWHERE,
}


def split_parameters(protocol: ProtocolName, body: dict[str, Any], honoured: frozenset[str]) -> dict[str, Any]:
    """Take out of `body` all that the recipe does not read and return what is honoured here, checked.

    Raises `CodecError` (400) naming the first parameter that nobody would act on.
    """
    recipe = _RECIPE[protocol]
    taken: dict[str, Any] = {}
    for name in [name for name in body if name not in recipe]:
        value = body.pop(name)
        if value is None or name in _INERT or _is_neutral(name, value):
            continue
        if name not in honoured & _FOR[protocol]:
            raise _unsupported(protocol, name, value)
        try:
            taken[name] = HONOURABLE[name](value)
        except ValueError as error:
            raise CodecError(400, protocol, f"{error}, not {_short(value)}", name) from None
    _nested(protocol, body)
    _output_limit(protocol, body, taken)
    return taken


def _is_neutral(name: str, value: Any) -> bool:
    return any(
        (type(value) is type(other) and value == other) or _same_number(value, other) for other in _neutral(name)
    )


def _neutral(name: str) -> tuple[Any, ...]:
    return _NEUTRAL.get(name, ())


def _same_number(value: Any, other: Any) -> bool:
    numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in (value, other))
    return numbers and value == other


def _unsupported(protocol: ProtocolName, name: str, value: Any) -> CodecError:
    hint = " (leave it out)"
    if name == "max_completion_tokens" and protocol == "responses":
        hint = " here; use max_output_tokens"
    elif name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        hint = " in this protocol"
    elif name in _NEUTRAL:
        hint = f"; only {_NEUTRAL[name][0]!r} is accepted"
    return CodecError(400, protocol, f"{_short(value)} is not supported{hint}", name, code="unsupported_parameter")


def _nested(protocol: ProtocolName, body: dict[str, Any]) -> None:
    """Values inside known parameters that the recipe would drop without a word."""

    def refuse(name: str, message: str) -> CodecError:
        return CodecError(400, protocol, message, name, code="unsupported_parameter")

    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not body.get("tools") and kind not in (None, "auto", "none"):
        raise refuse("tool_choice", f"{_short(choice)} needs `tools`")
    if protocol == "messages":
        if kind == "any":
            raise refuse("tool_choice", "type 'any' is not supported; use 'auto', 'none' or one named tool")
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
            raise refuse("tool_choice.disable_parallel_tool_use", "is not supported")
        config = body.get("output_config")
        if isinstance(config, dict) and config.get("format") is not None:
            raise refuse("output_config.format", "is not supported; use the chat protocol's response_format")
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        raise refuse("stream_options.continuous_usage_stats", "is not supported; usage comes with the last event")


def _output_limit(protocol: ProtocolName, body: dict[str, Any], taken: dict[str, Any]) -> None:
    if "max_completion_tokens" in taken:
        limit = taken.pop("max_completion_tokens")
        if body.get("max_tokens") not in (None, limit):
            raise CodecError(400, protocol, "differs from max_tokens; send one of them", "max_completion_tokens")
        body["max_tokens"] = limit
    if protocol == "messages":
        limit, bound = body.get("max_tokens"), 393216
        if isinstance(limit, int) and limit > bound:
            raise CodecError(400, protocol, f"must be at most {bound}, not {limit}", "max_tokens")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

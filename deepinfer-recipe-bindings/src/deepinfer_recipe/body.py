"""A request body as plain data: parsed strictly, bounded, and brought to the spelling that the recipe reads."""

from __future__ import annotations

import json
import math
from typing import Any

from .chat import ProtocolName
from .errors import CodecError

__all__ = ["MAX_BODY_BYTES", "MAX_DEPTH", "normalise", "parse_body"]

MAX_BODY_BYTES = 64 << 20
"""Default limit of a whole body; it may hold images as base64."""
MAX_DEPTH = 100
"""Deepest nesting of a body; tool schemas of real requests stay below 20."""

_MEDIA_KEYS = frozenset({"url", "image_url", "data"})
_INT64 = 1 << 63


def parse_body(
    protocol: ProtocolName, body: bytes | str | dict[str, Any], *, max_body_bytes: int, max_text_bytes: int
) -> dict[str, Any]:
    """A private copy of the body's object.

    `max_text_bytes` bounds all strings together apart from inline images, because the time to encode them cannot be
    cut short. Raises `CodecError`: 413 if it is too long, 400 if it is not a JSON object or holds a value that JSON
    does not have (NaN, a lone surrogate, a number beyond 64 bits, a key that is not a string) or is nested too deep.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        if len(body) > max_body_bytes:
            raise _too_long(protocol, "body", len(body), max_body_bytes)
        try:
            body = bytes(body).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CodecError(400, protocol, f"the body is not UTF-8 (byte {error.start})") from error
    if isinstance(body, str):
        if len(body) > max_body_bytes:
            raise _too_long(protocol, "body", len(body), max_body_bytes)
        body = _loads(protocol, body)
    if not isinstance(body, dict):
        raise CodecError(400, protocol, f"the body must be a JSON object, not {type(body).__name__}")
    return _Copy(protocol, max_body_bytes, max_text_bytes).value(body, "body", 0)


def _loads(protocol: ProtocolName, text: str) -> Any:
    def refuse(name: str) -> Any:
        raise CodecError(400, protocol, f"the body holds {name}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except CodecError:
        raise
    except RecursionError as error:
        raise CodecError(400, protocol, f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise CodecError(400, protocol, f"the body is not JSON: {error}") from error


class _Copy:
    """Copies a body while it checks and counts it."""

    def __init__(self, protocol: ProtocolName, max_body_bytes: int, max_text_bytes: int) -> None:
        self.protocol = protocol
        self.max_body_bytes = max_body_bytes
        self.max_text_bytes = max_text_bytes
        self.media = 0
        self.text = 0

    def value(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CodecError(400, self.protocol, f"the body is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            self._count(value, path)
        elif isinstance(value, dict):
            return {self._key(key, path): self.value(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise CodecError(400, self.protocol, f"{value} is not a JSON number", _param(path))
        elif isinstance(value, int):
            if not -_INT64 <= value < 2 * _INT64:
                raise CodecError(400, self.protocol, "the number does not fit 64 bits", _param(path))
        elif value is not None:
            raise CodecError(400, self.protocol, f"a {type(value).__name__} is not a JSON value", _param(path))
        return value

    def _key(self, key: Any, path: str) -> str:
        if not isinstance(key, str):
            raise CodecError(400, self.protocol, f"the key {key!r} is not a string", _param(path))
        self._count(key, path)
        return key

    def _count(self, text: str, path: str) -> None:
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:
            raise CodecError(
                400, self.protocol, f"the text holds a lone surrogate at position {error.start}", _param(path)
            ) from error
        if path.rpartition(".")[2] in _MEDIA_KEYS:
            self.media += size
        else:
            self.text += size
        if self.text > self.max_text_bytes:
            raise _too_long(self.protocol, "text of the body", None, self.max_text_bytes)
        if self.media > self.max_body_bytes:
            raise _too_long(self.protocol, "body", None, self.max_body_bytes)


def _param(path: str) -> str | None:
    return path.partition(".")[2] or None


def _too_long(protocol: ProtocolName, what: str, size: int | None, limit: int) -> CodecError:
    found = "more" if size is None else f"{size}"
    return CodecError(413, protocol, f"the {what} has {found} bytes; the limit is {limit}", code="request_too_large")


def normalise(protocol: ProtocolName, body: dict[str, Any]) -> int | None:
    """Rewrite in place what clients send in another spelling; return a whole-number reasoning effort, if any.

    The role `developer` becomes `system`; tool call arguments given as an object become JSON text; a history's
    `reasoning` becomes `reasoning_content`; `chat_template_kwargs` becomes the switches that it names.
    """
    if protocol == "chat":
        _template_switches(body)
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict):
                _chat_message(message)
    return _whole_effort(protocol, body)


def _chat_message(message: dict[str, Any]) -> None:
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "assistant":
        return
    if isinstance(message.get("reasoning"), str) and message.get("reasoning_content") is None:
        message["reasoning_content"] = message.pop("reasoning")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def _template_switches(body: dict[str, Any]) -> None:
    switches = body.pop("chat_template_kwargs", None)
    if switches is None:
        return
    if not isinstance(switches, dict):
        raise CodecError(400, "chat", "must be an object", "chat_template_kwargs")
    for name, value in switches.items():
        where = f"chat_template_kwargs.{name}"
        if name in ("thinking", "enable_thinking"):
            if not isinstance(value, bool):
                raise CodecError(400, "chat", f"must be true or false, not {value!r}", where)
            wanted = {"type": "enabled" if value else "disabled"}
            if body.setdefault("thinking", wanted) != wanted:
                raise CodecError(400, "chat", "says something else than `thinking`; send one of them", where)
        elif name == "reasoning_effort":
            if body.setdefault("reasoning_effort", value) != value:
                raise CodecError(400, "chat", "says something else than `reasoning_effort`; send one of them", where)
        else:
            raise CodecError(400, "chat", "is not supported", where, code="unsupported_parameter")


_EFFORT_HOLDERS: dict[ProtocolName, tuple[tuple[str, str], ...]] = {
    "chat": (("", "reasoning_effort"), ("thinking", "reasoning_effort")),
    "responses": (("reasoning", "effort"),),
    "messages": (("output_config", "effort"),),
}


def _whole_effort(protocol: ProtocolName, body: dict[str, Any]) -> int | None:
    """Replace a whole-number effort (1 to 100) by a name that the recipe knows, and return the number."""
    found = None
    for parent, key in _EFFORT_HOLDERS[protocol]:
        holder = body.get(parent) if parent else body
        value = holder.get(key) if isinstance(holder, dict) else None
        if holder is None or isinstance(value, bool) or not isinstance(value, int):
            continue
        if not 1 <= value <= 100:
            where = f"{parent}.{key}" if parent else key
            raise CodecError(400, protocol, f"must be a name or a whole number from 1 to 100, not {value}", where)
        holder[key] = "max" if value == 100 else "high"
        found = value
    return found

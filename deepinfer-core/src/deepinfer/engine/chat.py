"""Conversations: a codec of a plugin writes the prompt and reads the answer; what lies between is like any request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.engine.front_end import CODEC_ADVICE, FrontEnd
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.prompts import Prompt
from deepinfer.engine.requests import check_params
from deepinfer.errors import DeepInferError, InvalidRequest
from deepinfer.sampling.params import SamplingParams

__all__ = ["CHAT_PARAMS", "OPTIONS", "Chat", "open_chat", "split_conversations"]

OPTIONS = ("chat_template_kwargs", "reasoning_effort", "thinking", "tool_choice")
"""Fields of a Chat Completions body that shape the prompt. Those about sampling belong into `SamplingParams`."""

CHAT_PARAMS = SamplingParams(max_tokens=None)
"""Sampling of a chat that asks for nothing else: up to the end of the context."""


@dataclass(frozen=True)
class Chat:
    """One conversation on its way.

    Attributes:
        prompt: ids as the codec wrote them, or why it could not.
        codec: wrote them.
        encoded: what the codec needs to read the answer.
    """

    prompt: Prompt
    codec: Any = None
    encoded: Any = None

    def read(self, output: RequestOutput) -> None:
        """Add the answer to each completion that has ended, unless it ended with an error."""
        for completion in output.outputs:
            if self.encoded is None or completion.finish_reason in (None, "error"):
                continue
            reader = self.codec.open_stream(self.encoded, id=output.request_id, cached_tokens=output.num_cached_tokens)
            reader.push(completion.token_ids)
            reader.finish(completion.finish_reason)
            completion.message = reader.result()["choices"][0]["message"]


def split_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations, and whether the caller gave a single one.

    Raises:
        InvalidRequest: not a list of messages or of conversations.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(
            f"{messages!r} is not a list of messages like {{'role': 'user', 'content': 'Hello'}}, nor a list of such "
            "lists",
            field="messages",
        )
    if all(isinstance(item, Mapping) for item in messages):
        return [list(messages)], True
    return list(messages), False


def open_chat(
    front: FrontEnd,
    conversation: Any,
    params: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> Chat:
    """Write one conversation as a prompt; what is wrong with it goes into the prompt.

    Raises:
        InvalidRequest: no installed codec writes chats for this model, or tools or options that are none.
    """
    codec = front.codec
    if codec is None:
        raise InvalidRequest(CODEC_ADVICE, field="messages")
    if not (hasattr(codec, "encode_chat") and hasattr(codec, "open_stream")):
        raise InvalidRequest(
            f"the codec {type(codec).__name__} writes text only; a chat needs one that knows the model's chat format "
            "(pip install deepinfer-recipe-bindings for DeepSeek-V4.1)",
            field="messages",
        )
    if options is not None and not isinstance(options, Mapping):
        raise InvalidRequest(f"{options!r} is not a dict", field="options")
    if tools is not None and not isinstance(tools, list | tuple):
        raise InvalidRequest(f"{tools!r} is not a list of tools", field="tools")
    for name in options or ():
        if name not in OPTIONS:
            raise InvalidRequest(
                f"is not an option of a chat; options are {', '.join(OPTIONS)}, sampling and structured_output belong "
                "into sampling_params",
                field=f"options.{name}",
            )
    try:
        stop = check_params(params, front.facts.traits).stop_strings
        body = {"model": front.facts.served_name, "messages": conversation, **(options or {})}
        body |= {"tools": list(tools)} if tools else {}
        encoded = codec.encode_chat("chat", body | {"stop": list(stop)} if stop else body)
        _check_constraint(encoded.constraint)
    except DeepInferError as error:
        return Chat(Prompt(error=error))
    return Chat(Prompt(token_ids=encoded.token_ids), codec, encoded)


def _check_constraint(constraint: Any) -> None:
    """Refuse what an answer would have to follow; tools that may be called force nothing."""
    if constraint is not None and constraint.kind != "tool_call":
        raise InvalidRequest(
            "a call that must come is not enforced; use 'auto' or 'none', or a structured_output", field="tool_choice"
        )

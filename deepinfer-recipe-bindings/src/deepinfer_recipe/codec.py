"""Codec of DeepSeek-V4.1: text, chats of three protocols, and outputs, all by token id."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe

from .body import MAX_BODY_BYTES, normalise, parse_body
from .chat import Constraint, EncodedChat, OutputStream, ProtocolName, Sampling
from .errors import CodecError
from .parameters import DEFAULT_HONOURED, HONOURABLE, split_parameters
from .process import PerProcess
from .stream import OutputReader, ParseState
from .text import MAX_TEXT_BYTES, TextCodec

__all__ = ["OFFICIAL_NAME", "RELEASE_IMAGE_ID", "REQUIRED_TOKENS", "RecipeCodec"]

OFFICIAL_NAME = "DeepSeek-V4.1-Flash"
RELEASE_IMAGE_ID = 129264
"""Image placeholder id of the release, for a config that does not name one."""

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_DSML = "｜DSML｜"
REQUIRED_TOKENS = (_BOS, _EOS, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", _DSML)
"""Added tokens without which no chat of V4.1 can be written or read."""

_VISIBLE = ("<think>", "</think>", _DSML)
_EFFORT_OF_NAME = "Reasoning Effort: 75"
_Request = recipe.ChatCompletionRequest | recipe.ResponsesRequest | recipe.MessagesRequest
_REQUESTS: dict[str, type[Any]] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}


@dataclass(frozen=True)
class _Handles:
    """Native objects of one process."""

    tokenizer: recipe.Tokenizer
    encoding: recipe.DeepseekV41Encoding
    options: recipe.ConversionOptions
    special_tokens: recipe.SpecialTokens


class RecipeCodec(TextCodec):
    """The `Codec` of V4.1 checkpoints.

    Args:
        model_dir: checkpoint directory (config.json gives the image token and the vocabulary size).
        tokenizer_json: its tokenizer.
        served_names: model names that requests may ask for; the official name if empty.
        thinking_sampling: "honour" keeps the temperature and top_p of a request in thinking mode as well; "recipe"
            gives them the values of the official service (temperature 1, top_p by mode).
        honoured: extra parameters that the engine acts on (keys of `HONOURABLE`); others are refused.
        max_body_bytes, max_text_bytes: limits, checked before anything is encoded.

    A tokenizer without the tokens of `REQUIRED_TOKENS` still serves text; a chat then raises `CodecError` naming them.
    Handles are native and belong to one process; they are built again after a fork. The codec cannot be pickled.
    Methods may be called from several threads; encoding releases the interpreter lock.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tokenizer_json: str | Path,
        served_names: Collection[str] = (),
        *,
        thinking_sampling: Literal["honour", "recipe"] = "honour",
        honoured: Collection[str] = DEFAULT_HONOURED,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        super().__init__(model_dir, tokenizer_json, max_text_bytes=max_text_bytes, markers="all", visible=_VISIBLE)
        unknown = sorted(set(honoured) - set(HONOURABLE))
        if unknown:
            raise ValueError(f"honoured: unknown parameters {unknown}; known are {sorted(HONOURABLE)}")
        if thinking_sampling not in ("honour", "recipe"):
            raise ValueError(f"thinking_sampling must be 'honour' or 'recipe', not {thinking_sampling!r}")
        self.served_names = tuple(dict.fromkeys(served_names)) or (OFFICIAL_NAME,)
        self.thinking_sampling = thinking_sampling
        self.honoured = frozenset(honoured)
        self.max_body_bytes = max_body_bytes
        added = self.vocabulary.added
        self.missing_tokens = tuple(token for token in REQUIRED_TOKENS if token not in added)
        self.eos_ids |= {added[_EOS]} if _EOS in added else set()
        self.bos_id = added.get(_BOS, self.bos_id)
        self.image_token = self._find_image_token()
        self.image_id = added.get(self.image_token) if self.image_token else None
        self.dsml_id = added.get(_DSML)
        self.marker_ids = frozenset(added[token] for token in _VISIBLE if token in added)
        self._handles: PerProcess[_Handles] = PerProcess(self._build_handles)

    def encode_chat(self, protocol: ProtocolName, body: bytes | str | dict[str, Any]) -> EncodedChat:
        """Read a request body of one protocol and write its prompt as ids.

        Raises `CodecError` (status 400; 413 for a body that is too long) whose `param` names the parameter where one
        is to blame. The body is not changed.
        """
        if protocol not in _REQUESTS:
            raise CodecError(400, "text", f"unknown protocol {protocol!r}; known are {sorted(_REQUESTS)}", "protocol")
        if self.missing_tokens:
            raise CodecError(400, protocol, self.chat_problem(), code="chat_not_supported")
        data = parse_body(protocol, body, max_body_bytes=self.max_body_bytes, max_text_bytes=self.max_text_bytes)
        if not isinstance(data.get("model"), str) or data["model"] not in self.served_names:
            served = ", ".join(self.served_names)
            raise CodecError(400, protocol, f"{data.get('model')!r} is not served here; served: {served}", "model")
        effort = normalise(protocol, data)
        extra = split_parameters(protocol, data, self.honoured)
        return self._encode(protocol, data, effort, extra)

    def open_stream(
        self,
        chat: EncodedChat,
        *,
        id: str,
        model: str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
    ) -> OutputStream:
        """A reader for one choice of `chat` (several may be opened, one per choice).

        `id` is the response id, `model` the name to report (default: the one asked for), `prompt_tokens` the prompt's
        length with images expanded (default: `len(chat.token_ids)`), `cached_tokens` how many of them came from a
        prefix cache. The chat must come from a codec of this process.
        """
        handles = self._handles.get()
        return OutputReader(
            self,
            handles.tokenizer,
            chat.parse_state,
            id=id,
            model=model or chat.model,
            prompt_tokens=len(chat.token_ids) if prompt_tokens is None else prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def chat_problem(self) -> str:
        """Why chats are refused: the special tokens that this tokenizer lacks."""
        return (
            f"chats are not possible with {self.vocabulary.path}: it lacks the special tokens "
            f"{', '.join(self.missing_tokens)}; use the checkpoint's own tokenizer.json, or send text prompts"
        )

    def _encode(
        self, protocol: ProtocolName, data: dict[str, Any], effort: int | None, extra: dict[str, Any]
    ) -> EncodedChat:
        handles = self._handles.get()
        try:
            request = _REQUESTS[protocol](data)
            namespaces = request.namespace_tool_map(handles.options) if protocol == "responses" else {}
            echo = request.echo() if protocol == "responses" else None
            converted = request.convert(handles.options)
            conversation = converted.conversation
            sources = self._image_sources(protocol, handles, conversation)
            ids = handles.encoding.encode(conversation)
        except CodecError:
            raise
        except recipe.ConversionError as error:
            raise _from_conversion(protocol, error, self._blame(protocol, data, error)) from error
        except RecursionError as error:
            raise CodecError(400, protocol, "the body is nested too deeply") from error
        except (ValueError, TypeError, OverflowError) as error:
            raise CodecError(400, protocol, _plain(str(error)), self._blame(protocol, data, error)) from error
        except RuntimeError as error:
            raise CodecError(400, protocol, f"the chat cannot be written for this model: {error}") from error
        if ids.count(-1 if self.image_id is None else self.image_id) != len(sources):
            raise CodecError(400, protocol, "an image lost its place in the prompt; put images into message content")
        if effort is not None and conversation.thinking_mode:
            ids = self._with_effort(protocol, ids, effort)
        parsing = converted.parsing_options
        parsing.special_tokens = handles.special_tokens
        if "stop" in extra:
            parsing.stop_sequences = list(extra["stop"])
        return EncodedChat(
            protocol=protocol,
            model=data["model"],
            token_ids=ids,
            sampling=self._sampling(data, converted, parsing, extra),
            constraint=_constraint(data, converted.inference_options.output_constraint),
            image_sources=sources,
            stream=converted.stream,
            parse_state=ParseState(protocol, converted, parsing, namespaces, echo),
            resolve=lambda prompt, context: _resolve(protocol, converted, prompt, context),
        )

    def _blame(self, protocol: ProtocolName, data: dict[str, Any], error: Exception) -> str | None:
        """The parameter that alone, in an otherwise harmless body, gives the same error (the recipe names none)."""
        harmless: dict[str, Any] = {"model": self.served_names[0]}
        if protocol == "responses":
            harmless["input"] = "x"
        else:
            harmless |= {"messages": [{"role": "user", "content": "x"}]}
        options = self._handles.get().options
        for name, value in data.items():
            try:
                _REQUESTS[protocol]({**harmless, name: value}).convert(options)
            except (recipe.ConversionError, ValueError, TypeError, OverflowError) as found:
                if _reason(found) == _reason(error):
                    return name
        return None

    def _image_sources(
        self, protocol: ProtocolName, handles: _Handles, conversation: recipe.Conversation
    ) -> tuple[Any, ...]:
        if not any(message.image_sources for message in conversation.messages):
            return ()
        if self.image_token is None:
            raise CodecError(
                400, protocol, f"images are not possible: {self.vocabulary.path} has no image token", "messages"
            )
        return tuple(handles.encoding.render_conversation(conversation).image_sources)

    def _with_effort(self, protocol: ProtocolName, ids: list[int], effort: int) -> list[int]:
        """Replace the effort of the system header by a number the recipe has no name for.

        Only the text between the System token and the next special token is written again, without the added
        vocabulary, so nothing that a user typed can turn into a special token.
        """
        if effort in (75, 100):
            return ids
        special = frozenset(self.vocabulary.added.values())
        start = 2  # begin-of-sequence, System
        end = next((i for i in range(start, len(ids)) if ids[i] in special), len(ids))
        header = self.decode(ids[start:end], skip_special=False)
        plain = self.vocabulary.encode(header, protocol=protocol)
        if ids[1] != self.vocabulary.added["<｜System｜>"] or plain != ids[start:end] or _EFFORT_OF_NAME not in header:
            raise CodecError(
                400, protocol, f"effort {effort} cannot be written here; use low, high or max", "reasoning_effort"
            )
        header = header.replace(_EFFORT_OF_NAME, f"Reasoning Effort: {effort}", 1)
        return [*ids[:start], *self.vocabulary.encode(header, protocol=protocol), *ids[end:]]

    def _sampling(
        self, data: dict[str, Any], converted: recipe.ConversationRequest, parsing: Any, extra: dict[str, Any]
    ) -> Sampling:
        options = converted.inference_options
        temperature, top_p = options.temperature, options.top_p
        if self.thinking_sampling == "honour":
            temperature = _given(data, "temperature", temperature)
            top_p = _given(data, "top_p", top_p)
        thinking = data.get("thinking")
        budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
        own = {name: value for name, value in extra.items() if name not in ("stop", "seed")}
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            max_tokens=options.max_tokens,
            seed=extra.get("seed", options.seed),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            stop=tuple(parsing.stop_sequences),
            thinking_budget=budget if converted.conversation.thinking_mode else None,
            **own,
        )

    def _find_image_token(self) -> str | None:
        """The spelling of the image placeholder: whatever token has the id, for spellings differ between releases."""
        declared = self.config.get("image_token_id", RELEASE_IMAGE_ID)
        token = self.vocabulary.token_of(declared) if isinstance(declared, int) else None
        return token if token in self.vocabulary.added else None

    def _build_handles(self) -> _Handles:
        # an unusable spelling rather than the recipe's default, which may be another token of this vocabulary
        spellings = recipe.SpecialTokens(image=self.image_token or "<｜no image token｜>")
        try:
            tokenizer = recipe.Tokenizer.from_file(str(self.vocabulary.path))
        except RuntimeError as error:
            raise CodecError(500, "text", f"{self.vocabulary.path}: unusable for chats ({error})") from error
        version = recipe.ModelVersion.DeepseekV41Flash
        options = recipe.ConversionOptions().with_special_tokens(spellings)
        return _Handles(
            tokenizer=tokenizer,
            encoding=recipe.DeepseekV41Encoding().with_tokenizer(tokenizer).with_special_tokens(spellings),
            options=options.with_model_versions_by_name(dict.fromkeys(self.served_names, version)),
            special_tokens=spellings,
        )


def _given(data: dict[str, Any], name: str, otherwise: float | None) -> float | None:
    value = data.get(name)
    return otherwise if value is None else float(value)


def _constraint(data: dict[str, Any], constraint: recipe.OutputConstraint | None) -> Constraint | None:
    """The recipe's constraint; a named tool choice, which it widens to every tool, keeps only that tool."""
    if constraint is None:
        return None
    choice = data.get("tool_choice")
    if constraint.kind != "tool_call_required" or not isinstance(choice, dict):
        return Constraint(constraint.kind, constraint.schema)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    tools = json.loads(constraint.schema)
    named = [tool for tool in tools if tool["function"]["name"] == name]
    return Constraint(constraint.kind, json.dumps(named or tools, ensure_ascii=False, separators=(",", ":")))


def _resolve(protocol: ProtocolName, converted: recipe.ConversationRequest, prompt: int, context: int) -> int:
    try:
        return converted.resolve_max_tokens(prompt, context)
    except recipe.ConversionError as error:
        raise _from_conversion(protocol, error) from error


def _reason(error: Exception) -> str:
    return error.body if isinstance(error, recipe.ConversionError) else str(error)


def _from_conversion(protocol: ProtocolName, error: recipe.ConversionError, blamed: str | None = None) -> CodecError:
    try:
        detail = json.loads(error.body)["error"]
        message, param = str(detail["message"]), detail.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = str(error.body), None
    return CodecError(error.status_code, protocol, message, param or blamed)


def _plain(message: str) -> str:
    return message.removeprefix("invalid request body: ").removeprefix("invalid JSON request: ")

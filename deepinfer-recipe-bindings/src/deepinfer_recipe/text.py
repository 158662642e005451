"""Text codec over any tokenizer.json: no chat format, no deepseek-recipe."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from deepinfer.api.errors import CheckpointError

from .chat import EncodedChat, OutputStream, ProtocolName
from .detokenize import DecodeStream
from .errors import CodecError
from .vocabulary import Vocabulary

__all__ = ["MAX_TEXT_BYTES", "TextCodec", "read_json"]

MAX_TEXT_BYTES = 16 << 20
"""Default limit of one prompt text: encoding is linear but cannot be cancelled (about a second per MiB)."""


class TextCodec:
    """Codec of a model whose chat format is unknown: text in, text out; a chat is refused by name.

    Args:
        model_dir: directory with config.json and generation_config.json (either may be missing).
        tokenizer_json: the tokenizer file.
        max_text_bytes: longest text (UTF-8 bytes) that is encoded.
        markers, visible: see `Vocabulary`.

    Attributes: `vocab_size` (ids below it are the model's, whether or not the tokenizer has a token for each),
    `eos_ids`, `bos_id` (None if the model has none). Raises `CheckpointError` for an unusable tokenizer.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tokenizer_json: str | Path,
        *,
        max_text_bytes: int = MAX_TEXT_BYTES,
        markers: Literal["all", "markup"] = "markup",
        visible: Collection[str] | None = None,
    ) -> None:
        self.config = read_json(Path(model_dir) / "config.json")
        self.vocabulary = Vocabulary(tokenizer_json, markers=markers, visible=visible)
        self.max_text_bytes = max_text_bytes
        text_config = self.config.get("text_config") or {}
        declared = text_config.get("vocab_size", self.config.get("vocab_size"))
        self.vocab_size = declared if isinstance(declared, int) else self.vocabulary.size
        generation = read_json(Path(model_dir) / "generation_config.json")
        tokenizer_config = read_json(Path(tokenizer_json).with_name("tokenizer_config.json"))
        sources = (generation, self.config, text_config)
        self.eos_ids = frozenset(token for source in sources for token in _ids(source.get("eos_token_id")))
        named_eos = self._named(tokenizer_config.get("eos_token"))
        if named_eos is not None:
            self.eos_ids |= {named_eos}
        bos = [token for source in sources for token in _ids(source.get("bos_token_id"))]
        self.bos_id: int | None = bos[0] if bos else self._named(tokenizer_config.get("bos_token"))

    def encode_text(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of `text`.

        Special tokens spelled in the text stay plain text unless `allow_special`. No begin-of-sequence is added unless
        `add_bos`. Raises `CodecError` (400) for a text that is too long, holds a lone surrogate, or needs an id that
        the model does not have.
        """
        if not isinstance(text, str):
            raise CodecError(400, "text", f"a prompt text must be a string, not {type(text).__name__}", "prompt")
        self._check_length(text)
        ids = self.vocabulary.encode(text, allow_special=allow_special)
        if self.vocabulary.size > self.vocab_size:
            self._check_ids(ids, "prompt")
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise CodecError(400, "text", "the model has no begin-of-sequence token; use add_bos=False", "add_bos")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; what is not UTF-8, and an id without a token, becomes U+FFFD.

        `skip_special` hides the special tokens. Raises `CodecError` (400) for an id outside the vocabulary.
        """
        stream = self.decode_stream(skip_special=skip_special)
        return stream.push(ids) + stream.finish()

    def decode_stream(self, *, skip_special: bool = True) -> DecodeStream:
        """A detokeniser for one output: `push(ids)` and `finish()` together give exactly `decode`."""
        return _Checked(self.vocabulary.open_stream(skip_special=skip_special), self)

    def encode_chat(self, protocol: ProtocolName, body: bytes | str | dict[str, Any]) -> EncodedChat:
        """Always raises `CodecError`: no chat format is known for this model."""
        raise CodecError(400, protocol, self.chat_problem(), code="chat_not_supported")

    def open_stream(
        self,
        chat: EncodedChat,
        *,
        id: str,
        model: str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
    ) -> OutputStream:
        """Always raises `CodecError`: there is no chat to answer."""
        raise CodecError(400, chat.protocol, self.chat_problem(), code="chat_not_supported")

    def chat_problem(self) -> str:
        """Why chats are refused."""
        return (
            f"chats are not supported for model_type {self.config.get('model_type')!r}: its chat format is unknown; "
            "send a text prompt, or install a plugin with a codec for this model"
        )

    def check_id(self, token_id: int) -> int:
        """`token_id`, if it is one of the model's; else `CodecError` (400)."""
        if type(token_id) is not int:
            token_id = _as_int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise CodecError(
                400, "text", f"token id {token_id} is outside the vocabulary (0..{self.vocab_size - 1})", "token_ids"
            )
        return token_id

    def _check_ids(self, ids: list[int], param: str) -> None:
        outside = [token for token in ids if token >= self.vocab_size]
        if outside:
            token = self.vocabulary.token_of(outside[0])
            raise CodecError(
                400, "text", f"{token!r} has id {outside[0]}, outside the model (0..{self.vocab_size - 1})", param
            )

    def _check_length(self, text: str) -> None:
        if 4 * len(text) > self.max_text_bytes:
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                return  # the encoder says where
            if size > self.max_text_bytes:
                raise CodecError(
                    413, "text", f"the text has {size} bytes; the limit is {self.max_text_bytes}", "prompt"
                )

    def _named(self, token: Any) -> int | None:
        name = token.get("content") if isinstance(token, dict) else token
        return self.vocabulary.id_of(name) if isinstance(name, str) else None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} holds native handles; build one in each process from its paths")


class _Checked:
    """A stream that refuses ids outside the model's vocabulary before it takes any of a push."""

    def __init__(self, inner: DecodeStream, codec: TextCodec) -> None:
        self._inner = inner
        self._check = codec.check_id

    def push(self, ids: Iterable[int]) -> str:
        return self._inner.push([self._check(token) for token in ids])

    def finish(self) -> str:
        return self._inner.finish()

    @property
    def held(self) -> bool:
        return self._inner.held


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} if there is no such file. Raises `CheckpointError` if it is not an object."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds a {type(data).__name__}, expected a JSON object")
    return data


def _as_int(value: Any) -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise CodecError(400, "text", f"a token id must be an integer, not {type(value).__name__}", "token_ids")


def _ids(value: Any) -> list[int]:
    if isinstance(value, bool) or value is None:
        return []
    return [value] if isinstance(value, int) else [token for token in value if isinstance(token, int)]

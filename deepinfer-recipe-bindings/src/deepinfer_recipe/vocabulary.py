"""A tokenizer.json as two tokenizers: one that knows the special tokens, and one to which they are plain text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from deepinfer.api.errors import CheckpointError

from .detokenize import ByteStream, DecodeStream, WindowStream, byte_alphabet
from .errors import CodecError
from .process import PerProcess

__all__ = ["Vocabulary"]

_MARKUP = re.compile(r"<.*>|\[.*\]|\|.*\||.*｜.*", re.DOTALL)


class Vocabulary:
    """Encoding and decoding with one tokenizer.json.

    Args:
        tokenizer_json: path of the file.
        markers: which added tokens plain text must never become: "all", or "markup" (the special ones and those that
            look like <markup>; domain words and runs of spaces that a tokenizer adds stay ordinary tokens).
        visible: the markers that `decode(skip_special=True)` shows; None shows all that the file does not call special.

    Raises `CheckpointError` if the file is missing or not a tokenizer.
    """

    def __init__(
        self, tokenizer_json: str | Path, *, markers: Literal["all", "markup"], visible: Collection[str] | None = None
    ) -> None:
        self.path = Path(tokenizer_json)
        data = self._read()
        added = [token for token in data.get("added_tokens") or [] if isinstance(token, dict)]
        self.added: dict[str, int] = {token["content"]: int(token["id"]) for token in added}
        self._markers = {
            token["content"]: int(token["id"])
            for token in added
            if markers == "all" or token.get("special") or _MARKUP.fullmatch(token["content"])
        }
        special = {token["content"] for token in added if token.get("special")}
        hidden = special if visible is None else (special | set(self._markers)) - set(visible)
        self.hidden_ids = frozenset(self.added[name] for name in hidden)
        self._byte_level = _is_byte_level(data.get("decoder"))
        self._alphabet = byte_alphabet()
        self._pieces: dict[int, bytes | None] = {}
        self._full: PerProcess[Tokenizer] = PerProcess(self._build_full)
        self._plain: PerProcess[Tokenizer] = PerProcess(self._build_plain)
        self._check_added()
        self.size = 1 + max([*self.tokenizer.get_vocab(with_added_tokens=True).values(), -1])

    def _check_added(self) -> None:
        """An added token that the base vocabulary lacks is numbered by the tokenizer, whatever the file says."""
        numbers = {name: self.tokenizer.token_to_id(name) for name in self.added}
        wrong = [
            f"{name} is {found}, the file says {self.added[name]}"
            for name, found in numbers.items()
            if found != self.added[name]
        ]
        if wrong:
            raise CheckpointError(
                f"{self.path}: added tokens do not get the ids that the file gives them; list them in model.vocab too",
                problems=tuple(wrong),
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The Hugging Face tokenizer of this process, with the special tokens."""
        return self._full.get()

    def id_of(self, token: str) -> int | None:
        """Id of exactly this token, or None."""
        return self.tokenizer.token_to_id(token)

    def token_of(self, token_id: int) -> str | None:
        """The token's spelling inside the vocabulary, or None for an id without a token."""
        return self.tokenizer.id_to_token(token_id) if 0 <= token_id < self.size else None

    def encode(self, text: str, *, allow_special: bool = False, protocol: str = "text") -> list[int]:
        """Ids of `text`; spelled special tokens are plain text unless `allow_special`. Adds nothing at either end."""
        tokenizer = self._full.get() if allow_special else self._plain.get()
        try:
            # the batch call releases the interpreter lock; the single one does not
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            surrogate = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            where = "is not valid" if surrogate is None else f"holds a lone surrogate at position {surrogate}"
            raise CodecError(400, protocol, f"the text {where}") from error

    def open_stream(self, *, skip_special: bool) -> DecodeStream:
        """A new detokeniser; ids must be non-negative (`Codec.decode` checks them)."""
        if self._byte_level:
            return ByteStream(self._shown_piece if skip_special else self._piece)
        return WindowStream(self._decode_window, self._kept if skip_special else self._known)

    def _piece(self, token_id: int) -> bytes | None:
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.token_of(token_id)
            piece = None if token is None else self._bytes_of(token)
            self._pieces[token_id] = piece
            return piece

    def _shown_piece(self, token_id: int) -> bytes | None:
        return b"" if token_id in self.hidden_ids else self._piece(token_id)

    def _bytes_of(self, token: str) -> bytes:
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:  # an added token is stored as itself
            return token.encode()

    def _known(self, token_id: int) -> bool | None:
        return None if self.token_of(token_id) is None else True

    def _kept(self, token_id: int) -> bool | None:
        return False if token_id in self.hidden_ids else self._known(token_id)

    def _decode_window(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text("utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot read the tokenizer ({error.strerror}); a model directory needs a tokenizer.json"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{self.path}: not a tokenizer.json ({error})") from error
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise CheckpointError(f"{self.path}: not a tokenizer.json (no `model` object)")
        return data

    def _build_full(self) -> Tokenizer:
        tokenizer = self._build(self.path.read_text("utf-8"))
        tokenizer.no_truncation()  # a stored limit would cut prompts silently
        tokenizer.no_padding()
        return tokenizer

    def _build_plain(self) -> Tokenizer:
        data = self._read()
        data["post_processor"] = None
        _rename_markers(data, self._markers)
        data["truncation"] = None
        data["padding"] = None
        return self._build(json.dumps(data, ensure_ascii=False))

    def _build(self, text: str) -> Tokenizer:
        try:
            return Tokenizer.from_str(text)
        except Exception as error:  # the binding raises plain Exception
            raise CheckpointError(f"{self.path}: not a usable tokenizer.json ({error})") from error


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return any(_is_byte_level(part) for part in parts) and all(
            _is_byte_level(part) or part.get("type") == "Fuse" for part in parts
        )
    return decoder.get("type") == "ByteLevel"


def _rename_markers(data: dict[str, Any], markers: dict[str, int]) -> None:
    """Give the markers names that no text can spell, everywhere in the file.

    They are not removed, because added tokens may be numbered by their order; and the base vocabulary may list them
    as pieces too. The unknown token keeps its name in the model, which needs it; as an added token it goes.
    """
    model = data["model"]
    vocabulary = model.get("vocab")
    prefix = f"\U0010fffe{secrets.token_hex(16)}"
    if isinstance(vocabulary, dict):
        unknown = model.get("unk_token")
        for name in markers:
            if name in vocabulary and name != unknown:
                vocabulary[prefix + name] = vocabulary.pop(name)
        merges = model.get("merges")
        if merges:
            model["merges"] = [merge for merge in merges if not _touches(merge, markers)]
    else:
        pieces = vocabulary if isinstance(vocabulary, list) else []
        index = model.get("unk_id")
        unknown = pieces[index][0] if isinstance(index, int) and index < len(pieces) else None
        for entry in pieces:
            if entry[0] in markers and entry[0] != unknown:
                entry[0] = prefix + entry[0]
    data["added_tokens"] = [token for token in data.get("added_tokens") or [] if token["content"] != unknown]
    for token in data["added_tokens"]:
        if token["content"] in markers:
            token["content"] = prefix + token["content"]


def _touches(merge: Any, markers: dict[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in markers or right in markers or left + right in markers

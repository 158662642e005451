"""The bytes of every token, as a grammar sees them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.json_files import read_json_object

__all__ = ["Vocabulary"]


@dataclass(frozen=True)
class Vocabulary:
    """Token bytes by id, for one model.

    Attributes:
        tokens: bytes of each id; empty for special tokens and ids without a token, which no grammar matches as text.
        eos_token_ids: ids that end a text; their bytes are empty too.
        added: spelling to id of the added (special and marker) tokens.
    """

    tokens: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    added: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.eos_token_ids:
            raise ConfigError("is empty: a grammar needs a token that ends the text", field="eos_token_ids")
        for token in self.eos_token_ids:
            if not 0 <= token < len(self.tokens):
                raise ConfigError(f"{token} is not an id of a vocabulary of {len(self.tokens)}", field="eos_token_ids")
            if self.tokens[token]:
                raise ConfigError(f"{token} is the ordinary text {self.tokens[token]!r}", field="eos_token_ids")

    @property
    def size(self) -> int:
        """Number of ids, the width of a row of logits."""
        return len(self.tokens)

    @property
    def words(self) -> int:
        """int32 words of a mask row, ceil(size / 32)."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def spelled(self) -> tuple[bytes, ...]:
        """Bytes of each id as a reader sees them: like `tokens`, with added tokens spelled out."""
        spelling = {token: name.encode() for name, token in self.added.items()}
        return tuple(text or spelling.get(token, b"") for token, text in enumerate(self.tokens))

    @cached_property
    def digest(self) -> str:
        """Names these tokens: equal digests compile to equal grammars."""
        state = hashlib.sha256(repr((len(self.tokens), sorted(self.eos_token_ids))).encode())
        for token in self.tokens:
            state.update(len(token).to_bytes(4, "little") + token)
        return state.hexdigest()

    @classmethod
    def from_file(cls, path: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
        """Read a tokenizer.json; see `from_tokenizer_json`."""
        return cls.from_tokenizer_json(read_json_object(path)[0], vocab_size, eos_token_ids)

    @classmethod
    def from_tokenizer_json(
        cls, contents: Mapping[str, Any], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> Vocabulary:
        """Vocabulary of a byte-level tokenizer.

        Args:
            contents: parsed tokenizer.json.
            vocab_size: ids of the model; the tokenizer may have fewer (padding ids), and more are ignored.
            eos_token_ids: ids that end a text.

        Raises:
            CheckpointError: not a byte-level tokenizer, or a piece outside the byte alphabet.
            ConfigError: no end token, or one that is ordinary text.
        """
        if not _is_byte_level(contents.get("decoder")):
            kind = (contents.get("decoder") or {}).get("type")
            raise CheckpointError(f"tokenizer.json: decoder {kind!r} is not ByteLevel, which structured output needs")
        pieces = (contents.get("model") or {}).get("vocab")
        if not isinstance(pieces, Mapping):
            raise CheckpointError("tokenizer.json: model.vocab is missing; structured output needs a BPE vocabulary")
        added = {str(token["content"]): int(token["id"]) for token in contents.get("added_tokens") or ()}
        special = {*added.values(), *(eos := tuple(eos_token_ids))}
        alphabet = _byte_alphabet()
        tokens = [b""] * vocab_size
        for piece, token in pieces.items():
            if token >= vocab_size or token in special:
                continue
            try:
                tokens[token] = bytes(map(alphabet.__getitem__, piece))
            except KeyError as error:
                message = f"tokenizer.json: piece {piece!r} (id {token}) has {error} outside the byte-level alphabet"
                raise CheckpointError(message) from error
        return cls(tuple(tokens), eos, {name: token for name, token in added.items() if token < vocab_size})


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, Mapping):
        return False
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return any(isinstance(part, Mapping) and part.get("type") == "ByteLevel" for part in parts or ())


def _byte_alphabet() -> dict[str, int]:
    """Byte of each printable stand-in: visible Latin-1 stands for itself, the others follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = itertools.count(0x100)
    return {chr(byte if byte in visible else next(shifted)): byte for byte in range(256)}

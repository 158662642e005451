"""Ids to text, piece by piece: nothing that comes out ever ends inside a character.

The text does not depend on how the ids were cut into pushes, and a whole decode is one push and one finish.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

__all__ = ["REPLACEMENT", "ByteStream", "DecodeStream", "WindowStream", "byte_alphabet"]

REPLACEMENT = "\ufffd"
_MAX_HELD = 64  # ids; only a run of undecodable ids gets this far


class DecodeStream(Protocol):
    """An incremental detokeniser of one output."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with `ids`; an unfinished character is held back."""

    def finish(self) -> str:
        """The rest: an unfinished character becomes U+FFFD. The stream is then new again."""

    @property
    def held(self) -> bool:
        """Whether the ids so far end inside a character."""


def byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level vocabularies: printable Latin-1 stands for itself, the rest sits at U+0100 up."""
    alphabet: dict[str, int] = {}
    moved = 0
    for value in range(256):
        if 33 <= value <= 126 or 161 <= value <= 172 or value >= 174:
            alphabet[chr(value)] = value
        else:
            alphabet[chr(256 + moved)] = value
            moved += 1
    return alphabet


class ByteStream:
    """Stream of a byte-level vocabulary: each id is a byte string, the text is their UTF-8 reading.

    `piece(id)` gives the id's bytes, b"" for an id to hide, None for an id without a token (U+FFFD in the text).
    """

    def __init__(self, piece: Callable[[int], bytes | None]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """See `DecodeStream.push`."""
        out = []
        for token in ids:
            data = self._piece(token)
            out.append(self._decoder.decode(b"", True) + REPLACEMENT if data is None else self._decoder.decode(data))
        return "".join(out)

    def finish(self) -> str:
        """See `DecodeStream.finish`."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest

    @property
    def held(self) -> bool:
        """See `DecodeStream.held`."""
        return bool(self._decoder.getstate()[0])


class WindowStream:
    """Stream over any `decode(ids) -> text`: decodes a short window again and gives what the new ids added.

    The window starts one emission back, so that decoders that treat the first piece in their own way (a dropped
    leading space, a joined word piece) see a neighbour.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], keep: Callable[[int], bool | None]) -> None:
        self._decode = decode
        self._keep = keep  # False hides an id, None says that it has no token
        self._shown: list[int] = []
        self._new: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """See `DecodeStream.push`."""
        out = []
        for token in ids:
            keep = self._keep(token)
            if keep is None:
                out.append(self._emit() + REPLACEMENT)
            elif keep:
                self._new.append(token)
                before, text = self._texts()
                complete = len(text) > len(before) and not text.endswith(REPLACEMENT)
                if complete or len(self._new) >= _MAX_HELD:
                    out.append(self._emit())
        return "".join(out)

    def finish(self) -> str:
        """See `DecodeStream.finish`."""
        rest = self._emit()
        self._shown = []
        return rest

    @property
    def held(self) -> bool:
        """See `DecodeStream.held`."""
        return bool(self._new)

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._shown) if self._shown else ""
        return before, self._decode([*self._shown, *self._new])

    def _emit(self) -> str:
        if not self._new:
            return ""
        before, text = self._texts()
        self._shown, self._new = self._new, []
        return text[len(before) :]

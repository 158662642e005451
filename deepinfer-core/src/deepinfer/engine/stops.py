"""Text of an output as it grows, and the stop strings in it: one boundary, however tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer.errors import InvalidRequest
from deepinfer.sampling.params import SamplingParams

__all__ = ["TextStream"]


class TextStream:
    """Decodes one output token by token; ends it at the stop string that is completed first.

    Of stop strings completed by the same character the longest counts. One that is completed by a token before
    `min_tokens` is passed over. The token that completes a stop string is the last of the output; the text ends before
    the stop string, or behind it with `include_stop_str_in_output`. None of this depends on how tokens are grouped.

    Args:
        codec: has `decode_stream(skip_special=...)`.
        params: stop strings, `min_tokens`, `skip_special_tokens`, `include_stop_str_in_output`.

    Raises:
        InvalidRequest: stop strings are asked for without a codec that can decode them.
    """

    def __init__(self, codec: Any, params: SamplingParams) -> None:
        open_stream = getattr(codec, "decode_stream", None)
        if open_stream is None:
            raise InvalidRequest(
                "stop strings need the text of the output, and no installed plugin decodes it piece by piece for this "
                "model; use stop_token_ids",
                field="stop",
            )
        self._stream = open_stream(skip_special=params.skip_special_tokens)
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""
        self._safe = 0
        self._taken = 0
        self._ended = False
        self.stop: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """The text that is certain: a possible beginning of a stop string is held back until it is known."""
        return self._text[: self._safe]

    def push(self, token: int) -> bool:
        """Take one token; True if it completes a stop string. Tokens after that are refused.

        Raises:
            RuntimeError: the text has ended.
        """
        if self._ended:
            raise RuntimeError("the text has ended")
        self._num_tokens += 1
        return self._grow(self._stream.push([token]))

    def finish(self) -> None:
        """End the text: what was held back belongs to it; an unfinished character becomes U+FFFD."""
        if not self._ended:
            self._ended = True
            if not self._grow(self._stream.finish()):
                self._safe = len(self._text)

    def take(self) -> str:
        """The certain text since the last call."""
        piece = self._text[self._taken : self._safe]
        self._taken = self._safe
        return piece

    def _grow(self, piece: str) -> bool:
        known = len(self._text)
        self._text += piece
        found = self._find(known) if self._stops and self._num_tokens >= self._min_tokens else None
        if found is None:
            self._safe = len(self._text) - _overlap(self._text, self._stops)
            return False
        start, self.stop = found
        self._safe = start + (len(self.stop) if self._include else 0)
        self._text = self._text[: self._safe]
        self._ended = True
        return True

    def _find(self, known: int) -> tuple[int, str] | None:
        """Start and text of the stop string that is completed first behind the first `known` characters."""
        matches = []
        for stop in self._stops:
            start = self._text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None


def _overlap(text: str, stops: Iterable[str]) -> int:
    """Longest end of the text that is a proper beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest

"""Markers after which a grammar starts, as automata over tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer.errors import InvalidRequest
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.sampling.structured import StructuredOutput

__all__ = ["Step", "TextTrigger", "TokenTrigger", "Trigger", "build_trigger"]

MAX_TEXT_BYTES = 256


@dataclass(frozen=True)
class Step:
    """What a token does to a marker: the next state, or None once complete, with the bytes that follow the marker."""

    state: int | None
    tail: bytes = b""


class Trigger(Protocol):
    """Automaton of one marker; states are small integers, the first is 0."""

    def step(self, state: int, token: int) -> Step | None:
        """Follow a token of the vocabulary; None if it may not come here."""

    def mask(self, state: int) -> np.ndarray | None:
        """Allowed tokens in this state as int32 words; None if all are."""


class TokenTrigger:
    """A marker of token ids; once `bound` appears, the part of the marker that has not come yet is forced.

    States 0..n-1 count the matched ids, n..2n-1 the same while forced.
    """

    def __init__(self, ids: Sequence[int], bound: int | None, vocabulary: Vocabulary) -> None:
        self._ids, self._bound = tuple(ids), bound
        self._borders = _borders(self._ids)
        self._size, self._words = vocabulary.size, vocabulary.words

    def step(self, state: int, token: int) -> Step | None:
        """See `Trigger.step`."""
        length = len(self._ids)
        if state >= length and token != self._ids[state - length]:
            return None
        matched = _advance(self._ids, self._borders, state % length, token)
        if matched == length:
            return Step(None)
        is_forced = state >= length or token == self._bound
        return Step(matched + length if is_forced else matched)

    def mask(self, state: int) -> np.ndarray | None:
        """See `Trigger.mask`."""
        if state < len(self._ids):
            return None
        return _bits([self._ids[state - len(self._ids)]], self._words)


class TextTrigger:
    """A marker of text, found wherever it ends in a token.

    A token that goes on after the marker is allowed only if the grammar can start with the rest of it.
    """

    def __init__(self, marker: bytes, vocabulary: Vocabulary, accepts_start: Callable[[bytes], bool]) -> None:
        self._marker, self._texts = marker, vocabulary.spelled
        self._borders = _borders(marker)
        self._refused = self._find_refused(accepts_start)
        everything = np.full(vocabulary.words, -1, np.int32)
        self._masks = {
            state: everything & ~_bits(tokens, vocabulary.words) for state, tokens in self._refused.items() if tokens
        }

    def step(self, state: int, token: int) -> Step | None:
        """See `Trigger.step`."""
        return None if token in self._refused[state] else self._follow(state, token)

    def mask(self, state: int) -> np.ndarray | None:
        """See `Trigger.mask`."""
        return self._masks.get(state)

    def _follow(self, state: int, token: int) -> Step:
        text = self._texts[token]
        for index, byte in enumerate(text):
            state = _advance(self._marker, self._borders, state, byte)
            if state == len(self._marker):
                return Step(None, text[index + 1 :])
        return Step(state)

    def _find_refused(self, accepts_start: Callable[[bytes], bool]) -> dict[int, frozenset[int]]:
        """Tokens by state that complete the marker and go on with what the grammar cannot start with."""
        order = sorted(range(len(self._texts)), key=self._texts.__getitem__)
        texts = [self._texts[token] for token in order]
        inside = [token for token in order if self._marker in self._texts[token][:-1]]
        known: dict[bytes, bool] = {b"": True}
        refused: dict[int, frozenset[int]] = {}
        for state in range(len(self._marker)):
            candidates = set(inside)
            matched = state
            while matched:  # every border of the matched part may be where the marker begins
                rest = self._marker[matched:]
                first = bisect.bisect_left(texts, rest)
                while first < len(texts) and texts[first].startswith(rest):
                    candidates.add(order[first])
                    first += 1
                matched = self._borders[matched]
            found = set()
            for token in candidates:
                step = self._follow(state, token)
                if step.state is None:
                    if step.tail not in known:
                        known[step.tail] = accepts_start(step.tail)
                    if not known[step.tail]:
                        found.add(token)
            refused[state] = frozenset(found)
        return refused


def build_trigger(
    request: StructuredOutput, vocabulary: Vocabulary, accepts_start: Callable[[bytes], bool]
) -> Trigger | None:
    """The automaton of a request's marker, None without one.

    Args:
        request: what was asked.
        vocabulary: of the model.
        accepts_start: whether some text of the grammar starts with these bytes.

    Raises:
        InvalidRequest: an id outside the vocabulary, or a text marker of more than 256 bytes.
    """
    if request.trigger is None:
        return None
    if isinstance(request.trigger, str):
        marker = request.trigger.encode()
        if len(marker) > MAX_TEXT_BYTES:
            message = f"{len(marker)} bytes of text, at most {MAX_TEXT_BYTES}"
            raise InvalidRequest(message, field="structured_output.trigger")
        return TextTrigger(marker, vocabulary, accepts_start)
    ids = tuple(request.trigger)
    for name, tokens in (("trigger", ids), ("bound_token_id", (request.bound_token_id,))):
        for token in tokens:
            if token is not None and token >= vocabulary.size:
                message = f"{token} is not an id of a vocabulary of {vocabulary.size}"
                raise InvalidRequest(message, field=f"structured_output.{name}")
    return TokenTrigger(ids, request.bound_token_id, vocabulary)


def _borders(pattern: Sequence[int]) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * (len(pattern) + 1)
    for length in range(2, len(pattern) + 1):
        border = borders[length - 1]
        while border and pattern[border] != pattern[length - 1]:
            border = borders[border]
        borders[length] = border + (pattern[border] == pattern[length - 1])
    return borders


def _advance(pattern: Sequence[int], borders: Sequence[int], matched: int, symbol: int) -> int:
    while matched and pattern[matched] != symbol:
        matched = borders[matched]
    return matched + (pattern[matched] == symbol)


def _bits(tokens: Iterable[int], words: int) -> np.ndarray:
    """int32 words with the bits of these tokens set."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)

"""The grammar state of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer.grammar.library import GrammarLibrary, clean_message

if TYPE_CHECKING:
    from deepinfer.grammar.compiler import CompiledGrammar

__all__ = ["Matcher"]

IN_GRAMMAR = -1
ENDED = -2
"""States of a matcher beside those of its trigger, which are >= 0."""


class Matcher:
    """Which token may come next in one sequence.

    Before the trigger is complete every token may come (the end of the text included), then what the grammar allows.
    Once a token that ends the text was accepted, only such tokens may come; with `free_after_end` every token.

    For one thread at a time. All its state is host memory, so that it survives preemption as it is.

    Args:
        grammar: compiled, with its trigger.
        stop_token_ids: ids that end the text beside EOS. One that is ordinary text is then no text of the grammar.
        free_after_end: for requests that ignore EOS.

    Raises:
        InvalidRequest: a stop id outside the vocabulary.
    """

    def __init__(
        self, grammar: CompiledGrammar, *, stop_token_ids: Iterable[int] = (), free_after_end: bool = False
    ) -> None:
        vocabulary = grammar.vocabulary
        self._grammar = grammar
        self._size, self._words = vocabulary.size, vocabulary.words
        self._last_word = np.int32(-1 if self._size % 32 == 0 else (1 << self._size % 32) - 1)
        self._ends = frozenset((*vocabulary.eos_token_ids, *stop_token_ids))
        for token in self._ends:
            if not 0 <= token < self._size:
                message = f"{token} is not an id of a vocabulary of {self._size}"
                raise InvalidRequest(message, field="stop_token_ids")
        self._free_after_end = free_after_end
        # Ends that have text are handled here: to the library such a token is text where the grammar forces it.
        self._text_ends = tuple(sorted(token for token in self._ends if vocabulary.tokens[token]))
        silent = sorted(self._ends - frozenset(self._text_ends))
        self._native: Any = grammar.library.matcher(grammar.native, tuple(silent))
        self._state = IN_GRAMMAR if grammar.trigger is None else 0
        # one entry a token: the state before it, and whether the native matcher took a step
        self._history = array("q")

    @property
    def library(self) -> GrammarLibrary:
        """The library that `native` belongs to."""
        return self._grammar.library

    @property
    def native(self) -> Any:
        """The library's matcher, for filling many masks in one call; read only while `is_constrained`."""
        return self._native

    @property
    def length(self) -> int:
        """Number of accepted tokens."""
        return len(self._history)

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and a token that ends it was accepted."""
        return self._state == ENDED

    @property
    def is_constrained(self) -> bool:
        """Whether the grammar has started and not ended."""
        return self._state == IN_GRAMMAR

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and no change, if it may not come here (-1 never may).

        Raises:
            GrammarError: the library failed on this sequence.
        """
        if not 0 <= token < self._size:
            return False
        state = self._state
        if state == IN_GRAMMAR:
            return self._accept_in_grammar(token)
        if state == ENDED:
            if not self._free_after_end and token not in self._ends:
                return False
            self._history.append(state * 2)
            return True
        trigger = self._grammar.trigger
        step = None if trigger is None else trigger.step(state, token)
        if step is None or (step.tail and not self._guarded("accept_string", step.tail)):
            return False
        self._history.append(state * 2 + bool(step.tail))
        self._state = IN_GRAMMAR if step.state is None else step.state
        return True

    def _accept_in_grammar(self, token: int) -> bool:
        ends = token in self._ends
        has_text = bool(self._grammar.tokens[token])
        if token in self._text_ends:
            if not self._guarded("is_completed"):
                return False
        elif not (ends or has_text) or not self._guarded("accept_token", token):
            return False
        self._history.append(IN_GRAMMAR * 2 + (token not in self._text_ends))
        if ends:
            self._state = ENDED
        return True

    def commit(self, tokens: Iterable[int]) -> None:
        """Advance by tokens that were emitted.

        Raises:
            GrammarError: one may not come here; the tokens before it are accepted.
        """
        for token in tokens:
            if not self.accept(token):
                message = f"token {token} after {self.length} tokens is not what the grammar allows"
                raise GrammarError(f"structured_output.{self._grammar.kind}: {message}")

    def rollback(self, count: int) -> None:
        """Forget the last `count` accepted tokens.

        Raises:
            ValueError: fewer were accepted.
        """
        if not 0 <= count <= len(self._history):
            raise ValueError(f"cannot forget {count} of {len(self._history)} accepted tokens")
        if count:
            gone = self._history[-count:]
            del self._history[-count:]
            steps = sum(entry & 1 for entry in gone)
            if steps:
                self._guarded("rollback", steps)
            self._state = gone[0] >> 1

    def fork(self) -> Matcher:
        """An independent matcher in the same state, for another completion of the prompt."""
        twin = object.__new__(Matcher)
        twin.__dict__.update(self.__dict__)
        twin._native = self._native.fork()
        twin._history = self._history[:]
        return twin

    def fill_mask(self, row: np.ndarray) -> bool:
        """Write which tokens may come next.

        Args:
            row: int32 [ceil(V / 32)], token v at bit v % 32 of word v // 32; contiguous.

        Returns:
            False if every token may come; the row is then all ones.

        Raises:
            GrammarError: no token may come, or the library failed; the row is then all zeros.
        """
        try:
            constrained = self._fill(row)
            if constrained:
                self.finish_row(row)
            else:
                row.fill(-1)
        except GrammarError:
            row.fill(0)
            raise
        return constrained

    def _fill(self, row: np.ndarray) -> bool:
        if self._state == IN_GRAMMAR:
            return bool(self._guarded("fill_next_token_bitmask", row[None], 0))
        if self._state == ENDED:
            if not self._free_after_end:
                row.fill(0)
                _set_bits(row, self._ends, True)
            return not self._free_after_end
        trigger = self._grammar.trigger
        mask = None if trigger is None else trigger.mask(self._state)
        if mask is not None:
            row[:] = mask
        return mask is not None

    def finish_row(self, row: np.ndarray) -> None:
        """Complete a row that the library filled: own ends, no bits past the vocabulary, at least one token.

        Raises:
            GrammarError: the grammar has come to a dead end.
        """
        row[-1] &= self._last_word
        if self._text_ends and self._state == IN_GRAMMAR:
            _set_bits(row, self._text_ends, bool(self._guarded("is_completed")))
        if not row.any():
            message = (
                f"no token can follow after {self.length} tokens: the grammar has a dead end or a stop id blocks it"
            )
            raise GrammarError(f"structured_output.{self._grammar.kind}: {message}")

    def fill_masks_for(self, drafts: Sequence[int], rows: np.ndarray) -> int:
        """Masks of the rows that verify drafts: each under the state after the drafts before it.

        The state is the same afterwards. Rows after the first draft that may not come (or is unknown, -1), or after
        which nothing may come, cannot be reached; they get the mask of the last row that can, so that no row is ever
        free by accident.

        Args:
            drafts: token ids.
            rows: int32 [len(drafts) + 1, ceil(V / 32)].

        Returns:
            Number of rows that can be reached, 1..len(drafts) + 1.

        Raises:
            GrammarError: as `fill_mask` for the first row; all rows are then zeros.
        """
        accepted = reachable = 0
        try:
            for index in range(len(drafts) + 1):
                self.fill_mask(rows[index])
                reachable += 1
                if index == len(drafts) or not self.accept(drafts[index]):
                    break
                accepted += 1
        except GrammarError:
            if not reachable:
                rows.fill(0)
                raise
        finally:
            self.rollback(accepted)
        rows[reachable:] = rows[reachable - 1]
        return reachable

    def _guarded(self, name: str, *arguments: Any) -> Any:
        """Call the library; whatever it raises concerns this sequence alone."""
        try:
            return getattr(self._native, name)(*arguments)
        except Exception as error:
            raise GrammarError(f"structured_output.{self._grammar.kind}: {clean_message(str(error))}") from error


def _set_bits(row: np.ndarray, tokens: Iterable[int], value: bool) -> None:
    words = row.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if value else words[token // 32] & ~bit

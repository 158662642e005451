"""A toy device under the loop: plans run on plain Python values, and everything that a row may read is checked.

Its model remembers the whole text in one number, so that a token depends on every page, slot and record byte before it.
What it says of one request alone, `say_alone`, is a dozen lines that know nothing of plans.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.grammars import CUT
from deepinfer.engine.runner import StepResult
from deepinfer.scheduler.plan import Move, StepPlan

__all__ = ["Ask", "LateDevice", "StepFailed", "ToyRunner", "say_alone"]

VOCAB, EOS, FIRST_LETTER, PAGE = 37, 1, 6, 4
RING = 8
"""Positions that a slot remembers: as few as a step of six rows can do with."""
BAD_LOGITS = 1
"""A status that is not `STATUS_OK`."""

TOKENS = np.arange(VOCAB, dtype=np.uint64)
SAYABLE = (TOKENS == EOS) | (TOKENS >= FIRST_LETTER)


@dataclass(frozen=True)
class Ask:
    """How one request is sampled; the toy device finds it by the request's seed.

    Attributes:
        greedy: its draws do not depend on the seed.
        penalised: what was said often is said less.
        truth: its output when it runs alone, for the scripted drafter.
        length: of the prompt.
    """

    seed: int
    length: int
    greedy: bool = False
    penalised: bool = False
    truth: tuple[int, ...] = ()


def remember(state: int, token: int, position: int) -> int:
    """The model's memory of a text that goes on."""
    return (state * 31 + token * 7 + position + 1) % 1_000_003


def draw(state: int, position: int, ask: Ask, said: Counter[int], allowed: NDArray[np.bool_] = SAYABLE) -> int:
    """The token at a position: the best of the allowed ones, the lower id among equals."""
    seed = 0 if ask.greedy else ask.seed + 1
    mixed = (TOKENS + np.uint64(state * 131 + position * 17 + seed * 1_000_039)) * np.uint64(0x9E3779B97F4A7C15)
    scores = (mixed >> np.uint64(44)).astype(np.int64)
    if ask.penalised:
        for token, count in said.items():
            scores[token] -= count << 19
    return int(np.where(allowed, scores, np.iinfo(np.int64).min).argmax())


def say_alone(
    prompt: list[int],
    ask: Ask,
    max_tokens: int,
    *,
    stops: frozenset[int],
    ignore_eos: bool,
    allowed_after: Callable[[list[int]], NDArray[np.bool_]] | None = None,
) -> tuple[list[int], str]:
    """Output and end of one request, straight from the definitions."""
    state, output = 0, []
    for position, token in enumerate(prompt):
        state = remember(state, token, position)
    while True:
        allowed = SAYABLE if allowed_after is None else allowed_after(output) & SAYABLE
        position = len(prompt) + len(output)
        token = draw(state, position, ask, Counter(output), allowed)
        output.append(token)
        if token in stops or (token == EOS and not ignore_eos):
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"
        state = remember(state, token, position)


@dataclass
class Record:
    """What the device knows of a slot's request."""

    ask: Ask
    length: int = 0
    next_token: int = -1
    drafts: list[int] = field(default_factory=list)
    said: Counter[int] = field(default_factory=Counter)
    table: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HostCopy:
    """A preempted request."""

    pages: list[list[int]]
    ring: dict[int, int]
    record: Record


class StepFailed(RuntimeError):
    """A failure that the scenario ordered."""


@dataclass(frozen=True)
class _Launched:
    result: StepResult

    def read(self) -> StepResult:
        return self.result


class ToyRunner:
    """Runs plans in their documented order; raises where a plan reads what is not there.

    Args:
        asks: by seed.
        num_drafts: of the scripted drafter. script: whether the draft of (seed, position) is right; None: no draft.
        host_bytes: the copies that may be held; None: any number.
        fails: steps that fail behind their first sequence. bad: steps whose first sampled row has bad logits.
    """

    PAGE_BYTES, SLOT_BYTES = 10, 5

    def __init__(
        self,
        asks: dict[int, Ask],
        *,
        num_drafts: int,
        script: Callable[[int, int], bool | None],
        host_bytes: int | None,
        fails: frozenset[int],
        bad: frozenset[int],
    ) -> None:
        self.traits = SimpleNamespace(eos_token_ids=frozenset({EOS}))
        self.poison_released = True
        self.num_drafts = num_drafts
        self.moved_step = -1
        self.host: dict[int, HostCopy] = {}
        self._asks, self._script, self._host_bytes = asks, script, host_bytes
        self._fails, self.bad = fails, bad
        self.pages: dict[int, list[int]] = {}
        self._rings: dict[int, dict[int, int]] = {}
        self._records: dict[int, Record] = {}
        self._broken: set[int] = set()

    def launch(self, plan: StepPlan, masks: Any = None) -> _Launched:
        """Run a plan; its rows, then the masks, then the draws."""
        self._broken -= {*plan.admitted_slots.tolist(), *(move.slot for move in plan.restores)}
        try:
            self._move(plan)
            self._admit(plan)
            return _Launched(self._run(plan, masks))
        except StepFailed:
            self._broken |= set(plan.slots.tolist())
            raise

    def released(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Forget what a slot and pages held."""
        self._rings.pop(slot, None)
        for page in pages.tolist():
            self.pages.pop(page, None)

    # ---- moves -----------------------------------------------------------------------------------------------------

    def _move(self, plan: StepPlan) -> None:
        for move in plan.saves:
            self.host[move.key] = self._copy_out(move)
            held = sum(len(copy.pages) * self.PAGE_BYTES + self.SLOT_BYTES for copy in self.host.values())
            assert self._host_bytes is None or held <= self._host_bytes, "more copies than the budget holds"
            self.released(move.slot, move.unowned)
        for move in plan.discards:
            self.released(move.slot, move.unowned)
        self.released(0, plan.evicted)
        for move in plan.restores:
            copy = self.host.pop(move.key)
            self._rings[move.slot], self._records[move.slot] = copy.ring, copy.record
            self.pages.update(zip(move.pages.tolist(), copy.pages, strict=True))
        for snapshot, slot in plan.slot_copies.tolist():
            self._rings[slot] = dict(self._rings[snapshot])
        for key in plan.dropped:
            self.host.pop(key, None)
        self.moved_step = plan.step

    def _copy_out(self, move: Move) -> HostCopy:
        pages = [list(self.pages.get(page, [-1] * PAGE)) for page in move.pages.tolist()]
        record = replace(deepcopy(self._records[move.slot]), table={})
        return HostCopy(pages, dict(self._rings.get(move.slot, {})), record)

    def _admit(self, plan: StepPlan) -> None:
        back = {move.slot for move in plan.restores}
        for slot in plan.released_slots.tolist():
            assert slot not in back
            del self._records[slot]
        admitted = plan.admitted_slots.tolist()
        starts, seeds = plan.admitted_lengths.tolist(), plan.admitted_sampling.seed.tolist()
        for slot, start, seed, said in zip(admitted, starts, seeds, plan.admitted_outputs, strict=True):
            self._records[slot] = Record(self._asks[seed], start, said=Counter(said.tolist()))
        grants = zip(plan.page_slots.tolist(), plan.page_indices.tolist(), plan.page_ids.tolist(), strict=True)
        for slot, index, page in grants:
            self._records[slot].table[index] = page
        for slot, before in zip(admitted, plan.admitted_tokens.tolist(), strict=True):
            text = [-1] * len(before) + list(self._text(self._records[slot]))
            assert before == text[len(text) - len(before) :], "the tokens before a resumed place are others"

    def _text(self, record: Record) -> Iterator[int]:
        """The tokens that stand, from the pages."""
        for position in range(record.length):
            yield self.pages[record.table[position // PAGE]][position % PAGE]

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, masks: Any) -> StepResult:
        fed, states = [], []
        host_tokens = plan.host_tokens.tolist()
        sequences = list(zip(plan.slots.tolist(), plan.row_counts.tolist(), plan.is_prefill.tolist(), strict=True))
        for number, (slot, count, is_prefill) in enumerate(sequences):
            chunk, host_tokens = (host_tokens[:count], host_tokens[count:]) if is_prefill else ([], host_tokens)
            tokens = [] if slot in self._broken else chunk or self._tokens(slot, count)
            fed.append(tokens)
            states.append(self._forward(slot, tokens))
            if number == 0 and plan.step in self._fails:
                raise StepFailed(f"ordered: step {plan.step}")
        assert not host_tokens
        result = self._sample(plan, fed, states, None if masks is None else masks.take())
        for slot, snapshot in plan.snapshot_copies.tolist():
            self._rings[snapshot] = dict(self._rings.get(slot, {}))
        return result

    def _tokens(self, slot: int, count: int) -> list[int]:
        """What a decoding sequence is fed: its token and the drafts up to the first gap."""
        record = self._records[slot]
        tokens = [record.next_token, *record.drafts][:count]
        return tokens[: tokens.index(-1)] if -1 in tokens else tokens

    def _forward(self, slot: int, tokens: list[int]) -> list[int]:
        """States after the rows; pages and ring are written."""
        if not tokens:
            return []
        record, ring = self._records[slot], self._rings.setdefault(slot, {})
        state, states = 0, []
        for position, token in enumerate(self._text(record)):
            state = remember(state, token, position)
        assert record.length == 0 or ring[record.length - 1] == state, "slot and pages tell different texts"
        for position, token in enumerate(tokens, record.length):
            page = record.table[position // PAGE]
            assert page > 0
            self.pages.setdefault(page, [-1] * PAGE)[position % PAGE] = token
            state = remember(state, token, position)
            ring[position] = state
            ring.pop(position - RING, None)
            states.append(state)
        return states

    def _sample(self, plan: StepPlan, fed: list[list[int]], states: list[list[int]], masks: Any) -> StepResult:
        counts = plan.sample_counts.astype(np.int64)
        starts = np.cumsum(counts) - counts
        tokens, status = np.full(int(counts.sum()), -1, np.int64), np.zeros(int(counts.sum()), np.int32)
        accepted, sampled = np.zeros(counts.size, np.int64), np.zeros(counts.size, np.int64)
        drafts = np.full((counts.size, self.num_drafts), -1, np.int64)
        for index, slot in enumerate(plan.slots.tolist()):
            rows = len(fed[index])
            if not rows:
                continue
            record, start = self._records[slot], int(starts[index])
            if not counts[index]:
                record.length += rows
                continue
            is_prefill = bool(plan.is_prefill[index])
            first = rows - 1 if is_prefill else 0
            drawn, stands = self._draw_rows(record, fed[index], states[index], first, start, masks)
            if plan.step in self.bad and start == 0:
                status[0], stands = BAD_LOGITS, 1
            tokens[start : start + len(drawn)] = drawn
            sampled[index], accepted[index] = len(drawn), stands
            record.length += first + stands
            record.said.update(drawn[:stands])
            record.next_token = drawn[stands - 1]
            record.drafts = self._draft(record)
            drafts[index, : len(record.drafts)] = record.drafts
        return self._result(tokens, status, starts, sampled, accepted, drafts)

    def _draw_rows(
        self, record: Record, fed: list[int], states: list[int], first: int, start: int, masks: Any
    ) -> tuple[list[int], int]:
        """Draws after the rows from `first` on, as if the drafts before each had been said, and how many stand."""
        drawn: list[int] = []
        said, stands = record.said.copy(), 1
        for row in range(first, len(fed)):
            mask_row = -1 if masks is None else int(masks[1][start + row - first])
            if row > first:
                said[fed[row]] += 1
                if stands == row - first and fed[row] == drawn[-1] and mask_row != CUT:
                    stands += 1
            allowed = SAYABLE
            if mask_row >= 0:
                bits = np.unpackbits(masks[0][mask_row].view(np.uint8), bitorder="little")[:VOCAB]
                allowed = SAYABLE & (bits != 0)
            drawn.append(draw(states[row], record.length + row + 1, record.ask, said, allowed))
        return drawn, stands

    def _draft(self, record: Record) -> list[int]:
        """Scripted drafts after the token that was just drawn: right, wrong, or none from here on."""
        ask, drafts = record.ask, []
        for position in range(record.length + 1, record.length + 1 + self.num_drafts):
            right = self._script(ask.seed, position)
            if right is None:
                break
            place = position - ask.length
            token = ask.truth[place] if place < len(ask.truth) else FIRST_LETTER
            drafts.append(token if right else FIRST_LETTER + (token + 1) % 30)
        return drafts

    def _result(
        self,
        tokens: NDArray[np.int64],
        status: NDArray[np.int32],
        starts: NDArray[np.int64],
        sampled: NDArray[np.int64],
        accepted: NDArray[np.int64],
        drafts: NDArray[np.int64],
    ) -> StepResult:
        return StepResult(tokens, status, starts, sampled, accepted, drafts, np.zeros(drafts.shape, np.float32))


class _LatePending:
    def __init__(self, device: LateDevice, plan: StepPlan, masks: Any) -> None:
        self._device, self._plan, self._masks = device, plan, masks
        self._outcome: StepResult | Exception | None = None

    def run(self) -> None:
        try:
            self._outcome = self._device.runner.launch(self._plan, self._masks).read()
        except StepFailed as error:
            self._outcome = error

    def is_done(self) -> bool:
        return self._outcome is not None

    def read(self) -> StepResult:
        while self._outcome is None:
            self._device.queue.popleft()()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def moves_done(self) -> bool:
        return self._device.runner.moved_step >= self._plan.step


class LateDevice:
    """An executor that works as late as it can: nothing runs before somebody reads. One thread, so runs repeat."""

    def __init__(self, runner: ToyRunner) -> None:
        self.runner = runner
        self.queue: deque[Callable[[], None]] = deque()

    @property
    def is_inline(self) -> bool:
        """False: the next step is planned before this one has run."""
        return False

    def submit(self, plan: StepPlan, masks: Any = None) -> _LatePending:
        """Queue a step."""
        pending = _LatePending(self, plan, masks)
        self.queue.append(pending.run)
        return pending

    def release(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Queue a release."""
        self.queue.append(lambda: self.runner.released(slot, pages))

    def run(self, action: Callable[[], None]) -> None:
        """Queue a call."""
        self.queue.append(action)

    def close(self) -> None:
        """Run what was queued."""
        while self.queue:
            self.queue.popleft()()

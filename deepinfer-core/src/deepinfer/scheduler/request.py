"""One completion on its way through the engine, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer.cache.chain import PrefixChain

__all__ = ["FinishReason", "Parked", "Request", "RequestState", "SamplingRow"]


class RequestState(StrEnum):
    """Where a request is: queued -> running <-> preempted -> finished; it may be aborted in every state.

    A request whose prefix may lie in a lower tier of the cache is `loading` before it is queued, for a bounded time.
    One with a grammar is `compiling` before that, for a bounded time, and unknown to the scheduler meanwhile.
    """

    COMPILING = "compiling"
    LOADING = "loading"
    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the device must know to sample a sequence.

    Attributes:
        temperature: 0 means argmax.
        top_k: -1 means all.
        top_p: 1 means all.
        seed: 0 <= seed < 2**64.
        completion: index of this completion among those of one prompt.
        view: `deepinfer.sampling.slots.SlotSampling`; None if the fields above are all.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    completion: int = 0
    view: Any = None


@dataclass(slots=True)
class Parked:
    """How far a request whose state lies on the host was planned; corrected like that of a running one.

    Attributes:
        scheduled: positions that its steps may have written, at most.
        draws: tokens drawn for it, at least.
        granted: pages that it had.
    """

    scheduled: int
    draws: int
    granted: int


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, its limits and its progress. Only the scheduler writes the fields below `state`.

    Attributes:
        request_id: unique among the requests in flight.
        prompt: int64 [L], L >= 1.
        max_tokens: tokens to generate at most, >= 1; prompt and output fit the context.
        sampling: sampling parameters.
        priority: the lower, the earlier it is admitted and the later it is preempted.
        arrival: order of arrival; names its host copy while it is preempted.
        output: tokens generated so far, as the host knows; the engine appends them.
        tokens: int64 [L], what its prefill runs: the prompt, and after a preemption without a host copy the output too.
        start: position at which its prefill began, behind what was found in the cache.
        slot: state slot while running, else -1.
        footprint: pages that the whole request can need.
        overtaken: younger requests that got a place while it was the oldest without one.
        boosted: it was overtaken so often that it goes before all but older ones of its kind.
        parked: its progress while it is preempted and its state lies on the host.
        last_step: the last step that named it before it lost its state; it is not planned again before that is read.
        num_preemptions: times that it was preempted.
        reuse_prefix: False if every row of its prompt must run.
        scored: logits of every row of its prompt are wanted, which bounds its chunks.
        chain: its way through the prefix cache, from its first admission on; None without one.
        num_cached_tokens: tokens of its prompt that were found in the cache.
        num_forwarded: tokens whose rows are accepted, as the host knows.
        finish_reason: set once, when it finishes.
    """

    request_id: str
    prompt: NDArray[np.int64]
    max_tokens: int
    sampling: SamplingRow = field(default_factory=SamplingRow)
    priority: int = 0
    arrival: int = -1
    output: list[int] = field(default_factory=list)
    tokens: NDArray[np.int64] = field(init=False)
    start: int = 0
    state: RequestState = RequestState.QUEUED
    slot: int = -1
    footprint: int = 0
    overtaken: int = 0
    boosted: bool = False
    parked: Parked | None = None
    last_step: int = -1
    num_preemptions: int = 0
    reuse_prefix: bool = True
    scored: bool = False
    chain: PrefixChain | None = None
    num_cached_tokens: int = 0
    num_forwarded: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    @property
    def order_key(self) -> tuple[bool, int, int]:
        """Order by priority and arrival: smaller keys are more urgent."""
        return (not self.boosted, 0 if self.boosted else self.priority, self.arrival)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.prompt.size)

    @property
    def replayed(self) -> NDArray[np.int64]:
        """Generated tokens that its prefill runs again."""
        return self.tokens[self.prompt.size :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended for any reason."""
        return self.state is RequestState.FINISHED

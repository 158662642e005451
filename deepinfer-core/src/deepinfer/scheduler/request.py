"""One completion on its way through the engine, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["FinishReason", "Request", "RequestState", "SamplingRow"]


class RequestState(StrEnum):
    """Where a request is: queued -> running -> finished; it may be aborted in every state."""

    QUEUED = "queued"
    RUNNING = "running"
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
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    completion: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, its limits and its progress. Only the scheduler writes the fields below `state`.

    Attributes:
        request_id: unique among the requests in flight.
        prompt: int64 [L], L >= 1.
        max_tokens: tokens to generate at most, >= 1; prompt and output fit the context.
        sampling: sampling parameters.
        arrival: order of arrival.
        slot: state slot while running, else -1.
        footprint: pages that the whole request can need, reserved at admission.
        finish_reason: set once, when it finishes.
    """

    request_id: str
    prompt: NDArray[np.int64]
    max_tokens: int
    sampling: SamplingRow = field(default_factory=SamplingRow)
    arrival: int = -1
    state: RequestState = RequestState.QUEUED
    slot: int = -1
    footprint: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.prompt.size)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended for any reason."""
        return self.state is RequestState.FINISHED

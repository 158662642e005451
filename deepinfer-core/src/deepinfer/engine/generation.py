"""A request in the loop and what it has produced; counts of the loop."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from deepinfer.engine.outputs import RequestMetrics, TokenLogprobs
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError
from deepinfer.grammar.compiler import CompiledGrammar
from deepinfer.grammar.matcher import Matcher
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.request import FinishReason, Request
from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = ["EngineStats", "Generation"]


@dataclass(eq=False)
class Generation:
    """A request in the loop and what it has produced.

    Attributes:
        request: the scheduler's side of it.
        params: as the caller gave them.
        stop_reason: the id of `stop_token_ids` or the stop string that ended it.
        error: why it ended with "error".
        metrics: moments and counts.
        text: the text of `token_ids` as it grows; None if nobody decodes it in the loop.
        logprobs, cumulative_logprob: of `token_ids`; None if not asked for.
        prompt_logprobs: of the prompt's ids, None where not known yet; None if not asked for.
        leader: the completion whose prompt it will reuse, while it waits for that; None once it is queued.
        followers: completions that wait for this one.
        compiling: its grammar on the way; None without one, and once it has come.
        matcher: what its grammar says next; None without one.
        drafts: proposed behind `token_ids`, -1 for none, so that the masks of the next step know them; empty without a
            grammar.
        drafts: proposed behind `token_ids`, -1 for none, so that the masks of the next step know them; empty without a
            grammar.
    """

    request: Request
    params: SamplingParams
    metrics: RequestMetrics
    stop_reason: int | str | None = None
    error: DeepInferError | None = None
    stops: frozenset[int] = frozenset()
    text: TextStream | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    leader: Generation | None = None
    followers: list[Generation] = field(default_factory=list)
    compiling: Future[CompiledGrammar] | None = None
    matcher: Matcher | None = None
    drafts: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Generated ids so far."""
        return self.request.output

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self.request.finish_reason


@dataclass
class EngineStats:
    """Counts since the start; seconds are the host's, from the later of launch and previous result to the result.

    Steps that hold prefill rows count as prefill time with all their rows. Rows of requests that had already ended are
    counted too: the asynchronous loop wastes one step's rows of a request whose end it could not foresee.

    `speculation` is None where nothing is drafted.
    """

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    failed_steps: int = 0
    preemptions: int = 0
    recomputations: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationStatistics | None = None

    @property
    def verified_drafts(self) -> int:
        """Drafts that the model judged."""
        return 0 if self.speculation is None else int(self.speculation.verified.sum())

    @property
    def accepted_drafts(self) -> int:
        """Those of them that stand."""
        return 0 if self.speculation is None else int(self.speculation.accepted.sum())

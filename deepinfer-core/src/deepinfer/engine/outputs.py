"""What a caller gets back, shaped as users of such engines know it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from deepinfer.errors import DeepInferError

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "ScoreOutput", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one id at one place.

    Attributes:
        logprob: natural logarithm of its probability; -inf for an id that could not be drawn.
        rank: 1 for the most probable id; among equals the lower id comes first.
        decoded_token: its text alone; None without a codec.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The id at a place and the most probable ids there, most probable first."""


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: number of the completion among those of its prompt.
        text: the decoded text; empty without a codec.
        token_ids: every generated id; the EOS or stop id that ended it is the last one.
        finish_reason: "stop", "length", "error", "abort", or None while running.
        stop_reason: the id of `stop_token_ids` or the stop string that ended it; None after EOS and for other reasons.
        seed: the seed of its draws, given or drawn: with it the request can be repeated. All completions of a prompt
            share it; their index tells their draws apart.
        logprobs: of every generated id and the most probable ones at its place; None if not asked for.
        cumulative_logprob: sum over the generated ids; None if not asked for.
        message: the answer of a chat as its codec reads it (role, content, reasoning, tool calls), once it has ended;
            None for other requests.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    message: dict[str, Any] | None = None


@dataclass
class RequestMetrics:
    """Moments of a request in seconds of one monotonic clock, and its counts.

    Attributes:
        arrival: it was queued.
        first_scheduled: its first step was launched; None if it never ran.
        first_token: its first token was known.
        last_token: its latest token was known.
        finished: it ended.
        num_prompt_tokens: tokens of the prompt.
        num_generated_tokens: tokens generated.
        num_steps: steps that it took part in.
        num_drafts_verified: drafts that the model judged for it. num_drafts_accepted: those of them that stand.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    last_token: float | None = None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens per second from the first step to the first token."""
        if self.first_scheduled is None or self.first_token is None:
            return None
        return self.num_prompt_tokens / max(self.first_token - self.first_scheduled, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens per second after the first one; None for fewer than two."""
        if self.first_token is None or self.finished is None or self.num_generated_tokens < 2:
            return None
        return (self.num_generated_tokens - 1) / max(self.finished - self.first_token, 1e-9)


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: unique within the engine.
        prompt: the text, if it was given as text.
        prompt_token_ids: the ids that were forwarded; empty if the prompt was refused before it had any.
        outputs: the completions.
        finished: whether all have ended.
        error: why the request ended with "error"; None otherwise.
        num_cached_tokens: prompt tokens whose cache entries were reused.
        numerics_id: names the numerics that produced the bits; equal ids promise equal tokens for equal seeds.
        metrics: moments and counts of the first completion; None if the request was refused.
        prompt_logprobs: of every prompt id given those before it, None for the first; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    error: DeepInferError | None = None
    num_cached_tokens: int = 0
    numerics_id: str = ""
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass
class ScoreOutput:
    """How probable a text is.

    Attributes:
        token_ids: the ids that were scored: a continuation's, or all of a prompt but its first.
        logprobs: of each of them, given everything before it.
        ranks: of each of them; 1 where it is what greedy decoding would have chosen.
        error: why it could not be scored.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    error: DeepInferError | None = None

    @property
    def log_likelihood(self) -> float:
        """Sum of the log-probabilities."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have produced exactly this."""
        return all(rank == 1 for rank in self.ranks)

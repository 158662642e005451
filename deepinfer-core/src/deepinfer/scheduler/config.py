"""Limits of a step and of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.errors import CapacityError, ConfigError, InvalidRequest

__all__ = ["SchedulerConfig", "exact_rows"]


def exact_rows(rows: int) -> int:
    """The row bucket of a backend that needs no padding."""
    return rows


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    Attributes:
        max_num_seqs: sequences that may run at once (= state slots).
        max_num_batched_tokens: rows of one step; at least `max_num_seqs`, so that every running sequence can decode
            and, since a prompt in progress holds a slot itself, at least one row is left for prefill.
        max_model_len: prompt and output tokens of one request.
        page_size: tokens of one page.
        max_prefill_chunk: longest chunk of one prompt in a step; None: as long as the budget.
        max_scored_rows: prompt rows of a step whose logits are wanted; each such prompt gets at least one more.
        num_drafts: draft rows of a decoding sequence, at most.
        lookahead: positions past a request's last token that rows in flight may write: `num_drafts` if a step is
            planned before the previous one is read, else 0.
        preempt_every: preempt a request in every so many steps although nothing requires it (tests); 0: never.
        host_bytes: host memory for the state of preempted requests; None: not limited.
        page_bytes, slot_bytes: what a page and a state slot take there.
        history_width: tokens before a resumed position that an admission brings along.
        keep_tokens: last tokens of a prompt that bounded replay sends through the consumer half; 0: no replay.
        resume_slack: rows written past a place from which a state slot can still be resumed.
        row_bucket: padded row count for a number of rows.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    max_prefill_chunk: int | None = None
    max_scored_rows: int = 512
    num_drafts: int = 0
    lookahead: int = 0
    preempt_every: int = 0
    host_bytes: int | None = None
    page_bytes: int = 0
    slot_bytes: int = 0
    history_width: int = 0
    keep_tokens: int = 0
    resume_slack: int = 0
    row_bucket: Callable[[int], int] = exact_rows

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)} is not positive", field=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{self.max_num_batched_tokens} rows a step cannot hold one row of each of max_num_seqs="
                f"{self.max_num_seqs} sequences; raise it or lower max_num_seqs",
                field="max_num_batched_tokens",
            )
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise ConfigError(f"{self.max_prefill_chunk} is not positive", field="max_prefill_chunk")

    @property
    def max_pages(self) -> int:
        """Pages that the longest request can need."""
        return -(-(self.max_model_len + self.lookahead) // self.page_size)

    def footprint(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Pages that a request can need: the last sampled token is never forwarded."""
        positions = num_prompt_tokens + max_tokens - 1 + self.lookahead
        return -(-positions // self.page_size)

    def check_fit(self, request_id: str, length: int, max_tokens: int, capacity: int) -> int:
        """Pages of a request that could run alone in a pool of `capacity` pages.

        Raises:
            InvalidRequest: empty prompt, no output token, or longer than the context.
            CapacityError: its pages exceed the whole pool, so it could never run.
        """
        if length < 1:
            raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
        if max_tokens < 1:
            raise InvalidRequest(f"{max_tokens} is not at least 1", field="max_tokens")
        if length + max_tokens > self.max_model_len:
            raise InvalidRequest(
                f"{length} prompt tokens and max_tokens={max_tokens} exceed the context of {self.max_model_len} tokens",
                field="prompt",
            )
        footprint = self.footprint(length, max_tokens)
        if footprint > capacity:
            raise CapacityError(
                f"request {request_id!r} can need {footprint} pages of {self.page_size} tokens "
                f"({length} prompt tokens, max_tokens={max_tokens}), the pool has {capacity}; lower "
                "max_tokens, shorten the prompt or give the engine more pages"
            )
        return footprint

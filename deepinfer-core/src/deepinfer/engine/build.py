"""From a loaded model and settings to an engine core: memory plan, pools, scheduler and runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.engine.core import EngineCore
from deepinfer.engine.executor import Executor, InlineExecutor, ThreadExecutor
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.memory_plan import MemoryPlan, MemoryRequest
from deepinfer.engine.runner import Drafter, ModelRunner, history_length
from deepinfer.errors import ConfigError
from deepinfer.ops.metadata import SlotRecords
from deepinfer.ops.sampling import sampling_bytes
from deepinfer.scheduler.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from deepinfer.settings import Settings

__all__ = ["BuiltEngine", "build_engine", "plan_memory"]


@dataclass(frozen=True)
class BuiltEngine:
    """An engine core and the limits that it was built for."""

    core: EngineCore
    plan: MemoryPlan
    max_model_len: int


def plan_memory(
    loaded: LoadedModel, settings: Settings, *, num_pages: int | None = None, max_prefill_chunk: int | None = None
) -> tuple[MemoryPlan, SchedulerConfig]:
    """Size everything before anything is allocated.

    Without `max_model_len` the context is the model's, cut to what the pages can hold.

    Args:
        loaded: the model.
        settings: limits of sequences, rows, context and memory.
        num_pages: pages to hand out; None: as many as can be useful and fit.
        max_prefill_chunk: longest chunk of one prompt in a step.

    Raises:
        CapacityError: it does not fit; prints the plan.
        ConfigError: max_model_len exceeds the model's context.
    """
    from deepinfer.backend.backend import StepLimits

    traits = loaded.model.traits
    asked = settings.max_model_len
    if asked is not None and asked > traits.context:
        raise ConfigError(f"{asked} exceeds the model's context of {traits.context} tokens", field="max_model_len")
    context = traits.context if asked is None else asked
    sequences = settings.max_num_seqs
    pages_each = -(-context // traits.page_size)
    rows = settings.token_budget
    request = MemoryRequest(
        weights=traits.weight_bytes,
        workspaces=loaded.model.workspace_bytes(StepLimits(rows=rows, sequences=sequences, context=context)),
        logits=_logits_bytes(sequences, traits.vocab_size),
        records=_records_bytes(sequences + 1, pages_each, traits.ngram_size, traits.max_drafts),
        slot_bytes=traits.slot_bytes,
        page_bytes=traits.page_bytes,
        num_slots=sequences + 1,
        min_pages=1 if asked is None else pages_each,
        full_pages=sequences * pages_each,
    )
    plan = MemoryPlan.build(request, budget=loaded.budget, cache_bytes=settings.cache_memory, num_pages=num_pages)
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=rows,
        max_model_len=min(context, (plan.num_pages - 1) * traits.page_size) if asked is None else asked,
        page_size=traits.page_size,
        max_prefill_chunk=max_prefill_chunk,
        history_width=traits.ngram_size - 1,
    )
    return plan, config


def build_engine(
    loaded: LoadedModel,
    settings: Settings,
    *,
    num_pages: int | None = None,
    max_prefill_chunk: int | None = None,
    poison_released: bool = False,
    preempt_every: int = 0,
    drafter: Drafter | None = None,
    executor: Callable[[ModelRunner], Executor] | None = None,
) -> BuiltEngine:
    """Allocate what `plan_memory` planned and put the loop together; arguments and errors as there.

    Args:
        poison_released: overwrite freed cache memory with NaN bytes (tests).
        preempt_every: preempt a request in every so many steps (tests).
        drafter: proposes `settings.use_nextn_decode` tokens a step instead of the model.
        executor: runs the steps; None: a worker thread, or the caller's with the synchronous loop.
    """
    plan, config = plan_memory(loaded, settings, num_pages=num_pages, max_prefill_chunk=max_prefill_chunk)
    depth = 2 if settings.zero_overhead_scheduling else 1
    num_drafts = settings.use_nextn_decode if drafter is not None else 0
    config = replace(config, preempt_every=preempt_every, num_drafts=num_drafts, lookahead=num_drafts * (depth - 1))
    _attach_workspace(loaded, config)
    runner = ModelRunner(
        loaded.model,
        num_pages=plan.num_pages,
        num_slots=plan.request.num_slots,
        max_pages=config.max_pages,
        num_drafts=num_drafts,
        drafter=drafter,
        poison_released=poison_released,
        alloc_pinned=None if loaded.runtime is None else loaded.runtime.alloc_pinned,
    )
    if executor is None:
        executor = ThreadExecutor if depth > 1 else InlineExecutor
    scheduler = Scheduler(config, PagePool(plan.num_pages), SlotPool(plan.request.num_slots))
    return BuiltEngine(EngineCore(runner, scheduler, executor(runner), depth=depth), plan, config.max_model_len)


def _attach_workspace(loaded: LoadedModel, config: SchedulerConfig) -> None:
    """Give the backend the one scratch buffer that its kernels share."""
    from deepinfer.backend.backend import StepLimits

    if loaded.backend is None or loaded.runtime is None:
        return
    limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    nbytes = loaded.model.table.workspace_bytes(limits)
    if nbytes:
        loaded.backend.attach_workspace(loaded.runtime.alloc(nbytes))


def _logits_bytes(sequences: int, vocab_size: int) -> int:
    logits = torch.empty(sequences, vocab_size, dtype=torch.float32, device="meta")
    return logits.nbytes + sampling_bytes(sequences, vocab_size)


def _records_bytes(slots: int, max_pages: int, ngram_size: int, max_drafts: int) -> int:
    return SlotRecords.allocate(slots, max_pages, max_drafts, history_length(ngram_size, max_drafts), "meta").nbytes

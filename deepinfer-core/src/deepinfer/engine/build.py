"""From a loaded model and settings to an engine core: memory plan, pools, scheduler and runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.prefix import root_key
from deepinfer.cache.reuse import PrefixCache
from deepinfer.cache.tiers.exchange import TierExchange
from deepinfer.checkpoint.digest import checkpoint_digest
from deepinfer.engine.core import EngineCore
from deepinfer.engine.executor import Executor, InlineExecutor, ThreadExecutor
from deepinfer.engine.grammars import Grammars
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.memory_plan import MemoryPlan, MemoryRequest
from deepinfer.engine.prefix_tiers import PrefixTiers, make_stores
from deepinfer.engine.runner import Drafter, ModelRunner, history_length
from deepinfer.engine.sampler import sampler_bytes
from deepinfer.engine.slot_tables import slot_table_bytes
from deepinfer.engine.step_costs import step_costs
from deepinfer.errors import ConfigError
from deepinfer.models.traits import number_of_drafts
from deepinfer.ops.sampling import sampling_bytes
from deepinfer.ops.step import SlotRecords
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.policy import Policy, load_policy
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.speculative.planner import VerificationPlanner

if TYPE_CHECKING:
    from deepinfer.observe.recorder import StepObserver
    from deepinfer.settings import Settings

__all__ = ["BuiltEngine", "build_engine", "has_graphs", "plan_memory"]

_logger = logging.getLogger("deepinfer.engine")


@dataclass(frozen=True)
class BuiltEngine:
    """An engine core and the limits that it was built for."""

    core: EngineCore
    plan: MemoryPlan
    max_model_len: int


def plan_memory(
    loaded: LoadedModel,
    settings: Settings,
    *,
    num_drafts: int = 0,
    num_pages: int | None = None,
    max_prefill_chunk: int | None = None,
) -> tuple[MemoryPlan, SchedulerConfig]:
    """Size everything before anything is allocated.

    Without `max_model_len` the context is the model's, cut to what the pages can hold.

    Args:
        loaded: the model.
        settings: limits of sequences, rows, context and memory.
        num_drafts: of a sequence and step.
        num_pages: pages to hand out; None: as many as can be useful and fit.
        max_prefill_chunk: longest chunk of one prompt in a step.

    Raises:
        CapacityError: it does not fit; prints the plan.
        ConfigError: max_model_len exceeds the model's context, a number is no positive integer, or the model was loaded
            with pages of another size.
    """
    from deepinfer.backend.backend import StepLimits

    traits = loaded.model.traits
    for name, value in (("num_pages", num_pages), ("max_prefill_chunk", max_prefill_chunk)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{value!r} is not a positive integer", field=name)
    if "page_size" in settings.model_fields_set and settings.page_size != traits.page_size:
        raise ConfigError(
            f"{settings.page_size} differs from the pages of {traits.page_size} tokens that this model was loaded "
            "with; give it to load_model",
            field="page_size",
        )
    asked = settings.max_model_len
    if asked is not None and asked > traits.context:
        raise ConfigError(f"{asked} exceeds the model's context of {traits.context} tokens", field="max_model_len")
    context = traits.context if asked is None else asked
    sequences = settings.max_num_seqs
    lookahead = num_drafts if settings.zero_overhead_scheduling else 0
    pages_each = -(-(context + lookahead) // traits.page_size)
    rows = settings.token_budget(num_drafts)
    snapshots = _num_snapshots(loaded, settings)
    proposals = num_drafts if settings.draft_verification == "rejection" else 0
    request = MemoryRequest(
        weights=traits.weight_bytes,
        workspaces=loaded.model.workspace_bytes(StepLimits(rows=rows, sequences=sequences, context=context)),
        # Every row of a decoding sequence is sampled, its drafts too; prompts that are scored come on top.
        logits=_logits_bytes(
            min(sequences * (1 + num_drafts), rows), min(rows, SchedulerConfig.max_scored_rows), traits.vocab_size
        ),
        # The drafter keeps its logits draft by draft and returns them in one piece.
        drafts=2 * sequences * num_drafts * traits.vocab_size * torch.float32.itemsize,
        tables=slot_table_bytes(sequences + 1, traits.vocab_size, proposals),
        records=_records_bytes(sequences + 1, pages_each, traits.ngram_size, num_drafts),
        slot_bytes=traits.slot_bytes,
        page_bytes=traits.page_bytes,
        num_slots=sequences + 1 + snapshots,
        min_pages=1 if asked is None else pages_each,
        full_pages=sequences * pages_each,
    )
    plan = MemoryPlan.build(request, budget=loaded.budget, cache_bytes=settings.cache_memory, num_pages=num_pages)
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=rows,
        max_model_len=min(context, (plan.num_pages - 1) * traits.page_size - lookahead) if asked is None else asked,
        page_size=traits.page_size,
        max_prefill_chunk=max_prefill_chunk,
        num_drafts=num_drafts,
        lookahead=lookahead,
        history_width=traits.ngram_size - 1,
        keep_tokens=settings.replay_keep,
        resume_slack=traits.resume_slack,
        host_bytes=settings.preemption_host_bytes,
        page_bytes=traits.page_bytes,
        slot_bytes=traits.slot_bytes,
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
    policy: Policy | None = None,
) -> BuiltEngine:
    """Allocate what `plan_memory` planned and put the loop together; arguments and errors as there.

    Raises:
        ConfigError: more drafts than the model proposes.

    Args:
        poison_released: overwrite freed cache memory with NaN bytes (tests).
        preempt_every: preempt a request in every so many steps (tests).
        drafter: proposes `settings.use_nextn_decode` tokens a step instead of the model (tests).
        executor: runs the steps; None: a worker thread, or the caller's with the synchronous loop.
        policy: queue and order of the requests; None: what `settings.scheduling_policy` names.
    """
    num_drafts = settings.use_nextn_decode or 0
    if drafter is None:
        num_drafts = number_of_drafts(settings.use_nextn_decode, loaded.model.traits.max_drafts)
    plan, config = plan_memory(
        loaded, settings, num_drafts=num_drafts, num_pages=num_pages, max_prefill_chunk=max_prefill_chunk
    )
    depth = 2 if settings.zero_overhead_scheduling else 1
    config = replace(config, preempt_every=preempt_every)
    _attach_workspace(loaded, config)
    num_slots = config.max_num_seqs + 1
    num_snapshots = plan.request.num_slots - num_slots
    runner = ModelRunner(
        loaded.model,
        num_pages=plan.num_pages,
        num_slots=num_slots,
        num_snapshots=num_snapshots,
        max_pages=config.max_pages,
        num_drafts=num_drafts,
        drafter=drafter,
        rejection=settings.draft_verification == "rejection",
        poison_released=poison_released,
        runtime=loaded.runtime,
        graphs=has_graphs(loaded, settings),
    )
    if executor is None:
        executor = ThreadExecutor if depth > 1 else InlineExecutor
    pages = PagePool(plan.num_pages)
    prefix, exchange = _prefix_cache(loaded, settings, pages, num_slots, num_snapshots)
    planner = _planner(loaded, settings, runner, config)
    policy = load_policy(settings.scheduling_policy) if policy is None else policy
    scheduler = Scheduler(config, pages, SlotPool(num_slots), policy=policy, prefix=prefix, planner=planner)
    running = executor(runner)
    tiers = None
    if prefix is not None and exchange is not None:
        tiers = PrefixTiers(prefix, exchange, runner.blocks, running.run)
    grammars = Grammars(loaded.path, loaded.model.traits, settings, rows=config.max_num_seqs * (1 + num_drafts))
    core = EngineCore(
        runner,
        scheduler,
        running,
        depth=depth,
        tiers=tiers,
        grammars=grammars,
        planner=planner,
        observers=_observers(settings),
    )
    return BuiltEngine(core, plan, config.max_model_len)


def has_graphs(loaded: LoadedModel, settings: Settings) -> bool:
    """Whether forward passes are replayed from captured graphs: the backend can, and nobody switched it off."""
    if loaded.backend is None or settings.enforce_eager:
        return False
    return loaded.backend.capabilities().graphs


def _planner(
    loaded: LoadedModel, settings: Settings, runner: ModelRunner, config: SchedulerConfig
) -> VerificationPlanner | None:
    """Chooses how many drafts are verified; None: always as many as fit."""
    if not settings.enable_mtp_varlen or not config.num_drafts:
        return None
    return VerificationPlanner(
        config.max_num_seqs + 1,
        config.num_drafts,
        step_costs(loaded, settings, runner, config),
        lookahead=1 if settings.zero_overhead_scheduling else 0,
        unbiased=settings.draft_verification == "rejection",
    )


def _observers(settings: Settings) -> list[StepObserver]:
    """What plugins offer to hear of every step; one that cannot be made is reported and left out."""
    from deepinfer.plugins.host import default_host, import_factory

    made = []
    for entry in default_host().observers:
        try:
            made.append(import_factory(entry)(settings))
        except Exception as error:
            _logger.warning("the observer %r of %s is left out: %s", entry.descriptor.name, entry.origin, error)
    return made


def _num_snapshots(loaded: LoadedModel, settings: Settings) -> int:
    """State copies of the prefix cache: as set, or two for each sequence within a tenth of the cache memory."""
    if not settings.enable_prefix_caching:
        return 0
    if settings.prefix_snapshots is not None:
        return settings.prefix_snapshots
    traits, wanted = loaded.model.traits, 2 * settings.max_num_seqs
    room = settings.cache_memory
    if room is None and loaded.budget is not None:
        room = loaded.budget - traits.weight_bytes
    return wanted if room is None else max(min(wanted, room // 10 // max(traits.slot_bytes, 1)), 0)


def _prefix_cache(
    loaded: LoadedModel, settings: Settings, pages: PagePool, first_snapshot: int, num_snapshots: int
) -> tuple[PrefixCache | None, TierExchange | None]:
    """The prefix cache of a device and the stores below it."""
    if not num_snapshots:
        return None, None
    traits = loaded.model.traits
    stores = make_stores(settings)
    # Only what outlives the process must know which weights it came from.
    weights = checkpoint_digest(loaded.path) if stores and loaded.path is not None else b""
    # A snapshot of a replayed prompt lacks the consumer half's rings: it serves only engines that replay alike.
    replay = f"replay{settings.replay_keep}"
    layout = f"{traits.layout_id}:{traits.page_bytes}:{traits.slot_bytes}:{traits.max_drafts}:{replay}"
    prefix = PrefixCache(
        root_key(weights, loaded.numerics_id, traits.page_size, layout),
        traits.page_size,
        pages,
        first_snapshot=first_snapshot,
        num_snapshots=num_snapshots,
        snapshot_interval=settings.prefix_snapshot_interval,
        keep_tokens=settings.replay_keep,
    )
    if not stores:
        return prefix, None
    exchange = TierExchange(
        stores,
        layout_id=layout,
        numerics_id=loaded.numerics_id,
        page_bytes=traits.page_bytes,
        slot_bytes=traits.slot_bytes,
        time_limit=settings.prefix_load_seconds,
    )
    return prefix, exchange


def _attach_workspace(loaded: LoadedModel, config: SchedulerConfig) -> None:
    """Give the backend the one scratch buffer that its kernels share."""
    from deepinfer.backend.backend import StepLimits

    if loaded.backend is None or loaded.runtime is None:
        return
    limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    nbytes = loaded.model.table.workspace_bytes(limits)
    if nbytes:
        loaded.backend.attach_workspace(loaded.runtime.alloc(nbytes))


def _logits_bytes(sampled: int, scored: int, vocab_size: int) -> int:
    """Logits of the sampled and the scored rows of a step, and the larger of what works on them in turn."""
    logits = (sampled + scored) * vocab_size * torch.float32.itemsize
    return logits + max(sampling_bytes(sampled, vocab_size), sampler_bytes(sampled, vocab_size))


def _records_bytes(slots: int, max_pages: int, ngram_size: int, max_drafts: int) -> int:
    return SlotRecords.allocate(slots, max_pages, max_drafts, history_length(ngram_size, max_drafts), "meta").nbytes

"""The loop and its scheduler under random load on a toy device, against requests that are answered one at a time."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.toy_device import EOS, FIRST_LETTER, PAGE, RING, VOCAB, Ask, LateDevice, StepFailed, ToyRunner, say_alone

from deepinfer import SamplingParams, StructuredOutput
from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.prefix import page_keys, root_key
from deepinfer.cache.reuse import PrefixCache
from deepinfer.engine.core import EngineCore
from deepinfer.engine.executor import InlineExecutor
from deepinfer.engine.grammars import Grammars
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.policy import PriorityOrder
from deepinfer.scheduler.request import Request, RequestState
from deepinfer.scheduler.scheduler import ScheduledStep, Scheduler
from deepinfer.settings import Settings

ARRIVALS = 14
"""Steps in which requests arrive."""
MAX_PROMPT, MAX_OUTPUT = 40, 14
HISTORY = 2
PAIRS = StructuredOutput(regex="([g-i][j-l]){1,3}m")
HAS_GRAMMARS = importlib.util.find_spec("xgrammar") is not None


def letters(first: str, last: str) -> NDArray[np.bool_]:
    mask = np.zeros(VOCAB, np.bool_)
    mask[FIRST_LETTER + ord(first) - ord("a") : FIRST_LETTER + ord(last) - ord("a") + 1] = True
    return mask


def allowed_by_pairs(output: list[int]) -> NDArray[np.bool_]:
    """What may follow an output of `PAIRS`, by its definition."""
    if output and letters("m", "m")[output[-1]]:
        return np.arange(VOCAB) == EOS
    if len(output) % 2:
        return letters("j", "l")
    return letters("g", "i") * (len(output) < 6) | letters("m", "m") * (len(output) > 0)


# ---- what arrives, and where -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario, and what it says when it is alone."""

    prompt: list[int]
    params: SamplingParams
    ask: Ask
    max_tokens: int
    priority: int
    at: int
    abort_at: int | None
    end: str


def draw_arrival(rng: random.Random, seed: int, stems: list[list[int]]) -> Arrival:
    """A request that may begin like others: with a stem, or with what an earlier one asked and was told."""
    prompt = [rng.randint(FIRST_LETTER, VOCAB - 1) for _ in range(rng.choice([1, 3, 8, rng.randint(1, 12)]))]
    prompt = (rng.choice([[], [], *stems]) + prompt)[:MAX_PROMPT]
    structured = HAS_GRAMMARS and rng.random() < 0.2
    params = SamplingParams(
        stop_token_ids=[] if structured else [rng.randint(0, VOCAB - 1) for _ in range(rng.randint(0, 3))],
        ignore_eos=not structured and rng.random() < 0.5,
        structured_output=PAIRS if structured else None,
    )
    max_tokens = rng.randint(1, MAX_OUTPUT)
    ask = Ask(seed, len(prompt), greedy=rng.random() < 0.3, penalised=rng.random() < 0.4)
    truth, end = say_alone(
        prompt,
        ask,
        max_tokens,
        stops=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        allowed_after=allowed_by_pairs if structured else None,
    )
    stems.append(prompt + truth)
    return Arrival(
        prompt,
        params,
        replace(ask, truth=tuple(truth)),
        max_tokens,
        rng.choice([0, 0, 0, 1, -1, 5]),
        rng.randint(0, ARRIVALS),
        rng.randint(0, 2 * ARRIVALS) if rng.random() < 0.25 else None,
        end,
    )


@dataclass(frozen=True)
class Machine:
    """A random engine on a random device."""

    core: EngineCore
    runner: ToyRunner
    policy: PriorityOrder


def draw_machine(rng: random.Random, arrivals: list[Arrival], grammars: Any) -> Machine:
    ahead = rng.random() < 0.7
    num_drafts = rng.choice([0, 0, 1, 2, 3, 4, 5])
    max_num_seqs = rng.randint(1, 5)
    lookahead = num_drafts if ahead else 0
    largest = -(-(MAX_PROMPT + MAX_OUTPUT + lookahead) // PAGE)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 24),
        max_model_len=MAX_PROMPT + MAX_OUTPUT,
        page_size=PAGE,
        max_prefill_chunk=rng.choice([None, 1, 3, 7]),
        num_drafts=num_drafts,
        lookahead=lookahead,
        preempt_every=rng.choice([0, 0, 0, 1, 2, 3]),
        host_bytes=rng.choice([None, 0, 15, 40, 90]),
        page_bytes=ToyRunner.PAGE_BYTES,
        slot_bytes=ToyRunner.SLOT_BYTES,
        history_width=HISTORY,
        resume_slack=RING - 1,
    )
    script = rng.getrandbits(32)
    fails = frozenset(rng.randint(0, 40) for _ in range(rng.choice([0, 0, 0, 1, 2])))
    bad = frozenset(rng.randint(0, 40) for _ in range(rng.choice([0, 0, 0, 1])))
    runner = ToyRunner(
        {item.ask.seed: item.ask for item in arrivals},
        num_drafts=num_drafts,
        script=lambda seed, position: [None, False, True, True, True, True][hash((script, seed, position)) % 6],
        host_bytes=config.host_bytes,
        fails=fails,
        bad=bad,
    )
    pages, num_slots = PagePool(largest + rng.choice([1, 2, 4, 20])), max_num_seqs + 1
    num_snapshots = rng.choice([0, 0, 1, 4, 12])
    prefix = None
    if num_snapshots:
        prefix = PrefixCache(
            root_key(b"", "toy", PAGE, "toy"),
            PAGE,
            pages,
            first_snapshot=num_slots,
            num_snapshots=num_snapshots,
            snapshot_interval=8,
        )
    policy = PriorityOrder(rng.choice([0, 1, 3, 64]))
    scheduler = Scheduler(config, pages, SlotPool(num_slots), policy=policy, prefix=prefix)
    executor = LateDevice(runner) if ahead else InlineExecutor(runner)  # type: ignore[arg-type]
    core = EngineCore(runner, scheduler, executor, depth=1 + ahead, grammars=grammars)  # type: ignore[arg-type]
    return Machine(core, runner, policy)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Grammars of a small vocabulary that are compiled before anybody asks."""
    if not HAS_GRAMMARS:
        yield None
        return
    path = tmp_path_factory.mktemp("letters")
    vocab = {chr(ord("a") + index): FIRST_LETTER + index for index in range(26)}
    vocab |= {str(token): token for token in range(FIRST_LETTER + 26, VOCAB)}
    added = [{"id": index, "content": f"<{index}>"} for index in range(FIRST_LETTER)]
    contents = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(contents))
    traits: Any = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    service = Grammars(path, traits, Settings(xgrammar_timeout=600.0), rows=30)
    compiled = service.submit(PAIRS).result()

    def submit(wanted: StructuredOutput) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(compiled)
        return future

    yield SimpleNamespace(check=service.check, submit=submit, fill=service.fill, close=lambda: None)
    service.close()


# ---- bounds ----------------------------------------------------------------------------------------------------------


class Watch:
    """Looks on while a scheduler plans, and holds it to the bounds that it documents."""

    def __init__(self, machine: Machine) -> None:
        self.scheduler: Scheduler = machine.core.scheduler
        self.policy = machine.policy
        self.waited: dict[Request, int] = {}
        """Admissions since a waiting request joined the queue."""
        self.older: dict[Request, int] = {}
        """Older requests that waited meanwhile."""
        self.sat_out = 0
        self._plan, self._push, self._remove = self.scheduler.plan, self.policy.push, self.policy.remove
        self.scheduler.plan = self.plan  # type: ignore[method-assign]
        self.policy.push = self.push  # type: ignore[method-assign]
        self.policy.remove = self.remove  # type: ignore[method-assign]

    def push(self, request: Request) -> None:
        """Nobody is in the queue twice."""
        assert request not in self.waited
        for other in self.waited:
            self.older[other] += request.arrival < other.arrival
        self.older[request] = sum(other.arrival < request.arrival for other in self.waited)
        self.waited[request] = 0
        self._push(request)

    def remove(self, request: Request) -> None:
        """A request waits for (k + 1) (max_overtakes + 1) admissions at most, with k older ones beside it."""
        self._remove(request)
        waited, older = self.waited.pop(request), self.older.pop(request)
        if request.state is not RequestState.FINISHED:
            assert waited <= (older + 1) * (self.policy.max_overtakes + 1)
            for other in self.waited:
                self.waited[other] += 1

    def plan(self) -> ScheduledStep | None:
        """Decode rows first, the most urgent request always, prompts their share."""
        scheduler, sequences = self.scheduler, self.scheduler.sequences
        decoding = {*sequences.owner[sequences.decoding()].tolist()}
        prefilling = list(scheduler._prefilling.values())
        left = {item: int(item.tokens.size - sequences.scheduled[item.slot]) for item in prefilling}
        preemptions = scheduler.preemption.num_preemptions
        step = self._plan()
        scheduler.pages.check()
        assert sequences.num_available_pages >= 0, "pages are promised twice"
        if step is None:
            return None
        slots = step.plan.slots
        ends = [item.num_prompt_tokens + item.max_tokens - 1 + scheduler.config.lookahead for item in step.requests]
        assert (sequences.scheduled[slots] <= ends).all(), "a sequence is planned beyond its last token"
        rows = dict(zip(step.requests, step.plan.row_counts.tolist(), strict=True))
        assert step.plan.num_rows <= scheduler.config.max_num_batched_tokens
        assert len(rows) == len(step.requests)
        assert len(rows) <= scheduler.config.max_num_seqs
        if scheduler.preemption.num_preemptions == preemptions:
            self._check_rows(decoding, prefilling, left, rows)
        return step

    def _check_rows(
        self, decoding: set[Request], prefilling: list[Request], left: dict[Request, int], rows: dict[Request, int]
    ) -> None:
        config, rank = self.scheduler.config, self.policy.rank
        missing = decoding - rows.keys()
        assert not missing or self.scheduler.sequences.num_available_pages < len(missing), "pages had not run out"
        if decoding or prefilling:
            first = min([*decoding, *prefilling], key=rank)
            self.sat_out = 0 if first in rows else self.sat_out + 1
            assert self.sat_out <= 2, "the most urgent request waits longer than for the steps in flight"
        if prefilling:
            first = min(prefilling, key=rank)
            share = max((config.max_num_batched_tokens - (len(decoding) - len(missing))) // 2, 1)
            least = min(left[first], share, config.max_prefill_chunk or share)
            cut = self.scheduler.reuse.cut(first, first.tokens.size - left[first], least)
            assert rows[first] >= cut, "the most urgent prompt has less than its share"


# ---- one scenario ----------------------------------------------------------------------------------------------------


def run_scenario(seed: int, grammars: Any) -> Machine:
    """One random load on one random engine; every finished request must have the tokens that it has alone."""
    rng = random.Random(seed)
    stems = [[rng.randint(FIRST_LETTER, VOCAB - 1) for _ in range(length)] for length in (PAGE, 2 * PAGE + 1, 12)]
    arrivals = [draw_arrival(rng, index, stems) for index in range(rng.randint(1, 8))]
    machine = draw_machine(rng, arrivals, grammars)
    core, scheduler = machine.core, machine.core.scheduler
    Watch(machine)
    running: dict[int, Any] = {}
    step = 0
    while step <= 2 * ARRIVALS or core.num_unfinished:
        for index, item in enumerate(arrivals):
            if item.at == step:
                prompt = np.array(item.prompt, np.int64)
                running[index] = core.add(
                    str(index), prompt, item.params, seed=index, max_tokens=item.max_tokens, priority=item.priority
                )
            if item.abort_at == step and index in running:
                core.abort(str(index))
        before = core.num_unfinished, scheduler._next_step, core.stats.steps
        core.step()
        after = core.num_unfinished, scheduler._next_step, core.stats.steps
        assert not before[0] or before != after, "a call launched nothing, read nothing and ended nothing"
        step += 1
        assert step < 2000, "no end"
    assert not scheduler.has_work()
    scheduler.assert_idle()
    for index, generation in running.items():
        check_end(machine, arrivals[index], generation)
    check_index(machine)
    core.close()
    # Copies of requests that ended in the last step go with the next plan.
    assert machine.runner.host.keys() <= set(scheduler.changes.dropped)
    return machine


def check_end(machine: Machine, item: Arrival, generation: Any) -> None:
    """It said what it says alone, or the beginning of that if it was cut off."""
    truth = list(item.ask.truth)
    if generation.finish_reason in ("abort", "error"):
        assert (generation.error is not None) == (generation.finish_reason == "error")
        if generation.error is None:
            assert item.abort_at is not None
        elif generation.error.__cause__ is None:
            assert machine.runner.bad, generation.error
        else:
            assert isinstance(generation.error.__cause__, StepFailed), generation.error
        assert generation.token_ids == truth[: len(generation.token_ids)]
    else:
        assert (generation.token_ids, generation.finish_reason) == (truth, item.end)


def check_index(machine: Machine) -> None:
    """Published pages hold the tokens that their keys name."""
    prefix = machine.core.scheduler.prefix
    if prefix is None:
        return
    for node in prefix.index._nodes.values():
        tokens = np.array(machine.runner.pages[node.page], np.int64)
        parent = prefix.index.root if node.parent is None else node.parent.key
        assert list(page_keys(parent, tokens, PAGE)) == [node.key]


def run_many(seeds: range, grammars: Any) -> dict[str, int]:
    """What the scenarios of some seeds met, in all."""
    met = dict.fromkeys(("preempted", "run again", "drafts accepted", "cached tokens", "failed steps", "errors"), 0)
    for seed in seeds:
        core = run_scenario(seed, grammars).core
        stats, prefix = core.stats, core.scheduler.prefix
        met["preempted"] += stats.preemptions
        met["run again"] += stats.recomputations
        met["drafts accepted"] += stats.accepted_drafts
        met["cached tokens"] += 0 if prefix is None else prefix.stats.hit_tokens
        met["failed steps"] += stats.failed_steps
        met["errors"] += stats.finished.get("error", 0)
    return met


@pytest.mark.parametrize("block", range(8))
def test_same_tokens_as_one_at_a_time(block: int, grammars: Any) -> None:
    """Arrivals, aborts, stops, priorities, tiny pools, grammars, drafts, spent host budgets, failures, both loops."""
    met = run_many(range(50 * block, 50 * (block + 1)), grammars)
    assert all(count > 0 for count in met.values()), met
    assert met["run again"] < met["preempted"]


@pytest.mark.slow
def test_two_thousand_scenarios(grammars: Any) -> None:
    met = run_many(range(1000, 3500), grammars)
    assert min(met.values()) > 100, met

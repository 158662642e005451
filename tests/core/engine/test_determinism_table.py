"""The determinism table: what a request says does not depend on anything that happens around it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.determinism import KEEP, MAX_DRAFTS, Bench, Variant, draw_requests, shared_compiler

pytest.importorskip("xgrammar")


def shuffled(order: list[int]) -> list[int]:
    return random.Random(1).sample(order, len(order))


SYNC = {"zero_overhead_scheduling": False}
OWN_DRAFTS = {"use_nextn_decode": MAX_DRAFTS}
ONE_DRAFT = {"use_nextn_decode": 1}
CHOSEN = {"enable_mtp_varlen": True, "max_num_seqs": 2, "max_num_batched_tokens": 24}
NO_HOST_MEMORY = {"preemption_host_bytes": 0}
FEW_ROWS = {"max_num_batched_tokens": 24}
COMPACT, MASK = (
    {"yoco_prefill_truncation_mode": mode, "yoco_prefill_keep_tokens": KEEP} for mode in ("compact", "mask")
)
NEIGHBOURS = {
    "batched": Variant(),
    "other order": Variant(order=shuffled),
    "reverse order, few at once": Variant(order=lambda order: order[::-1], at_once=3),
    "alone, asynchronous": Variant(at_once=1),
    "abort storm": Variant(storm=2),
    "abort storm, drafts, preempted": Variant(engine={"preempt_every": 3}, drafts=True, storm=2),
}
CHUNKS = {
    "chunks of 16, few rows": Variant(FEW_ROWS, {"max_prefill_chunk": 16}),
    "chunks of 64": Variant(engine={"max_prefill_chunk": 64}, order=shuffled),
    "whole prompts": Variant({"max_num_batched_tokens": 4096}),
}
LOOPS = {
    "synchronous": Variant(SYNC),
    "synchronous, chunks of 16": Variant(SYNC, {"max_prefill_chunk": 16}, order=shuffled),
}
MEMORY = {
    "preempted every 2 steps": Variant(engine={"preempt_every": 2}),
    "preempted every 3 steps, synchronous": Variant(SYNC, {"preempt_every": 3}),
    "preempted every 4 steps, chunks of 16": Variant(engine={"preempt_every": 4, "max_prefill_chunk": 16}),
    "preempted every 2 steps, run again": Variant(NO_HOST_MEMORY, {"preempt_every": 2}),
    "preempted every 3 steps, run again, synchronous, drafts": Variant(
        {**NO_HOST_MEMORY, **SYNC}, {"preempt_every": 3, "max_prefill_chunk": 16}, drafts=True
    ),
    "pages run out": Variant({"page_size": 2}, {"num_pages": 80}, storm=40),
}
DRAFTS = {
    "scripted drafts": Variant(drafts=True),
    "scripted drafts, synchronous": Variant(SYNC, drafts=True),
    "scripted drafts, preempted every 2 steps": Variant(engine={"preempt_every": 2}, drafts=True),
    "scripted drafts, few rows, other order": Variant(FEW_ROWS, drafts=True, order=shuffled),
    "scripted drafts, one a step": Variant(ONE_DRAFT, drafts=True),
    "scripted drafts, chosen lengths": Variant(CHOSEN, drafts=True),
    "scripted drafts, chosen lengths, synchronous, preempted": Variant(
        {**CHOSEN, **SYNC}, {"preempt_every": 5}, drafts=True
    ),
    "the model's own drafts": Variant(OWN_DRAFTS),
    "the model's own drafts, one a step": Variant(ONE_DRAFT),
    "the model's own drafts, preempted, chunks of 16": Variant(
        OWN_DRAFTS, {"preempt_every": 3, "max_prefill_chunk": 16}
    ),
    "the model's own drafts, chosen lengths": Variant({**OWN_DRAFTS, **CHOSEN}),
}
PREFIXES = {
    "prefixes off": Variant({"enable_prefix_caching": False}),
    "prefixes hot": Variant({"prefix_snapshots": 64}, rounds=2),
    "prefixes hot, preempted": Variant(
        {"max_num_seqs": 8, "prefix_snapshots": 64}, {"num_pages": 60, "preempt_every": 3}, rounds=2, at_once=5
    ),
    "prefixes hot, drafts, chunks of 7": Variant(
        {"prefix_snapshots": 64}, {"max_prefill_chunk": 7}, rounds=2, drafts=True
    ),
    "prefixes from disk": Variant(on_disk=True, at_once=4),
}
REPLAY = {
    "replay by mask, batched": Variant(MASK),
    "replay, compact": Variant(COMPACT),
    "replay, compact, chunks of 16, few rows": Variant({**COMPACT, **FEW_ROWS}, {"max_prefill_chunk": 16}),
    "replay, compact, synchronous, preempted": Variant({**COMPACT, **SYNC}, {"preempt_every": 3}, order=shuffled),
    "replay, compact, drafts": Variant(COMPACT, drafts=True),
    "replay, compact, prefixes hot": Variant({**COMPACT, "prefix_snapshots": 64}, rounds=2),
}
RESTARTS = {
    "a new engine, weights read again": Variant(restart=True),
    "LLM": Variant(by="LLM"),
    "LLM, synchronous, replay": Variant({**COMPACT, **SYNC}, by="LLM"),
    "AsyncLLM, loop on a thread": Variant(by="AsyncLLM"),
    "AsyncLLM, loop in a new process": Variant(by="process", order=shuffled),
}
VARIANTS = {**NEIGHBOURS, **CHUNKS, **LOOPS, **MEMORY, **DRAFTS, **PREFIXES, **REPLAY, **RESTARTS}


def on_devices(name: str) -> list[str]:
    """Where a variant can run; only the test's own loop and `AsyncLLM` on a thread take another executor."""
    return ["cpu", "sim"] if VARIANTS[name].by in ("core", "AsyncLLM") else ["cpu"]


EVERYWHERE = [(name, device) for name in VARIANTS for device in on_devices(name)]
IN_TURN = [(name, on_devices(name)[at % len(on_devices(name))]) for at, name in enumerate(VARIANTS)]
"""Every variant on one of the devices."""


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    with shared_compiler():
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("table"), draw_requests(16))


@pytest.fixture(scope="module")
def large_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("large_table"), draw_requests(64))


def check(bench: Bench, name: str, device: str) -> None:
    variant = VARIANTS[name]
    alone = bench.alone(replay="yoco_prefill_truncation_mode" in variant.settings)
    if variant.on_disk:
        bench.run(variant, device)
    outcome = bench.run(variant, device)
    for index, (now, then) in enumerate(zip(outcome.said, alone, strict=True)):
        assert now == then, f"{name}: request {index} says something else than alone"
    assert outcome.stats.preemptions > 0 or not ("preempt_every" in variant.engine or name == "pages run out")
    assert outcome.stats.accepted_drafts > 10 or not variant.drafts
    assert outcome.num_cached_tokens > 200 or not (variant.rounds > 1 or variant.on_disk)


def test_the_requests_are_mixed(bench: Bench) -> None:
    """What the table promises is worth something only if its requests differ and end in different ways."""
    parts = [part for said in bench.alone(replay=False) for part in said]
    assert len({part.token_ids for part in parts}) >= len(parts) - 1
    assert {part.finish_reason for part in parts} == {"length", "stop"}
    replayed = [part for said in bench.alone(replay=True) for part in said]
    assert sum(now.logprobs != then.logprobs for now, then in zip(replayed, parts, strict=True)) >= 4


@pytest.mark.parametrize(("name", "device"), IN_TURN)
def test_same_bits(bench: Bench, name: str, device: str) -> None:
    check(bench, name, device)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), EVERYWHERE)
def test_same_bits_of_64_requests(large_bench: Bench, name: str, device: str) -> None:
    check(large_bench, name, device)

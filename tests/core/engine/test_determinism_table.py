"""The determinism table: what a request says does not depend on anything that happens around it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.conformance.sim import SimulatedDevice
from deepinfer.engine.build import build_engine
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.engine.runner import ModelRunner
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import load_settings

MAX_DRAFTS = 5
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "batch_invariant": True,
    "max_model_len": 128,
    "page_size": 16,
    "use_nextn_decode": MAX_DRAFTS,
    "max_num_seqs": 16,
}


@dataclass(frozen=True)
class Item:
    """One request of the table."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    priority: int


@dataclass(frozen=True)
class Variant:
    """One row of the table: what is different around the requests.

    Attributes:
        settings: differing settings. engine: further arguments of `build_engine`.
        order: how the requests are queued. at_once: requests that are in flight at most.
        drafts: rows a sequence come from a scripted drafter. storm: neighbours that are aborted half-way.
        restart: the model is loaded anew. on_sim: steps run on the simulated device, with its guard.
        rounds: times that the requests go through one engine; the last one counts, so from 2 on prefixes are hot.
        on_disk: prefixes come from a directory in which an engine before left them.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    order: Callable[[list[int]], list[int]] = list
    at_once: int = 1000
    drafts: bool = False
    storm: bool = False
    restart: bool = False
    on_sim: bool = False
    rounds: int = 1
    on_disk: bool = False


SYNC = {"zero_overhead_scheduling": False}
VARIANTS = {
    "batched": Variant(),
    "other order": Variant(order=lambda order: random.Random(1).sample(order, len(order))),
    "batched, synchronous": Variant(SYNC),
    "alone, asynchronous": Variant(at_once=1),
    "chunks of 16, few rows": Variant({"max_num_batched_tokens": 24}, {"max_prefill_chunk": 16}),
    "chunks of 64": Variant(engine={"max_prefill_chunk": 64}, order=lambda order: order[::-1]),
    "whole prompts": Variant({"max_num_batched_tokens": 4096}),
    "forced preemption": Variant(engine={"preempt_every": 2}),
    "forced preemption, synchronous": Variant(SYNC, {"preempt_every": 3}),
    "pages run out": Variant({"max_num_seqs": 8, "page_size": 2}, {"num_pages": 45}, restart=True),
    "scripted drafts": Variant(drafts=True),
    "scripted drafts, synchronous, preempted": Variant(SYNC, {"preempt_every": 3}, drafts=True),
    "the model's own drafts": Variant(engine={"speculate": True}),
    "the model's own drafts, preempted": Variant(
        engine={"speculate": True, "preempt_every": 3, "max_prefill_chunk": 16}
    ),
    "abort storm": Variant(storm=True),
    "simulated device": Variant(on_sim=True, drafts=True, engine={"preempt_every": 4, "max_prefill_chunk": 16}),
    "after a restart": Variant(restart=True),
    "prefixes off": Variant({"enable_prefix_caching": False}),
    "prefixes hot": Variant({"prefix_snapshots": 64}, rounds=2),
    "prefixes hot, preempted": Variant(
        {"max_num_seqs": 8, "prefix_snapshots": 64}, {"num_pages": 50, "preempt_every": 3}, rounds=2, at_once=5
    ),
    "prefixes hot, drafts, simulated device": Variant(
        {"prefix_snapshots": 64}, {"max_prefill_chunk": 7}, rounds=2, on_sim=True, drafts=True
    ),
    "prefixes from disk": Variant({"prefix_load_seconds": 30.0}, on_disk=True, at_once=4),
}


def draw_items(count: int) -> list[Item]:
    """Mixed requests: lengths from one token to several pages, temperature 0 and 1, every filter."""
    rng = random.Random(20260101)
    items = []
    for index in range(count):
        length = rng.choice([1, 2, 7, 15, 16, 17, 33, rng.randint(1, 70)])
        temperature = 0.0 if index % 3 == 0 else 1.0
        params = SamplingParams(
            temperature=temperature,
            top_k=rng.choice([-1, -1, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            ignore_eos=True,
            **({"logprobs": 2} if index % 4 == 1 else {}),
            **({"repetition_penalty": 1.3, "presence_penalty": 0.5} if index % 5 == 2 else {}),
            **({"prompt_logprobs": index % 4, "min_p": 0.01} if index % 7 == 3 else {}),
            **({"logit_bias": {7: 4.0, 9: -100.0}, "frequency_penalty": -0.4} if index % 8 == 4 else {}),
            **({"banned_token_ids": [*range(100, 300)]} if index % 9 == 5 else {}),
            **({"golden_token_ids": [-1, 42, 42], "logprobs_mode": "processed"} if index % 6 == 1 else {}),
        )
        prompt = [rng.randint(3, 500) for _ in range(length)]
        items.append(Item(prompt, params, rng.randint(2, 9), 1000 + index, rng.choice([0, 0, 1])))
    return items


@dataclass
class Table:
    """The model, the requests and what each says alone on a synchronous loop."""

    path: Path
    loaded: LoadedModel
    items: list[Item]
    alone: list[Any] = field(default_factory=list)


def scripted(table: Table) -> Any:
    """A drafter that proposes each request's own continuation with mistakes and gaps at scripted places."""
    truth = {item.seed: (len(item.prompt), said[0]) for item, said in zip(table.items, table.alone, strict=True)}

    def draft(anchors: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, records: Any) -> Any:
        ids = torch.full((anchors.shape[0], MAX_DRAFTS), -1)
        for row, (anchor, position) in enumerate(zip(anchors.tolist(), positions.tolist(), strict=True)):
            length, output = truth.get(int(records.seed[max(int(slots[row]), 0)]), (0, []))
            follow = output[position + 2 - length :][:MAX_DRAFTS] if anchor >= 0 else []
            script = random.Random(f"{length} {position}")
            for place, token in enumerate(follow):
                if script.random() < 0.1:
                    break
                ids[row, place] = token if script.random() < 0.8 else (token + 1) % 500
        return SimpleNamespace(ids=ids, confidences=torch.zeros(ids.shape))

    return draft


def said(generation: Any) -> Any:
    """Everything of a request's output that must be the same to the bit."""
    assert generation.error is None, generation.error
    return generation.token_ids, generation.logprobs, generation.prompt_logprobs


def run(table: Table, variant: Variant) -> tuple[list[Any], Any]:
    """What every request says under a variant, and the engine's counts."""
    settings = load_settings(**{**SETTINGS, **variant.settings})
    if variant.on_disk:
        settings = load_settings(**{**SETTINGS, **variant.settings}, prefix_disk_dir=table.path.parent / "prefixes")
    loaded = load_model(table.path, settings) if variant.restart else table.loaded
    options = dict(variant.engine)
    if variant.drafts:
        options["drafter"] = scripted(table)
    devices: list[SimulatedDevice] = []

    def sim(runner: ModelRunner) -> SimulatedDevice:
        devices.append(SimulatedDevice(runner))
        return devices[0]

    if variant.on_sim:
        options["executor"] = sim
    core = build_engine(loaded, settings, poison_released=True, **options).core
    running: dict[int, Any] = {}
    for _ in range(variant.rounds):
        running = run_round(table, variant, core, devices)
    core.scheduler.assert_idle()
    core.close()
    if variant.rounds > 1:
        assert sum(generation.request.num_cached_tokens for generation in running.values()) >= 32
    return [said(running[index]) for index in range(len(table.items))], core.stats


def run_round(table: Table, variant: Variant, core: Any, devices: list[SimulatedDevice]) -> dict[int, Any]:
    """Send every request through an engine once."""
    waiting = variant.order(list(range(len(table.items))))
    running: dict[int, Any] = {}
    neighbours, step = 0, 0
    while waiting or core.num_unfinished:
        while waiting and core.num_unfinished < variant.at_once:
            index = waiting.pop(0)
            item = table.items[index]
            prompt = np.array(item.prompt, np.int64)
            running[index] = core.add(
                str(index), prompt, item.params, seed=item.seed, max_tokens=item.max_tokens, priority=item.priority
            )
        if variant.storm and step < 12:
            core.abort(f"storm {neighbours - 2}")
            prompt = np.arange(3, 3 + 11 * (1 + step % 4))
            core.add(f"storm {neighbours}", prompt, SamplingParams(), seed=step, max_tokens=30, priority=-1)
            neighbours += 1
        elif variant.storm:
            for number in range(neighbours):
                core.abort(f"storm {number}")
        if devices:
            with devices[0].loop_guard():
                core.step()
        else:
            core.step()
        step += 1
    return running


def make_table(directory: Path, count: int) -> Table:
    path = make_checkpoint(directory / "tiny", "tiny")
    table = Table(path, load_model(path, load_settings(**SETTINGS)), draw_items(count))
    table.alone, _ = run(table, Variant(SYNC, at_once=1))
    return table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return make_table(tmp_path_factory.mktemp("table"), 16)


@pytest.fixture(scope="module")
def large_table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return make_table(tmp_path_factory.mktemp("large_table"), 64)


def check(table: Table, name: str, *, on_sim: bool = False) -> None:
    variant = VARIANTS[name]
    if on_sim:
        variant = dataclasses.replace(variant, on_sim=True)
    if variant.on_disk:
        run(table, variant)
    spoken, stats = run(table, variant)
    for index, (now, alone) in enumerate(zip(spoken, table.alone, strict=True)):
        assert now == alone, f"{name}: request {index} says something else than alone"
    assert stats.preemptions > 0 or not (variant.engine.get("preempt_every") or "pages" in name)
    assert stats.accepted_drafts > 10 or not variant.drafts


@pytest.mark.parametrize("name", VARIANTS)
def test_same_bits(table: Table, name: str) -> None:
    check(table, name)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", VARIANTS)
def test_same_bits_of_64_requests(large_table: Table, name: str, device: str) -> None:
    check(large_table, name, on_sim=device == "sim")

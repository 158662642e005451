"""Loop, runner and simulated device under random load, against a model that is evaluated one request at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.conformance.sim import SimulatedDevice
from deepinfer.sampling.params import SamplingParams

STEPS = 24


def scripted_drafter(truth: dict[int, tuple[int, list[int]]], num_drafts: int, seed: int) -> Any:
    """Drafts by (request, position): the true continuation with mistakes and gaps at scripted places.

    Args:
        truth: seed of a request -> (prompt length, its output when it runs alone).
    """

    def draft(anchors: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, records: Any) -> Any:
        ids = torch.full((anchors.shape[0], num_drafts), -1)
        for index, (anchor, position, slot) in enumerate(
            zip(anchors.tolist(), positions.tolist(), slots.tolist(), strict=True)
        ):
            if anchor < 0 or slot < 0:
                continue
            length, output = truth[int(records.seed[slot])]
            follow = output[position + 2 - length :][:num_drafts]
            script = random.Random(f"{seed} {slot} {position}")
            for place in range(num_drafts):
                if script.random() < 0.1:
                    break
                right = follow[place] if place < len(follow) else 6
                ids[index, place] = right if script.random() < 0.8 else 6 + (right + 1) % 30
        return SimpleNamespace(ids=ids, confidences=torch.zeros(ids.shape))

    return draft


def draw_arrival(rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": [rng.randint(6, 36) for _ in range(rng.choice([1, 3, 8, rng.randint(1, 20)]))],
        "params": SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.5]),
            top_k=rng.choice([-1, 1, 5]),
            top_p=rng.choice([1.0, 0.4]),
            stop_token_ids=[rng.randint(0, 36) for _ in range(rng.randint(0, 3))],
            ignore_eos=rng.random() < 0.5,
        ),
        "max_tokens": rng.randint(1, 14),
        "priority": rng.choice([0, 0, 0, 1, -1, 5]),
        "at": rng.randint(0, 12),
        "abort_at": rng.randint(0, STEPS) if rng.random() < 0.25 else None,
    }


def run_scenario(seed: int, fake_model: Any, make_engine: Any, naive_model: Any) -> Any:
    """One random load on one random engine; every finished request must have the tokens that it has alone."""
    rng = random.Random(seed)
    arrivals = [draw_arrival(rng) for _ in range(rng.randint(1, 8))]
    expected = [
        naive_model(item["prompt"], item["params"], item["max_tokens"], index) for index, item in enumerate(arrivals)
    ]
    truth = {index: (len(item["prompt"]), expected[index][0]) for index, item in enumerate(arrivals)}
    num_drafts = rng.choice([0, 0, 1, 3, 5])
    max_num_seqs = rng.randint(1, 4)
    budget = rng.randint(max_num_seqs, 24)
    asynchronous = rng.random() < 0.7
    faults = {
        rng.randint(0, 30): rng.choice(["moves", "before", "middle", "after"]) for _ in range(rng.choice([0, 0, 1, 2]))
    }
    bad_step = rng.choice([None, None, rng.randint(0, 20)])
    on_sim = asynchronous and rng.random() < 0.7
    devices: list[SimulatedDevice] = []

    def sim(runner: Any) -> SimulatedDevice:
        device = SimulatedDevice(
            runner,
            fails=lambda plan: faults.get(plan.step),
            bad_slots=lambda plan: frozenset(plan.slots[:1].tolist() if plan.step == bad_step else ()),
        )
        devices.append(device)
        return device

    core = make_engine(
        fake_model,
        num_pages=rng.randint(9 + 2, 26),
        max_prefill_chunk=rng.choice([None, 1, 3, 7]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        preempt_every=rng.choice([0, 0, 0, 1, 2, 3]),
        drafter=scripted_drafter(truth, num_drafts, seed) if num_drafts else None,
        use_nextn_decode=num_drafts,
        preemption_host_bytes=rng.choice([0, 200, 500, 1 << 20]),
        zero_overhead_scheduling=asynchronous,
        executor=sim if on_sim else None,
    )
    scheduler = core.scheduler
    running: dict[int, Any] = {}
    step = idle = 0
    while step <= STEPS or core.num_unfinished:
        for index, item in enumerate(arrivals):
            if item["at"] == step:
                prompt = np.array(item["prompt"], np.int64)
                running[index] = core.add(
                    str(index),
                    prompt,
                    item["params"],
                    seed=index,
                    max_tokens=item["max_tokens"],
                    priority=item["priority"],
                )
            if item["abort_at"] == step and index in running:
                core.abort(str(index))
        before = core.stats.steps + len(core._in_flight), core.num_unfinished, scheduler.preemption.num_preemptions
        if devices:
            with devices[0].loop_guard():
                core.step()
        else:
            core.step()
        after = core.stats.steps + len(core._in_flight), core.num_unfinished, scheduler.preemption.num_preemptions
        idle = idle + 1 if before == after and before[1] else 0
        assert idle <= 2, "no progress"
        scheduler.pages.check()
        assert scheduler.sequences.num_available_pages >= 0, "pages are promised twice"
        step += 1
        assert step < 2000, "no end"
    assert not core._in_flight
    assert not scheduler.has_work()
    scheduler.assert_idle()
    for index, generation in running.items():
        tokens, reason = expected[index]
        if generation.finish_reason in ("abort", "error"):
            assert (generation.error is not None) == (generation.finish_reason == "error")
            assert faults or bad_step is not None or generation.finish_reason == "abort", generation.error
            assert generation.token_ids == tokens[: len(generation.token_ids)]
        else:
            assert (generation.token_ids, generation.finish_reason) == (tokens, reason)
    assert max(fake_model.rows_seen, default=0) <= budget
    core.close()
    # Copies of requests that ended in the last step go with the next plan.
    assert len(core.runner.host_copies) <= len(scheduler.changes.dropped)
    return core


@pytest.mark.parametrize("block", range(3))
def test_same_tokens_as_one_at_a_time(block: int, fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    """Arrivals, aborts, stops, priorities, tiny pools, drafts, preemption, failures, synchronous or not."""
    preemptions = accepted = again = 0
    for seed in range(30 * block, 30 * (block + 1)):
        fake_model.rows_seen.clear()
        core = run_scenario(seed, fake_model, make_engine, naive_model)
        preemptions += core.stats.preemptions
        accepted += core.stats.accepted_drafts
        again += core.stats.recomputations
    assert preemptions > 10
    assert accepted > 10
    assert again > 10


@pytest.mark.slow
def test_three_hundred_scenarios(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    for seed in range(300, 600):
        fake_model.rows_seen.clear()
        run_scenario(seed, fake_model, make_engine, naive_model)

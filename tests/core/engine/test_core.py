"""The step loop, synchronous and asynchronous: failures, limits, interrupts and who pays for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.conformance.sim import HostSyncError, SimulatedDevice
from deepinfer.errors import CapacityError, EngineDead, RequestFailed
from deepinfer.sampling.params import SamplingParams


def test_a_loop_without_progress_stops_loudly(fake_model: Any, make_engine: Any) -> None:
    """H10: no request can spin for ever; a step that runs nothing although there is work is a fault of the engine."""
    core = make_engine(fake_model)
    add(core, "a")
    core.scheduler.plan = lambda: None
    with pytest.raises(EngineDead, match="nothing can run although 1 requests are unfinished"):
        core.step()


def add(core: Any, name: str, length: int = 5, max_tokens: int = 4, **params: Any) -> Any:
    prompt = np.arange(6, 6 + length, dtype=np.int64) % 30 + 6
    return core.add(
        name, prompt, SamplingParams(ignore_eos=True, temperature=0, **params), seed=3, max_tokens=max_tokens
    )


def drain(core: Any) -> None:
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()


def test_a_failing_kernel_ends_its_step_and_nothing_else(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    core = make_engine(fake_model, max_num_seqs=2, zero_overhead_scheduling=False)
    first, second = add(core, "a"), add(core, "b")
    waiting = add(core, "c")
    core.step()
    fake_model.fail_on = lambda slots: True
    changed = core.step()
    assert set(changed) == {first, second}
    for generation in (first, second):
        assert generation.finish_reason == "error"
        assert isinstance(generation.error, RequestFailed)
        assert isinstance(generation.error.__cause__, RuntimeError)
        assert "step 1 failed: RuntimeError: kernel fell over" in str(generation.error)
    fake_model.fail_on = lambda slots: False
    late = add(core, "d")
    drain(core)
    assert core.stats.failed_steps == 1
    for generation in (waiting, late):
        prompt = generation.request.prompt.tolist()
        assert generation.token_ids == naive_model(prompt, generation.params, 4, 3)[0]
        assert generation.finish_reason == "length"


def test_bad_logits_end_one_request(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    core = make_engine(fake_model, zero_overhead_scheduling=False)
    bad, good = add(core, "bad", length=3), add(core, "good", length=6)
    core.step()
    states = set()
    fake_model.poison_logits = lambda state: states.add(state) or len(states) == 1
    core.step()
    assert bad.finish_reason == "error"
    assert "'bad': the logits for position 4 hold NaN" in str(bad.error)
    drain(core)
    assert good.token_ids == naive_model(good.request.prompt.tolist(), good.params, 4, 3)[0]


def test_a_request_that_never_fits_is_refused_with_the_numbers(fake_model: Any, make_engine: Any) -> None:
    core = make_engine(fake_model, num_pages=10, max_model_len=64)
    with pytest.raises(
        CapacityError, match=r"can need 11 pages of 4 tokens \(38 prompt tokens, max_tokens=5\), the pool has 10"
    ):
        add(core, "big", length=38, max_tokens=5)
    add(core, "fits", length=38, max_tokens=3)
    drain(core)


def test_interrupt_ends_the_step_cleanly(fake_model: Any, make_engine: Any) -> None:
    core = make_engine(fake_model, zero_overhead_scheduling=False)
    generation = add(core, "a")

    def interrupt(slots: list[int]) -> bool:
        raise KeyboardInterrupt

    fake_model.fail_on = interrupt
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert generation.finish_reason == "error"
    core.scheduler.assert_idle()


def test_broken_accounting_kills_the_engine_loudly(fake_model: Any, make_engine: Any) -> None:
    core = make_engine(fake_model)
    add(core, "a", max_tokens=1)
    core.scheduler.pages.free = lambda ids, **_: (_ for _ in ()).throw(RuntimeError("double free"))
    with pytest.raises(EngineDead, match="double free"):
        drain(core)
    with pytest.raises(EngineDead, match="the engine stopped: RuntimeError: double free"):
        core.step()
    with pytest.raises(EngineDead):
        add(core, "b")


def test_an_interrupt_while_waiting_loses_nothing(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    core = make_engine(fake_model)
    generation = add(core, "a")
    core.step()
    pending = core._in_flight[0].pending
    wait, calls = pending.read, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait()

    pending.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        core.step()
    drain(core)
    assert generation.token_ids == naive_model(generation.request.prompt.tolist(), generation.params, 4, 3)[0]
    core.close()


def test_the_next_step_is_launched_before_the_last_one_is_read(fake_model: Any, make_engine: Any) -> None:
    """Prompts drain nothing: decode rows of the first run while the second is in its prompt, one step late."""
    core = make_engine(fake_model, max_num_batched_tokens=8)
    first = add(core, "a", length=3, max_tokens=6)
    assert core.step() == []
    assert len(core._in_flight) == 1
    add(core, "b", length=20, max_tokens=2)
    for count in (1, 2, 3):
        assert core.step() == [first]
        assert len(first.token_ids) == count
        assert len(core._in_flight) == 1
    drain(core)
    assert not core._in_flight
    core.close()


def test_a_finished_request_wastes_at_most_one_step(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    stopped, counted = add_params(max_tokens=20), add_params(max_tokens=5)
    prompt = list(range(6, 10))
    stop = naive_model(prompt, stopped, 20, 3)[0][3]
    core = make_engine(fake_model)
    params = add_params(stop_token_ids=[stop])
    generation = core.add("stops", np.array(prompt), params, seed=3, max_tokens=20)
    drain(core)
    useful = 4 + len(generation.token_ids) - 1
    assert sum(fake_model.rows_seen) == useful + 1
    fake_model.rows_seen.clear()
    generation = core.add("counts", np.array(prompt), counted, seed=3, max_tokens=5)
    drain(core)
    assert sum(fake_model.rows_seen) == 4 + 5 - 1
    core.close()


def add_params(**params: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, temperature=0, **params)


FAULTS = {1: "middle"}


def test_a_failure_of_a_step_spares_those_that_join_the_next(
    fake_model: Any, make_engine: Any, naive_model: Any
) -> None:
    """Step 1 fails while step 2 is in flight: step 2's rows of the failed request become padding, others go on."""

    def sim(runner: Any) -> SimulatedDevice:
        return SimulatedDevice(runner, fails=lambda plan: FAULTS.get(plan.step))

    core = make_engine(fake_model, executor=sim)
    first = add(core, "a")
    core.step()
    core.step()
    second = add(core, "b")
    drain(core)
    assert isinstance(first.error, RequestFailed)
    assert "step 1 failed: SimulatedFault: ordered: middle" in str(first.error)
    assert second.error is None
    assert second.token_ids == naive_model(second.request.prompt.tolist(), second.params, 4, 3)[0]
    core.close()


def test_the_guard_sees_host_reads(fake_model: Any, make_engine: Any) -> None:
    """The simulated device refuses a wait between launch and sample, and torch calls of the loop's thread."""
    devices = []

    def sim(runner: Any) -> SimulatedDevice:
        devices.append(SimulatedDevice(runner))
        return devices[0]

    core = make_engine(fake_model, executor=sim)
    verify = core.runner._verify
    core.runner._verify = lambda *args: (args[0].tolist(), verify(*args))[1]
    generation = add(core, "a")
    core.step()
    core.flush()
    assert isinstance(generation.error.__cause__, HostSyncError)
    assert "tolist waits for the device between launch and sample" in str(generation.error)
    core.runner._verify = verify
    plan = core.scheduler.plan
    core.scheduler.plan = lambda: (core.runner.records.length.sum(), plan())[1]
    add(core, "b")
    with devices[0].loop_guard(), pytest.raises(EngineDead, match="is called by the loop's thread"):
        core.step()
    core.close()


def test_stops_inside_a_block_end_as_without_speculation(fake_model: Any, make_engine: Any, naive_model: Any) -> None:
    """H13: whatever offset of an accepted block ends a request, tokens and reason are those of one row at a time."""
    prompt = list(range(6, 11))
    free = naive_model(prompt, add_params(), 14, 3)[0]

    def perfect(anchors: Any, positions: Any, slots: Any, records: Any) -> Any:
        ids = torch.full((anchors.shape[0], 5), -1)
        for row, (anchor, position) in enumerate(zip(anchors.tolist(), positions.tolist(), strict=True)):
            follow = free[position + 2 - len(prompt) :][:5] if anchor >= 0 else []
            ids[row, : len(follow)] = torch.tensor(follow, dtype=torch.int64)
        return SimpleNamespace(ids=ids, confidences=torch.zeros(ids.shape))

    for asynchronous in (False, True):
        core = make_engine(
            fake_model, drafter=perfect, use_nextn_decode=5, zero_overhead_scheduling=asynchronous, num_pages=12
        )
        for end in range(1, 14):
            params = add_params(stop_token_ids=[free[end]])
            expected = naive_model(prompt, params, 14, 3)
            generation = core.add("stop", np.array(prompt), params, seed=3, max_tokens=14)
            drain(core)
            assert (generation.token_ids, generation.finish_reason) == expected
            generation = core.add("length", np.array(prompt), add_params(), seed=3, max_tokens=end)
            drain(core)
            assert (generation.token_ids, generation.finish_reason) == (free[:end], "length")
        assert core.stats.accepted_drafts > 40
        core.close()

"""The step loop against a model that is evaluated one request at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.errors import CapacityError, EngineDead, RequestFailed
from deepinfer.sampling.params import SamplingParams

ARRIVALS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(6, 36), min_size=1, max_size=20),
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([-1, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.4]),
        "stops": st.lists(st.integers(0, 36), max_size=3),
        "ignore_eos": st.booleans(),
        "at": st.integers(0, 12),
        "abort_after": st.one_of(st.none(), st.integers(0, 12)),
    }
)


def params_of(arrival: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=arrival["temperature"],
        top_k=arrival["top_k"],
        top_p=arrival["top_p"],
        max_tokens=arrival["max_tokens"],
        stop_token_ids=arrival["stops"],
        ignore_eos=arrival["ignore_eos"],
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(4, 20),
    chunk=st.sampled_from([None, 1, 3, 7]),
    pages=st.integers(8, 24),
    failing=st.sets(st.integers(0, 30), max_size=2),
)
def test_same_tokens_as_one_at_a_time(
    fake_model: Any,
    make_engine: Any,
    naive_model: Any,
    arrivals: list[dict[str, Any]],
    max_num_seqs: int,
    budget: int,
    chunk: int | None,
    pages: int,
    failing: set[int],
) -> None:
    fake_model.rows_seen.clear()
    fake_model.fail_on = lambda slots: step in failing
    core = make_engine(
        fake_model,
        num_pages=pages,
        max_prefill_chunk=chunk,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    scheduler = core.scheduler
    running: dict[str, Any] = {}
    step = 0
    while step <= 12 or core.num_unfinished:
        for index, arrival in enumerate(arrivals):
            if arrival["at"] == step:
                name, params = str(index), params_of(arrival)
                prompt = np.array(arrival["prompt"], np.int64)
                running[name] = core.add(name, prompt, params, seed=index, max_tokens=arrival["max_tokens"])
            if arrival["abort_after"] is not None and arrival["at"] + arrival["abort_after"] == step:
                core.abort(str(index))
        waiting = core.num_unfinished
        rows = len(fake_model.rows_seen)
        core.step()
        assert waiting == 0 or len(fake_model.rows_seen) == rows + 1, "a step with work must run rows"
        scheduler.pages.check()
        assert scheduler.pages.num_used <= scheduler.num_reserved_pages <= scheduler.pages.capacity
        step += 1
        assert step < 500, "no progress"
    assert not scheduler.has_work()
    scheduler.assert_idle()
    assert max(fake_model.rows_seen, default=0) <= budget
    for index, arrival in enumerate(arrivals):
        generation = running[str(index)]
        expected, reason = naive_model(arrival["prompt"], params_of(arrival), arrival["max_tokens"], index)
        if generation.finish_reason in ("abort", "error"):
            assert (generation.error is not None) == (generation.finish_reason == "error")
            assert generation.token_ids == expected[: len(generation.token_ids)]
        else:
            assert (generation.token_ids, generation.finish_reason) == (expected, reason)
            assert (generation.stop_reason is None) == (reason != "stop" or expected[-1] not in arrival["stops"])


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
    core = make_engine(fake_model, max_num_seqs=2)
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
    core = make_engine(fake_model)
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
    core = make_engine(fake_model)
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
    core.scheduler.pages.free = lambda ids: (_ for _ in ()).throw(RuntimeError("double free"))
    with pytest.raises(EngineDead, match="double free"):
        core.step()
    with pytest.raises(EngineDead, match="the engine stopped: RuntimeError: double free"):
        core.step()
    with pytest.raises(EngineDead):
        add(core, "b")

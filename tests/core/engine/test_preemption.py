"""Preemption with and without room for a copy on the host: the same tokens and log-probabilities, told once."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from deepinfer import SamplingParams
from deepinfer.engine.metrics import metrics_text
from deepinfer.scheduler.policy import PriorityOrder
from deepinfer.scheduler.request import RequestState

PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.2, "top_p": 0.9, "logprobs": 2},
    "penalised": {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": 0.4, "temperature": 0.7},
    "scored": {"prompt_logprobs": 2, "logprobs": 1, "logprobs_mode": "processed", "min_p": 0.05},
    "forced": {"golden_token_ids": [9, -1, -1, 9, -1, 30], "frequency_penalty": 2.0, "temperature": 0, "logprobs": 0},
    "late end": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": list(range(6, 30))},
    "banned": {"banned_token_ids": list(range(20)), "logit_bias": {30: 3.0}},
}
PAGES_OF_COPIES = {"copies": 1 << 30, "one copy": 200, "none": 0}
"""Host bytes: for all, for the slot and two pages of one request, for nobody."""


def run(core: Any) -> dict[str, Any]:
    """Tokens, log-probabilities and ends of all kinds of requests beside each other."""
    running = {}
    for index, (name, given) in enumerate(PARAMS.items()):
        params = SamplingParams(**{"ignore_eos": True, "temperature": 1.0, **given})
        prompt = 6 + np.arange(3 + 4 * index, dtype=np.int64) * (index + 3) % 31
        running[name] = core.add(name, prompt, params, seed=index, max_tokens=12, priority=index % 2)
    told = dict.fromkeys(running, 0)
    while core.num_unfinished:
        for generation in core.step():
            name = generation.request.request_id
            assert len(generation.token_ids) >= told[name], "a token was taken back"
            told[name] = len(generation.token_ids)
    core.scheduler.assert_idle()
    return {
        name: (item.token_ids, item.logprobs, item.prompt_logprobs, item.cumulative_logprob, item.finish_reason)
        for name, item in running.items()
    }


@pytest.mark.parametrize("room", PAGES_OF_COPIES)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_nothing_changes_and_nothing_is_told_twice(
    fake_model: Any, make_engine: Any, room: str, reuse: bool, every: int
) -> None:
    expected = run(make_engine(fake_model, enable_prefix_caching=False, zero_overhead_scheduling=False))
    core = make_engine(
        fake_model,
        preempt_every=every,
        preemption_host_bytes=PAGES_OF_COPIES[room],
        enable_prefix_caching=reuse,
        max_prefill_chunk=5,
    )
    assert run(core) == expected
    stats = core.stats
    assert stats.preemptions > 5
    assert {"copies": stats.recomputations == 0, "none": stats.recomputations == stats.preemptions}.get(
        room, 0 < stats.recomputations < stats.preemptions
    )
    assert core.scheduler.preemption.host.used == 0
    core.close()


def test_what_runs_again_reuses_what_the_request_had_published(fake_model: Any, make_engine: Any) -> None:
    """Its own pages are found again: only the rows behind the last snapshot run twice."""
    core = make_engine(fake_model, preemption_host_bytes=0, zero_overhead_scheduling=False, num_pages=40)
    prompt = np.arange(6, 30, dtype=np.int64)
    generation = core.add("a", prompt, SamplingParams(temperature=0, ignore_eos=True), seed=0, max_tokens=10)
    while len(generation.token_ids) < 4:
        core.step()
    core.scheduler.preempt_worst()
    rows = core.stats.prefill_rows
    while core.num_unfinished:
        core.step()
    assert generation.request.start == 24, "the last page boundary that its output had passed"
    assert core.stats.prefill_rows - rows == prompt.size + 4 - 24
    assert generation.request.num_cached_tokens == 0, "which is what its caller is told"
    core.close()


class Newest(PriorityOrder):
    """Everybody waits for the newest."""

    def rank(self, request: Any) -> int:
        return -int(request.arrival)


def test_a_policy_named_in_the_settings_decides_who_gives_way(
    fake_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("newest")
    module.Newest = Newest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "newest", module)
    core = make_engine(fake_model, scheduling_policy="newest:Newest")
    first, second = (
        core.add(name, np.arange(6, 9, dtype=np.int64), SamplingParams(ignore_eos=True), seed=0, max_tokens=9)
        for name in "ab"
    )
    core.step()
    core.scheduler.preempt_worst()
    assert (first.request.state, second.request.state) == (RequestState.PREEMPTED, RequestState.RUNNING)
    core.abort("a")
    core.abort("b")
    core.close()


def test_metrics_tell_both_kinds_and_the_bytes(fake_model: Any, make_engine: Any) -> None:
    core = make_engine(fake_model, preemption_host_bytes=200, zero_overhead_scheduling=False)
    for index in range(2):
        prompt = np.arange(6, 10, dtype=np.int64)
        core.add(str(index), prompt, SamplingParams(temperature=0, ignore_eos=True), seed=0, max_tokens=20)
    while not all(item.token_ids for item in core._generations.values()):
        core.step()
    core.scheduler.preempt_worst()
    core.scheduler.preempt_worst()
    held = core.scheduler.preemption.host.used
    assert held == 160, "a slot and a page"
    assert f'deepinfer_preempted_bytes{{engine="0"}} {held}' in metrics_text({"0": core})
    while core.num_unfinished:
        core.step()
    text = metrics_text({"0": core})
    assert 'deepinfer_preemptions_total{engine="0"} 2' in text
    assert 'deepinfer_recomputations_total{engine="0"} 1' in text
    assert 'deepinfer_preempted_bytes{engine="0"} 0' in text
    core.close()

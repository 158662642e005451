"""What an engine reports about itself while it serves."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.api.descriptor import API_VERSION, ObserverDescriptor
from deepinfer.api.observer import StepRecord
from deepinfer.engine.loader import LoadedModel
from deepinfer.plugins.registry import Origin, Registry
from deepinfer.settings import Settings

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("ahead", [True, False])
def test_counts_latencies_and_trace(fake_model: Any, ahead: bool) -> None:
    settings = Settings(max_num_seqs=3, max_num_batched_tokens=16, use_nextn_decode=0, zero_overhead_scheduling=ahead)
    with LLM.from_loaded(LoadedModel(fake_model, Path(), None, "fake"), settings) as llm:
        trace = llm.trace()
        outputs = llm.generate([[7], [8, 9], [10] * 7, [11]], GREEDY)
        text = llm.metrics_text()
        recorder = llm._core.recorder
        steps = llm.stats.steps
    found = dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))
    assert found['deepinfer_requests_total{engine="0",reason="length"}'] == "4"
    assert found['deepinfer_steps_total{engine="0"}'] == str(steps)
    assert found['deepinfer_time_to_first_token_seconds_count{engine="0"}'] == "4"
    assert found['deepinfer_queue_time_seconds_count{engine="0"}'] == "4"
    assert found['deepinfer_inter_token_seconds_count{engine="0"}'] == str(4 * 4)
    assert found['deepinfer_request_seconds_count{engine="0"}'] == "4"
    assert found['deepinfer_step_seconds_count{engine="0"}'] == str(steps)
    assert found['deepinfer_requests_running{engine="0"}'] == "0"
    assert found['deepinfer_requests_waiting{engine="0"}'] == "0"
    assert found['deepinfer_pages_used{engine="0"}'] == "0"
    assert 'deepinfer_prefix_lookups_total{engine="0"}' in found
    waits = [out.metrics.first_token - out.metrics.arrival for out in outputs]
    assert recorder.time_to_first_token.sum == pytest.approx(sum(waits))
    assert all(out.metrics.first_token <= out.metrics.last_token <= out.metrics.finished for out in outputs)
    spans = [event for event in trace.to_dict()["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 4 * steps
    for lane in range(4):
        times = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == lane]
        assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(times))


HEARD: list[StepRecord] = []


def make_observer(settings: Any) -> Any:
    """What a descriptor below names."""
    return HEARD.append


def make_broken_observer(settings: Any) -> Any:
    """What the other one names."""
    raise OSError("no such socket")


def test_observers_of_plugins_are_made_and_a_broken_one_is_left_out(
    fake_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry: Registry[ObserverDescriptor] = Registry("observer", ObserverDescriptor)
    registry.begin(Origin("acme", __name__, "acme-observer", "1.0"))
    registry.add(ObserverDescriptor("acme", API_VERSION, f"{__name__}:make_observer"))
    registry.add(ObserverDescriptor("acme-broken", API_VERSION, f"{__name__}:make_broken_observer"))
    registry.end()
    monkeypatch.setattr(
        "deepinfer.plugins.host.default_host", lambda: SimpleNamespace(observers=registry, variables=dict)
    )
    HEARD.clear()
    settings = Settings(max_num_seqs=3, max_num_batched_tokens=16, use_nextn_decode=0)
    with LLM.from_loaded(LoadedModel(fake_model, Path(), None, "fake"), settings) as llm:
        llm.generate([[9, 10]], GREEDY, use_tqdm=False)
    assert [record.step for record in HEARD] == list(range(len(HEARD)))
    assert sum(record.rows for record in HEARD) >= 5
    assert not any(record.failed for record in HEARD)
    assert "'acme-broken' of acme-observer 1.0 is left out: no such socket" in caplog.text

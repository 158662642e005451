"""Histograms, traces and the text for Prometheus."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ConfigError
from deepinfer.observe.histogram import REQUEST_SECONDS, STEP_SECONDS, Histogram
from deepinfer.observe.logs import JsonFormatter
from deepinfer.observe.prometheus import CONTENT_TYPE, Family, MetricsServer, exposition
from deepinfer.observe.recorder import LoopRecorder, StepRecord
from deepinfer.observe.trace import LANES, StepTrace


@given(st.lists(st.floats(0, 400)))
def test_buckets_count_what_numpy_counts(values: list[float]) -> None:
    histogram = Histogram(REQUEST_SECONDS)
    for value in values:
        histogram.observe(value)
    ends = np.searchsorted(REQUEST_SECONDS, values, side="left")
    assert histogram.counts == np.bincount(ends.astype(int), minlength=len(REQUEST_SECONDS) + 1).tolist()
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@given(st.lists(st.floats(0.0001, 9.9), min_size=1), st.floats(0, 1))
def test_quantiles_lie_in_the_bucket_of_the_value(values: list[float], share: float) -> None:
    histogram = Histogram(STEP_SECONDS)
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
    end = next(index for index, bound in enumerate(STEP_SECONDS) if exact <= bound)
    low = STEP_SECONDS[end - 1] if end else 0.0
    assert low <= histogram.quantile(share) <= STEP_SECONDS[end] + 1e-12


def test_odd_histograms() -> None:
    assert math.isnan(Histogram((1, 2)).quantile(0.5))
    high = Histogram((1, 2))
    high.observe(99)
    assert high.quantile(0.5) == 2
    with pytest.raises(ValueError, match="must ascend"):
        Histogram((1, 1))
    with pytest.raises(ValueError, match=r"a share is in \[0, 1\], found 50"):
        high.quantile(50)


def test_exposition_text() -> None:
    histogram = Histogram((0.5, 1))
    for value in (0.1, 0.5, 0.7, 3):
        histogram.observe(value)
    text = exposition(
        [
            Family("a_total", "counter", "Two\nlines.", [({}, 3.0)]),
            Family("b", "gauge", "B.", [({"name": 'x"y\\z'}, 0.25), ({"name": "nan"}, math.nan)]),
            Family("c_seconds", "histogram", "C.", histograms=[({"engine": "0"}, histogram)]),
        ]
    )
    assert text.splitlines() == [
        r"# HELP a_total Two\nlines.",
        "# TYPE a_total counter",
        "a_total 3",
        "# HELP b B.",
        "# TYPE b gauge",
        r'b{name="x\"y\\z"} 0.25',
        'b{name="nan"} NaN',
        "# HELP c_seconds C.",
        "# TYPE c_seconds histogram",
        'c_seconds_bucket{engine="0",le="0.5"} 2',
        'c_seconds_bucket{engine="0",le="1"} 3',
        'c_seconds_bucket{engine="0",le="+Inf"} 4',
        'c_seconds_sum{engine="0"} 4.3',
        'c_seconds_count{engine="0"} 4',
    ]
    assert text.endswith("\n")


@pytest.mark.parametrize("names", [("a-b",), ("a", "a"), ("1a",)])
def test_bad_metric_names(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="is not a new metric name"):
        exposition(Family(name, "gauge", "") for name in names)


def test_server() -> None:
    with MetricsServer(lambda: "x 1\n") as server:
        host, port = server.address
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
            assert answer.read() == b"x 1\n"
            assert answer.headers["Content-Type"] == CONTENT_TYPE
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{host}:{port}/", timeout=5)
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}: "):
            MetricsServer(lambda: "", port=port)


def test_trace_document(tmp_path: Path) -> None:
    recorder = LoopRecorder()
    recorder.launched(0, 9.0, 9.1, 9.2, rows=1, running=1, waiting=0)
    trace = recorder.trace = StepTrace()
    recorder.launched(1, 10.0, 10.001, 10.002, rows=7, running=3, waiting=2)
    recorder.launched(2, 10.003, 10.004, 10.005, rows=7, running=3, waiting=2)
    recorder.finished(1, 10.002, 10.010, 10.011)
    recorder.finished(2, 10.005, 10.020, 10.021)
    trace.save(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert tuple(names) == LANES
    spans = {event["name"]: (event["ts"], event["dur"]) for event in document["traceEvents"] if event["ph"] == "X"}
    assert spans["plan 1"] == (0.0, 1000.0)
    assert spans["device 1"] == (2000.0, 8000.0)
    assert spans["device 2"] == (10000.0, 10000.0), "the device works on one step at a time"
    assert "plan 0" not in spans
    counters = [event["args"] for event in document["traceEvents"] if event["ph"] == "C"]
    assert counters == [{"running": 3, "waiting": 2}] * 2
    assert recorder.plan_time.count == 3
    assert recorder.step_time.sum == pytest.approx(0.018)


def test_a_full_trace_says_so() -> None:
    trace = StepTrace(max_events=2)
    for step in range(5):
        trace.span("plan", step, step, step + 1)
    document = trace.to_dict()
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 2
    assert document["otherData"] == {"dropped_events": 3}
    assert StepTrace().to_dict()["traceEvents"]


def test_token_times() -> None:
    recorder = LoopRecorder()
    recorder.token(1.0, 1.5, None, 2.0)
    recorder.token(1.0, 1.5, 2.0, 2.25)
    assert (recorder.time_to_first_token.sum, recorder.queue_time.sum, recorder.inter_token.sum) == (1.0, 0.5, 0.25)


SAMPLE = re.compile(r'[a-z_:]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? (-?[0-9.e+-]+|\+Inf|NaN)')


def test_every_line_has_the_form_of_the_format() -> None:
    recorder = LoopRecorder()
    text = exposition([Family("a_seconds", "histogram", "A.", histograms=[({}, recorder.step_time)])])
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line


def test_json_log_lines() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("deepinfer.engine", logging.ERROR, "", 0, "step %d: ü", (7,), sys.exc_info())
    line = JsonFormatter().format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "deepinfer.engine", "step 7: ü")
    assert entry["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in entry["error"]
    assert "error" not in json.loads(JsonFormatter().format(logging.LogRecord("a", 20, "", 0, "b", (), None)))


def test_observers_hear_of_every_step_and_a_failing_one_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[StepRecord] = []
    calls: list[int] = []

    def broken(record: StepRecord) -> None:
        calls.append(record.step)
        raise RuntimeError("disk full")

    recorder = LoopRecorder([broken, heard.append])
    recorder.launched(0, 1.0, 1.25, 1.5, rows=7, running=3, waiting=2)
    recorder.launched(1, 2.0, 2.5, 2.5, rows=1, running=1, waiting=0)
    recorder.finished(0, 1.0, 3.0, 3.5)
    recorder.finished(1, 2.0, 4.0, 4.5, failed=True)
    assert heard == [
        StepRecord(0, rows=7, running=3, waiting=2, plan_seconds=0.25, step_seconds=2.0, failed=False),
        StepRecord(1, rows=1, running=1, waiting=0, plan_seconds=0.5, step_seconds=1.0, failed=True),
    ]
    assert calls == [0]
    assert "is not called again" in caplog.text
    assert "disk full" in caplog.text

"""`deepinfer bench` on the tiny checkpoint, and the traces that both measuring commands write."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.cli import build_app
from deepinfer.cli.bench_load import read_requests
from deepinfer.errors import InvalidRequest

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def call(*words: Any) -> Any:
    words = tuple(map(str, words))
    return CliRunner().invoke(build_app(words), words)


def run(*words: Any) -> Any:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("load", ["throughput", "latency", "mixed"])
def test_synthetic_load(tiny: Path, tmp_path: Path, load: str) -> None:
    small = ("--num-requests", 3, "--input-len", 8, "--output-len", 4, "--max-model-len", 128, "--rate", 200)
    files = ("--output", tmp_path / "report.json", "--trace", tmp_path / "trace.json")
    shown = run("bench", load, "--model", tiny, "--accelerator", "cpu", *small, *files).stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["load"], report["num_requests"], report["num_failed"]) == (load, 3, 0)
    assert f"{load}: 3 requests in " in shown
    assert "generated tokens/s" in shown
    if load != "mixed":
        assert (report["prompt_tokens"], report["generated_tokens"]) == (24, 12)
    assert all(2 <= entry["prompt_tokens"] <= 8 and 1 <= entry["generated_tokens"] <= 4 for entry in report["requests"])
    for values in report["latency_seconds"].values():
        assert 0 <= values["p50"] <= values["p90"] <= values["p99"] <= values["max"] <= report["seconds"]
    assert report["engine"]["prefill_rows"] == report["prompt_tokens"], "the first request is not counted"
    drafts = report["speculation"]
    assert sum(drafts["drafted"]) >= sum(drafts["verified"]) >= sum(drafts["accepted"])
    assert f"{sum(drafts['verified'])} drafts verified, " in shown
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends = [(entry["sent"], entry["finished"]) for entry in report["requests"]]
    if load == "latency":
        assert all(sent >= before for (_, before), (sent, _) in pairwise(ends))


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_requests_from_a_file_and_a_plot(tiny: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "ignore_eos": True}, "arrival": 0.01},
        {"prompt_token_ids": [8], "sampling_params": {"max_tokens": 2, "ignore_eos": True, "n": 2}},
        {"prompt_token_ids": [-1]},
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    words = ("bench", "mixed", "--model", tiny, "--accelerator", "cpu", "--requests", requests, "--json")
    plot = tmp_path / "plot.png"
    report = json.loads(run(*words, "--max-model-len", 128, "--plot", plot).stdout)
    assert (report["num_requests"], report["num_failed"], report["generated_tokens"]) == (3, 1, 7)
    errors = [entry["error"] for entry in report["requests"] if entry["error"]]
    assert errors == ["InvalidRequest: prompt_token_ids: id -1 at index 0 is outside the vocabulary 0..511"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = run(*words[:-1], "--max-model-len", 128).stdout
    assert "3 requests, 1 failed in" in table
    assert f"the first failure: {errors[0]}" in table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("[1]", "requests.jsonl:1: expected an object with prompt or prompt_token_ids"),
        ('{"prompt": "a"}\n{', "requests.jsonl:2: Expecting property name"),
        ('{"prompt": "a", "arrival": -1}', "requests.jsonl:1: arrival=-1 is not a number of seconds"),
        ('{"prompt": "a", "sampling_params": 1}', "requests.jsonl:1: sampling_params is not an object"),
        ('{"prompt": "a", "max_tokens": 1}', "requests.jsonl:1: expected an object"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_requests(path)
    assert message in str(caught.value)


def test_arrivals_are_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "b", "arrival": 2}\n{"prompt": "a", "arrival": 1}')
    assert [job.prompt for job in read_requests(path)] == ["a", "b"]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize("acceptance", ["0.9,0.1", pytest.param(None, marks=pytest.mark.slow)])
def test_speculation(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acceptance: str | None) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    monkeypatch.setenv("DEEPINFER_DECODE_PERF_CACHE_DIR", str(tmp_path / "costs"))
    small = ("--num-requests", 2, "--input-len", 4, "--output-len", 10, "--max-num-seqs", 2, "--max-model-len", 128)
    words = ("bench", "spec", "--model", tiny, "--accelerator", "cpu", *small, "--repeats", 1)
    script = () if acceptance is None else ("--acceptance", acceptance)
    files = ("--output", tmp_path / "report.json", "--plot", tmp_path / "plot.png")
    shown = run(*words, *script, *files).stdout
    report = json.loads((tmp_path / "report.json").read_text())
    block = report["block_size"]
    labels = [entry["drafts"] for entry in report["lengths"]]
    assert labels == [*map(str, range(block + 1)), "scheduled"]
    assert all(f"\n  {label} " in shown for label in labels)
    for entry in report["lengths"]:
        assert entry["same_tokens"]
        assert entry["generated_tokens"] == 20
        assert entry["tokens_per_second"] == pytest.approx(20 / entry["seconds"])
    for count, entry in enumerate(report["lengths"][1:-1], 1):
        drafts = entry["speculation"]
        assert len(drafts["verified"]) == count
        assert all(more <= fewer for fewer, more in pairwise(drafts["accepted"]))
        assert all(stand <= judged for stand, judged in zip(drafts["accepted"], drafts["verified"], strict=True))
        assert 1 <= entry["tokens_per_sequence_step"] <= 1 + count
    if acceptance is not None:
        assert report["acceptance"] == [0.9, 0.1]
        # Nine of ten drafts of one request and one of ten of the other.
        assert 0.2 < report["lengths"][1]["acceptance"] < 0.8
        assert report["lengths"][block]["steps"] < report["lengths"][0]["steps"]
    assert list(report["step_times"]) == ["no drafter", *(f"{count} verified" for count in range(block + 1))]
    assert all(times["seconds"] > 0 < times["processor_seconds"] for times in report["step_times"].values())
    assert "a step of 2 sequences: no drafter " in shown
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "x", "0.5,", "1.5", "-0.1", "nan"])
def test_bad_acceptance(text: str) -> None:
    result = call("bench", "spec", "--acceptance", text)
    assert isinstance(result.exception, InvalidRequest)
    assert f"--acceptance: {text!r} is not a probability or a comma list of them" in str(result.exception)


def test_missing_directories_are_said_before_anything_runs(tmp_path: Path) -> None:
    for words in (("bench", "throughput", "--output"), ("bench", "spec", "--plot"), ("generate", "x", "--trace")):
        result = call(*words, tmp_path / "nowhere" / "file.json")
        assert isinstance(result.exception, InvalidRequest)
        assert f"{words[-1]}: there is no directory {tmp_path / 'nowhere'}" in str(result.exception)


def test_generate_writes_a_trace(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    words = ("generate", "--token-ids", "5,6", "--max-tokens", 3, "--model", tiny, "--accelerator", "cpu")
    run(*words, "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"plan 0", "launch 0", "device 0", "post 0"}

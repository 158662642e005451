"""`deepinfer generate` as a newcomer types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.checkpoint.synthetic import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    environment |= {"OMP_NUM_THREADS": "1", "DEEPINFER_ACCELERATOR": "cpu", **variables}
    command = [sys.executable, "-m", "deepinfer", "generate", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ids_in_ids_out(tiny: Path) -> None:
    words = ("--token-ids", "5,6,7", "--max-tokens", "5", "--seed", "3", "--ignore-eos")
    first = run(*words, "--model", str(tiny), "--json")
    assert first.returncode == 0, first.stderr
    assert re.search(r"\[read 0\.\d+ GB in \d+\.\d\d s, \d+\.\d\d GB/s\]", first.stderr)
    report = json.loads(first.stdout)
    assert report["prompt_token_ids"] == [5, 6, 7]
    assert len(report["token_ids"]) == 5
    assert (report["seed"], report["finish_reason"], report["num_cached_tokens"]) == (3, "length", 0)
    assert report["prefill_tokens_per_second"] > 0
    assert report["decode_tokens_per_second"] > 0
    again = run(*words, DEEPINFER_HF_MODEL_DIR=str(tiny))
    assert f"running {tiny} (DEEPINFER_HF_MODEL_DIR)" in again.stderr
    assert "3 prompt + 5 new tokens, finished by length; prefill " in again.stderr
    assert "decode " in again.stderr
    assert "seed 3" in again.stderr


def test_the_default_is_tiny_and_says_that_its_text_is_noise(tmp_path: Path) -> None:
    result = run("--token-ids", "5", "--max-tokens", "2", DEEPINFER_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "no model was named (--model, DEEPINFER_HF_MODEL_DIR): running 'tiny'" in result.stderr
    assert "its text is noise" in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "InvalidRequest: prompt: give either a text or --token-ids"),
        (("text", "--token-ids", "1"), "InvalidRequest: prompt: give either a text or --token-ids"),
        (("--token-ids", "1,x"), "InvalidRequest: --token-ids: '1,x' is not a comma list of integers"),
        (("text", "--max-tokens", "0"), "InvalidRequest: max_tokens: 0 is not an integer in 1..2**31-1"),
        (("text", "--model", "./nowhere"), "CheckpointError: no model './nowhere'"),
        (("text", "--accelerator", "acme"), "AcceleratorUnavailable: accelerator 'acme' is not available"),
    ],
)
def test_errors_are_one_message_and_status_2(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr

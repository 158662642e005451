"""Kernels compile for GPUs that are not there, and what does not is reported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cubins.py"


@pytest.fixture(scope="module")
def cubins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cubins", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", [90, 100])
def test_a_kernel_compiles(cubins: ModuleType, architecture: int) -> None:
    line = cubins.compile_apart("rms_norm", architecture)
    assert cubins.problems([line]) == []
    assert {kernel["kernel"] for kernel in line["kernels"]} == {"_rms_norm"}
    assert all(0 < kernel["registers"] < 255 and kernel["stack_bytes"] < 64 for kernel in line["kernels"])
    assert f"| `_rms_norm` | sm_{architecture} | " in cubins.table([line])


def test_what_fails_is_reported(cubins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    line = cubins.compile_apart("no_such_operation", 90)
    assert line["error"].startswith("exit status 1: ")
    assert "KeyError: 'no_such_operation'" in line["error"]
    monkeypatch.setattr(cubins, "TIME_LIMIT", 0.1)
    assert cubins.problems([cubins.compile_apart("rms_norm", 90)]) == ["rms_norm on sm_90: not done after 0 s"]


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (["wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"], None),
        (["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "mma.sync.m16n8k32.f32.e4m3"], "wgmma and e4m3"),
    ],
)
def test_missing_matrix_instructions_are_a_failure(
    cubins: ModuleType, monkeypatch: pytest.MonkeyPatch, kinds: list[str], error: str | None
) -> None:
    monkeypatch.setattr(cubins, "WANTED", {"expert_ffn": {90: ("wgmma", "e4m3")}})
    answer = json.dumps([{"kernel": "_up", "matrix_instructions": kinds}])
    done = subprocess.CompletedProcess([sys.executable], 0, stdout=answer, stderr="")
    monkeypatch.setattr(cubins.subprocess, "run", lambda *args, **kwargs: done)
    line = cubins.compile_apart("expert_ffn", 90)
    assert line["error"] == (error and f"no matrix instruction with {error}")

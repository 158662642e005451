"""The communicator over torch_npu's real ProcessGroupHCCL, ranks as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parent / "hccl_worker.py"


def run(ranks: int, folder: Path, case: str, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Start the worker once a rank; returns what each did."""
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(ranks), str(folder), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for rank in range(ranks)
    ]
    finished = []
    for worker in workers:
        out, err = worker.communicate(timeout=240)
        finished.append(subprocess.CompletedProcess(worker.args, worker.returncode, out, err))
    return finished


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(ranks, tmp_path):
    for worker in run(ranks, tmp_path, "collectives", SIM_DEVICES=str(ranks)):
        assert worker.returncode == 0, worker.stderr[-3000:]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    total = sum(range(1, ranks + 1))
    for rank, result in enumerate(results):
        assert result["sum"].tolist() == [[total, 10.0 * total]] * 3
        assert result["gather"].tolist() == [[r + 0.5] * 4 for r in range(ranks)]
        # Rank r sends (r + p) % 3 rows, filled with 10 r + p, to rank p: some exchanges are empty.
        expected = [10 * peer + rank for peer in range(ranks) for _ in range((peer + rank) % 3)]
        assert result["exchange"][:, 0].tolist() == expected
        assert result["broadcast"].tolist() == [ranks - 1.0] * 5
        assert result["ring"].tolist() == [(rank - 1) % ranks] * 3
        assert "collectives are not captured" in result["capture"]


def test_a_rank_that_does_not_come_is_a_timeout(tmp_path):
    first, _ = run(2, tmp_path, "absent", SIM_DEVICES="2", HCCL_EXEC_TIMEOUT="2")
    assert "507048" in first.stdout + first.stderr

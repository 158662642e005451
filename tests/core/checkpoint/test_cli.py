from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfer.checkpoint import Checkpoint
from deepinfer.checkpoint.inspect import inspect_checkpoint, scan_payload
from deepinfer.cli.checkpoint import app
from deepinfer.errors import CheckpointError


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_make_then_inspect(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, output = run("make", "--preset", "tiny", "--seed", 3, "--shards", 2, folder)
    assert code == 0, output
    assert str(folder) in output
    assert len(list(folder.glob("*.safetensors"))) == 2
    code, output = run("inspect", folder, "--read")
    assert code == 0, output
    for part in (
        "candidate source",
        "routed experts",
        "8,512,610",
        "860 of 860 tensors in 2 file(s)",
        "GB/s",
        "bytes per page of 128 tokens",
    ):
        assert part in output
    code, output = run("make", folder)
    assert code == 2
    assert "not an empty folder" in output.replace("\n", " ")


def test_inspect_json(tiny_single: Path) -> None:
    code, output = run("inspect", tiny_single, "--json")
    assert code == 0
    report = json.loads(output)
    assert report["sizes"]["total"] == {"bytes": 8_512_610, "tensors": 860}
    assert report["coverage"] == {"shards": 1, "expected": 860, "found": 860, "problems": []}
    assert report["topology"]["boundary"] == 4
    assert [layer["kind"] for layer in report["topology"]["layers"]][:3] == ["window", "full", "reuse"]
    assert report["config"]["vocab_size"] == 512
    assert report["memory"]["per_device"][0]["devices"] == 1


def test_inspect_reports_damage(single: Path, tmp_path: Path) -> None:
    (single / "tokenizer.json").unlink()
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    code, output = run("inspect", single, "--json")
    assert code == 1
    problems = json.loads(output)["coverage"]["problems"]
    assert any("truncated" in problem for problem in problems)
    assert "tokenizer.json is missing: text prompts are not possible" in problems
    code, output = run("inspect", tmp_path / "absent")
    assert code == 2
    assert "is not a folder" in output.replace("\n", " ")


def test_needs_add_up(tiny_single: Path) -> None:
    report = inspect_checkpoint(tiny_single)
    sizes = {part: size for part, (size, _) in report.sizes.items()}
    one = report.needs[0]
    assert one.weights == report.total_bytes - sizes["engram tables"] - sizes["vision"]
    assert one.engram_table == sizes["engram tables"]
    two = report.needs[1]
    assert one.weights - two.weights == (sizes["routed experts"] + sizes["draft routed experts"]) // 2
    assert report.cache_bytes(2, 129) == 2 * (2 * report.page_bytes + report.slot_bytes)


def test_scan_finds_bad_scales(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    assert scan_payload(checkpoint, list(checkpoint.names), batch_bytes=1 << 20) == []
    name = "layers.3.ffn.experts.2.w1.scale"
    with (single / "model.safetensors").open("r+b") as file:
        file.seek(checkpoint.location(name).entry.start)
        file.write(b"\xff")
    problems = scan_payload(checkpoint, list(checkpoint.names), batch_bytes=1 << 20)
    assert problems == [f"{name}: 1 of 512 e8m0 scale bytes are 255 (NaN); the file is damaged"]
    with pytest.raises(CheckpointError, match="has no tensor"):
        scan_payload(checkpoint, ["nope"])

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deepinfer.checkpoint.header import parse_header, read_header


def shard(path: Path, header: Any, payload: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(0)}, file)
    header = read_header(file)
    assert header.problems == ()
    assert {name: (item.dtype, item.shape, item.nbytes) for name, item in header.entries.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (5,), 10),
        "c": ("F32", (0,), 0),
    }


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        (b"{", 0, "header is not JSON"),
        (b"\xff\xfe", 0, "header is not JSON"),
        (b"[" * 100_000, 0, "nested too deeply"),
        ([1], 0, "header is a list"),
        ({"a": 3}, 0, "a: entry must hold"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "a: entry must hold"),
        ({"a": entry("F4", [1], 0, 4)}, 4, "unknown dtype 'F4'"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, 4, "unknown dtype"),
        ({"a": entry("F32", [-1], 0, 4)}, 4, "bad shape"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "bad shape"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "bad shape"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "4 bytes for F32 \\[2\\], which needs 8"),
        ({"a": entry("F32", [2], 0, 8)}, 4, "a: ends at byte .* the file is truncated"),
        ({"a": entry("F32", [1], 4, 8)}, 8, "leaves a gap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "overlaps"),
        ({"a": entry("F32", [1], 0, 4)}, 6, "2 bytes after the last tensor"),
        (
            b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
            1,
            "'a' appears twice",
        ),
    ],
)
def test_each_damage_is_named(tmp_path: Path, header: Any, payload: int, message: str) -> None:
    result = read_header(shard(tmp_path / "x.safetensors", header, bytes(payload)))
    assert len(result.problems) == 1
    assert result.problems[0].startswith("x.safetensors: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(result.problems[0])


@pytest.mark.parametrize(
    "content", [b"", b"1234567", (2**62).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"{}"]
)
def test_short_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    assert "truncated or not a safetensors file" in read_header(file).problems[0]


def test_unreadable_file(tmp_path: Path) -> None:
    assert "cannot be read" in read_header(tmp_path / "absent.safetensors").problems[0]


GOOD = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [4], 24, 32),
        "c": entry("F8_E4M3", [32], 32, 64),
    }
).encode()


@given(st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_headers_never_escape(data: st.DataObject) -> None:
    text = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(text) - 1))
        action = data.draw(st.sampled_from(["flip", "delete", "insert", "digit"]))
        if action == "flip":
            text[position] = data.draw(st.integers(0, 255))
        elif action == "digit":
            text[position] = data.draw(st.sampled_from(b'0123456789-.e[]{},"'))
        elif action == "delete":
            del text[position]
        else:
            text.insert(position, data.draw(st.integers(0, 255)))
    entries, problems = parse_header(bytes(text), 64, 8)
    for item in entries.values():
        assert 8 <= item.start <= item.end <= 72
    if not problems:
        assert sum(item.nbytes for item in entries.values()) == 64


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_escape(text: bytes) -> None:
    _, problems = parse_header(text, 0, 8)
    assert problems or json.loads(text) is not None

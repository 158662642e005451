"""Safetensors headers, read and checked against the file before any payload is touched."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.json_files import parse_unique

__all__ = ["DTYPE_BYTES", "ShardHeader", "TensorEntry", "parse_header", "read_header"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes per element of the dtype strings that a header may hold."""

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte positions in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class ShardHeader:
    """One shard file; `problems` says what is wrong with it (then `entries` holds what could still be read)."""

    path: Path
    entries: Mapping[str, TensorEntry]
    problems: tuple[str, ...] = ()


def read_header(path: Path) -> ShardHeader:
    """Read the header of `path`. Never raises for what the file holds: see `ShardHeader.problems`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
                return ShardHeader(
                    path,
                    {},
                    (
                        f"{path.name}: truncated or not a safetensors file ({size} bytes; its header claims "
                        f"{length} bytes)",
                    ),
                )
            text = file.read(length)
    except OSError as error:
        return ShardHeader(path, {}, (f"{path.name}: cannot be read: {error.strerror or error}",))
    entries, problems = parse_header(text, size - 8 - length, 8 + length)
    return ShardHeader(path, entries, tuple(f"{path.name}: {problem}" for problem in problems))


def parse_header(text: bytes, payload: int, base: int) -> tuple[dict[str, TensorEntry], list[str]]:
    """Parse header bytes against a payload of `payload` bytes that begins at file position `base`.

    Returns:
        The entries that are usable, and the problems: bad JSON, duplicate names, wrong sizes, gaps, overlaps,
        positions beyond the file. An entry with a problem is not among the usable ones.
    """
    try:
        raw, duplicates = parse_unique(text)
    except ValueError as error:
        return {}, [f"header is not JSON: {error}"]
    if not isinstance(raw, dict):
        return {}, [f"header is a {type(raw).__name__}; expected an object"]
    problems = [f"{name!r} appears twice in the header" for name in duplicates]
    entries: dict[str, TensorEntry] = {}
    for name, value in raw.items():
        if name == "__metadata__":
            continue
        entry = _entry(name, value, base)
        if isinstance(entry, str):
            problems.append(entry)
        elif entry.end > base + payload:
            problems.append(
                f"{name}: ends at byte {entry.end} but the file has {base + payload}: the file is truncated"
            )
        else:
            entries[name] = entry
    if not problems:
        problems = _layout_problems(entries, payload, base)
    return entries, problems


def _entry(name: str, value: Any, base: int) -> TensorEntry | str:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return f"{name}: entry must hold dtype, shape and data_offsets"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"{name}: unknown dtype {dtype!r}"
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{name}: bad shape {shape!r} or data_offsets {offsets!r}"
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != needed:
        return f"{name}: {offsets[1] - offsets[0]} bytes for {dtype} {list(shape)}, which needs {needed}"
    return TensorEntry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value)
    )


def _layout_problems(entries: Mapping[str, TensorEntry], payload: int, base: int) -> list[str]:
    """Payload bytes must belong to exactly one tensor each."""
    problems = []
    position = base
    for entry in sorted(entries.values(), key=lambda item: (item.start, item.end)):
        if entry.start != position:
            kind = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            problems.append(f"{entry.name}: begins at byte {entry.start}, expected {position}: it {kind}")
        position = max(position, entry.end)
    if position != base + payload:
        problems.append(f"{base + payload - position} bytes after the last tensor belong to no tensor")
    return problems

"""Which file of a checkpoint folder holds which tensor: a single file or shards with an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepinfer.checkpoint.header import ShardHeader, TensorEntry, read_header
from deepinfer.errors import CheckpointError
from deepinfer.json_files import read_json_object

__all__ = ["CheckpointIndex", "Location", "read_index"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PREFIX = "model."


@dataclass(frozen=True)
class Location:
    """One tensor's shard and place in it; `name` is without the optional `model.` prefix."""

    name: str
    path: Path
    entry: TensorEntry


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a folder by name. `problems` is empty for a folder whose files agree with each other."""

    folder: Path
    tensors: Mapping[str, Location]
    shards: tuple[Path, ...]
    problems: tuple[str, ...]


def read_index(folder: Path) -> CheckpointIndex:
    """Read the index and all headers of `folder`; payloads are not touched.

    Raises:
        CheckpointError: there is no safetensors checkpoint at all. Anything wrong inside one is in `.problems`.
    """
    index_file, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index_file.exists():
        weight_map, problems = _weight_map(index_file)
    elif single.exists():
        weight_map, problems = None, []
    else:
        raise CheckpointError(_nothing_found(folder))
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
    present = [name for name in names if (folder / name).is_file()]
    problems += [f"{name}: named by {INDEX_FILE} but missing" for name in names if name not in present]
    with ThreadPoolExecutor(8) as pool:
        headers = list(pool.map(read_header, (folder / name for name in present)))
    for header in headers:
        problems += header.problems
    tensors = _collect(headers, weight_map, problems)
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    problems += [f"{name}: stale file outside the index; remove it" for name in stray]
    return CheckpointIndex(folder, tensors, tuple(folder / name for name in present), tuple(problems))


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a checkpoint folder"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds {', '.join(pickles[:3])}, which can run code when loaded and is refused; "
            "convert the weights to safetensors"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"


def _weight_map(path: Path) -> tuple[dict[str, str], list[str]]:
    raw, duplicates = read_json_object(path)
    problems = [f"{path.name}: {name!r} appears twice" for name in duplicates]
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map object")
    result = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            problems.append(f"{path.name}: {name} points at {file!r}; expected a file name in the same folder")
        elif not file.endswith(".safetensors"):
            problems.append(f"{path.name}: {name} points at {file!r}, which is not a .safetensors file; refused")
        else:
            result[name] = file
    return result, problems


def _collect(headers: list[ShardHeader], weight_map: dict[str, str] | None, problems: list[str]) -> dict[str, Location]:
    """Join the index with the headers; both must name the same tensors in the same files."""
    tensors: dict[str, Location] = {}
    promised: dict[str, list[str]] = defaultdict(list)
    for name, file in (weight_map or {}).items():
        promised[file].append(name)
    for header in headers:
        file = header.path.name
        for raw_name, entry in header.entries.items():
            if weight_map is not None and weight_map.get(raw_name) != file:
                where = f"the index puts it in {weight_map[raw_name]}" if raw_name in weight_map else "not in the index"
                problems.append(f"{file}: stale tensor {raw_name}: {where}")
                continue
            name = raw_name.removeprefix(_PREFIX)
            if name in tensors:
                problems.append(f"{name}: present with and without the prefix {_PREFIX!r}; keep one")
                continue
            tensors[name] = Location(name, header.path, entry)
        if not header.problems:
            absent = [name for name in promised[file] if name not in header.entries]
            problems += [f"{file}: the index promises {name} but the file lacks it" for name in absent]
    return tensors

"""A checkpoint folder: config, index, validation, reads and memory maps."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from deepinfer.checkpoint.index import CheckpointIndex, Location, read_index
from deepinfer.checkpoint.reader import TORCH_DTYPES, ReadStats, read_tensors, typed
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.json_files import read_json_object

__all__ = ["Checkpoint", "ExpectedTensor"]

_DEFAULT_THREADS = min(16, 4 * (os.cpu_count() or 1))


class ExpectedTensor(Protocol):
    """What a model says about a tensor that it needs."""

    @property
    def dtype(self) -> str:
        """Safetensors dtype string."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored shape."""
        ...

    @property
    def module(self) -> str:
        """Part of the model that owns it."""
        ...


class Checkpoint:
    """An opened checkpoint. Opening reads the config and all headers, never a payload, and runs no code.

    Attributes:
        path: the folder.
        config: the parsed `config.json`.
        index: where each tensor lies.
        stats: bytes, seconds and GB/s of all reads so far.
    """

    def __init__(self, path: Path, config: dict[str, Any], index: CheckpointIndex, threads: int) -> None:
        self.path = path
        self.config = config
        self.index = index
        self.stats = ReadStats()
        self._threads = threads

    @classmethod
    def open(cls, path: str | Path, *, threads: int = _DEFAULT_THREADS) -> Checkpoint:
        """Open the folder at `path`.

        Raises:
            CheckpointError: no such folder, no readable config.json, no safetensors files. Damage inside the files
                is reported by `validate`, all at once.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give a local checkpoint folder")
        config, duplicates = read_json_object(folder / "config.json")
        if duplicates:
            raise ConfigError("appears twice in config.json; keep one", field=duplicates[0])
        return cls(folder, config, read_index(folder), threads)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all usable tensors, without the optional `model.` prefix."""
        return tuple(self.index.tensors)

    def location(self, name: str) -> Location:
        """Where `name` lies; CheckpointError if there is no such tensor."""
        try:
            return self.index.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None

    def validate(self, expected: Mapping[str, ExpectedTensor]) -> None:
        """Compare files, index and headers with what the model needs, before any payload is read.

        Raises:
            CheckpointError: `.problems` lists every damaged or missing file, and every missing, unknown, wrong-shape
                or wrong-dtype tensor with its owning module.
        """
        problems = list(self.index.problems) + expectation_problems(self.index.tensors, expected)
        if problems:
            raise CheckpointError(
                f"{self.path} is not a usable checkpoint ({len(problems)} problems); nothing was loaded",
                problems=tuple(problems),
            )

    def read(
        self,
        names: Iterable[str],
        *,
        progress: Callable[[int], None] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read raw tensors: planned, coalesced, in parallel, with one copy.

        F8_E4M3 comes as float8_e4m3fn, F8_E8M0 and I8 as uint8, BF16 and F32 as such.

        Args:
            names: which tensors.
            progress: gets the bytes of each finished request; never called from two threads at once.
            into: contiguous CPU buffers (pinned, say) of exactly the right bytes, by name; the results are views of
                them.

        Raises:
            CheckpointError: no such tensor, or a file cannot be read or ended early.
            ValueError: a buffer of `into` does not fit its tensor.
        """
        locations = [self.location(name) for name in dict.fromkeys(names)]
        return read_tensors(locations, threads=self._threads, stats=self.stats, progress=progress, into=into)

    def mmap(self, name: str) -> torch.Tensor:
        """A read-only view of the file's bytes without a copy; pages are read when touched. Writing to it crashes.

        Raises:
            CheckpointError: no such tensor, or it lies at an address at which its dtype cannot be viewed.
        """
        location = self.location(name)
        entry = location.entry
        if entry.nbytes == 0:
            return typed(torch.empty(0, dtype=torch.uint8), location)
        if entry.start % TORCH_DTYPES[entry.dtype].itemsize:
            raise CheckpointError(
                f"{name}: begins at byte {entry.start} of {location.path.name}, which is not aligned for "
                f"{entry.dtype}; read() it instead of mapping it"
            )
        return typed(_map_bytes(location.path, entry.start, entry.nbytes), location)


def _map_bytes(path: Path, start: int, nbytes: int) -> torch.Tensor:
    """Shared read-only mapping as uint8; rows are gathered at random, so the kernel is told not to read ahead."""
    skip = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), skip + nbytes, access=mmap.ACCESS_READ, offset=start - skip)
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so on every call
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=skip)


def expectation_problems(found: Mapping[str, Location], expected: Mapping[str, ExpectedTensor]) -> list[str]:
    """What is missing, unknown, or of another shape or dtype than expected."""
    problems = []
    for name, spec in expected.items():
        location = found.get(name)
        if location is None:
            problems.append(f"missing tensor {name} (module {spec.module})")
            continue
        entry = location.entry
        if entry.shape != tuple(spec.shape):
            problems.append(
                f"{location.path.name}: {name} has shape {list(entry.shape)}, expected {list(spec.shape)} "
                f"(module {spec.module})"
            )
        if entry.dtype != spec.dtype:
            problems.append(
                f"{location.path.name}: {name} has dtype {entry.dtype}, expected {spec.dtype} (module {spec.module})"
            )
    modules = {spec.module for spec in expected.values()}
    for name, location in found.items():
        if name not in expected:
            problems.append(f"{location.path.name}: unknown tensor {name} ({_owner(name, modules)})")
    return problems


def _owner(name: str, modules: set[str]) -> str:
    parts = name.split(".")
    if parts[-1] == "weight" and parts[-2:-1] and parts[-2].startswith("hc_") and parts[-2].endswith("_norm"):
        return "the hyper-connection norm is folded into hc_*_fn; a separate one means another model version"
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in modules:
            return f"module {prefix}"
    return "no module of this model"

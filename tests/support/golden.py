"""Golden sets found on this machine, their models and tolerances (see the README beside the data)."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.backend.numerics import Numerics
from deepinfer.cpu.backend import create_backend
from deepinfer.models.deepseek_v41.spec import DeepseekV41, load

__all__ = [
    "ENVIRONMENT",
    "GoldenSet",
    "Prompt",
    "golden_required",
    "golden_root",
    "golden_sets",
    "load_model",
    "missing_golden",
    "missing_message",
    "ops_file",
]

ENVIRONMENT = "DEEPINFER_TEST_GOLDEN"
PAGE_SIZE = 16


def golden_root() -> Path:
    """Folder of the golden data: the variable, else `shared/golden` beside the repository."""
    given = os.environ.get(ENVIRONMENT)
    return Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "golden"


def golden_required() -> bool:
    """Whether tests must fail where there is no golden data: in CI."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def missing_message() -> str:
    """What to do about missing golden data."""
    return f"no golden data in {golden_root()}; set {ENVIRONMENT}"


def missing_golden() -> None:
    """End a test that has no golden data: a skip on a developer's machine, a failure in CI."""
    (pytest.fail if golden_required() else pytest.skip)(missing_message())


def golden_sets() -> list[GoldenSet]:
    """Every set under the root.

    Raises:
        RuntimeError: the variable names a folder without any set.
    """
    found = sorted(path for path in golden_root().glob("v41-tiny-*") if (path / "reference.npz").is_file())
    if not found and os.environ.get(ENVIRONMENT):
        raise RuntimeError(f"{ENVIRONMENT}={golden_root()} holds no folder v41-tiny-*")
    return [_golden_set(path) for path in found]


def ops_file() -> Path:
    """The op-level vectors."""
    return golden_root() / "ops.npz"


@functools.cache
def _golden_set(path: Path) -> GoldenSet:
    return GoldenSet(path)


@functools.cache
def load_model(
    path: Path,
    dtype: torch.dtype,
    activation_quant: bool,
    cache_quant: bool,
    batch_invariant: bool = False,
    page_size: int = PAGE_SIZE,
) -> DeepseekV41:
    """A model on the CPU backend; one per combination and process."""
    numerics = Numerics(dtype, activation_quant, cache_quant, batch_invariant)
    return load(path, create_backend(), numerics, page_size=page_size, fallback="allow")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A recorded prompt: key, token ids, recorded positions, draft steps and measured distances by mode."""

    golden: GoldenSet
    key: str
    length: int
    positions: tuple[int, ...]
    draft_steps: tuple[int, ...]
    measured: dict[str, dict[str, float]]

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self["input_ids"]]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.golden.arrays[f"{self.key}.{name}"]

    def __contains__(self, name: str) -> bool:
        return f"{self.key}.{name}" in self.golden.arrays

    def names(self, prefix: str) -> list[str]:
        """Names of this prompt's arrays that start with a prefix, without the prompt's key."""
        start = f"{self.key}."
        return [name.removeprefix(start) for name in self.golden.arrays if name.startswith(start + prefix)]

    def tolerance(self, mode: str) -> float:
        """Allowed distance of float32 logits: 5e-4 with the quantisers off, else by what was measured."""
        if mode == "off":
            return 5e-4
        if self.key in ("p0", "p1", "p2", "p3", "p4", "p5"):
            return 1e-3
        measured = self.measured["on"]
        distances = [measured[name] for name in ("hf32", "f64", "greedy_hf32", "greedy_f64", "draft")]
        return max(1e-3, 10 * max(distances))


class GoldenSet:
    """One `v41-tiny-*` folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        with np.load(path / "reference.npz") as archive:
            self.arrays: dict[str, np.ndarray] = {name: archive[name] for name in archive.files}
        self.prompts = tuple(self._prompts())

    def _prompts(self) -> Iterator[Prompt]:
        for entry in self.manifest["prompts"]:
            yield Prompt(
                self,
                entry["key"],
                entry["length"],
                tuple(entry["positions"]),
                tuple(entry["draft_steps"]),
                entry["measured"],
            )

    def model(self, dtype: torch.dtype, mode: str, *, batch_invariant: bool = False) -> DeepseekV41:
        """The set's model in golden numerics: no rounding of activations, caches quantised only in mode `on`."""
        return load_model(self.path, dtype, False, mode == "on", batch_invariant)

    def __repr__(self) -> str:
        return self.name

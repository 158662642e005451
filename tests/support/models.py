"""Small models for property tests, one per numerics and process."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from support.golden import golden_sets, load_model, missing_golden

__all__ = ["FEW", "GOLDEN_SLOW", "MANY", "MODELS", "property_model", "random_tokens", "tiny_checkpoint"]

PAGE_SIZE = 8
"""Small, so that every sequence spans several pages."""

MODELS = ["tiny-release", "tiny-float32", "golden-release"]
GOLDEN_SLOW = [*MODELS[:2], pytest.param(MODELS[2], marks=pytest.mark.slow)]

FEW = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=40, derandomize=False)
"""Budgets of property tests: the default run repeats the same few examples, the slow one draws new ones."""


@functools.cache
def tiny_checkpoint() -> Path:
    """The synthetic tiny checkpoint, made once per process."""
    folder = tempfile.TemporaryDirectory(prefix="deepinfer-test-")
    atexit.register(folder.cleanup)
    return make_checkpoint(Path(folder.name) / "tiny", "tiny")


def property_model(name: str) -> DeepseekV41:
    """`<tiny|golden>-<release|float32>`, row-invariant; skips where no golden data are at hand."""
    source, numerics = name.split("-")
    if source == "golden" and not golden_sets():
        missing_golden()
    path = tiny_checkpoint() if source == "tiny" else golden_sets()[0].path
    release = numerics == "release"
    return load_model(path, torch.bfloat16 if release else torch.float32, release, release, True, PAGE_SIZE)


def random_tokens(model: DeepseekV41, length: int, seed: int) -> list[int]:
    """Token ids, special ones and the drafter's filler included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()

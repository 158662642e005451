"""Checks of weight handles against the files that they came from."""

from __future__ import annotations

from pathlib import Path

import torch

from deepinfer.backend.backend import Backend, Shard
from deepinfer.backend.numerics import Numerics
from deepinfer.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.weights import weight_groups

__all__ = ["check_unpack"]


def check_unpack(backend: Backend, path: Path, dtype: torch.dtype) -> None:
    """Load every group of a checkpoint and compare what `unpack` gives with the file, byte for byte."""
    checkpoint = Checkpoint.open(path)
    groups = weight_groups(parse_config(checkpoint.config))
    for placement in backend.plan_weights(list(groups.values()), Shard(), Numerics(dtype)):
        names = [part.name for part in placement.group.parts]
        raw = checkpoint.read(names)
        back = backend.unpack(placement, backend.load(placement, raw))
        assert set(back) == set(names)
        for name in names:
            assert back[name].dtype is raw[name].dtype, name
            assert torch.equal(back[name].view(torch.uint8), raw[name].view(torch.uint8)), name

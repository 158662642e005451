"""The CPU backend gives a checkpoint's bytes back from its own forms."""

from __future__ import annotations

import pytest
import torch
from support.models import tiny_checkpoint
from support.weights import check_unpack

from deepinfer.cpu.backend import create_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_group_of_the_tiny_checkpoint(dtype: torch.dtype) -> None:
    check_unpack(create_backend(), tiny_checkpoint(), dtype)

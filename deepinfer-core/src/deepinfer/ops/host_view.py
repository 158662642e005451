"""What a reference may look at: values that decide how much is computed, where looking does not wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_on_host", "rows_where"]


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads this tensor without waiting, and outside of any captured graph."""
    return tensor.device.type == "cpu"


def rows_where(mask: Tensor) -> Tensor:
    """Rows to work on: int64 indices of those in a mask [S]; of all rows where the mask lies on a device.

    What the caller does must leave rows outside the mask as they are.
    """
    if is_on_host(mask):
        return mask.nonzero()[:, 0]
    return torch.arange(mask.shape[0], device=mask.device)

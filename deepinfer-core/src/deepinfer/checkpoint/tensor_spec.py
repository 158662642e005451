"""What a model says about one tensor of its checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer.checkpoint.header import DTYPE_BYTES

__all__ = ["TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as stored; `module` is the part of the model that owns it, as errors and size tables print it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    module: str

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

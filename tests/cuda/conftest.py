"""Kernels of these tests run in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

"""Stored weight formats: exact values of checkpoint bytes and inverse packers, for `load` and `unpack` of a backend."""

from deepinfer.checkpoint.formats import (
    dequantise_fp4,
    dequantise_fp8,
    dequantise_rows,
    pack_fp4,
    scale_values,
    unpack_fp4,
)

__all__ = ["dequantise_fp4", "dequantise_fp8", "dequantise_rows", "pack_fp4", "scale_values", "unpack_fp4"]

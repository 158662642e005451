"""Random tensors of a synthetic checkpoint, each from its own stream (recipe of spec/model appendix D)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.checkpoint.formats import quantise_fp4, quantise_fp8, quantise_rows
from deepinfer.checkpoint.tensor_spec import TensorSpec

__all__ = ["make_tensors", "stem"]

_CHUNK = 1 << 18  # elements; what fits a core's cache through all steps of the quantisers
_TILE = 32


def make_tensors(specs: Sequence[TensorSpec], seed: int) -> list[torch.Tensor]:
    """The stored bytes of `specs`, which share a stem: one plain tensor, or a quantised weight, its scale, or both.

    The values depend on `seed` and the name alone: a weight and its scale come from one stream, whichever is asked.
    """
    first = specs[0]
    if first.dtype == "F32":
        return [_plain(first, seed)]
    if first.dtype == "BF16":
        return [_plain(first, seed).to(torch.bfloat16)]
    name = stem(first)
    table, expert = name.endswith("engram.embed"), ".experts." in name
    rows, columns = first.shape
    if first.name.endswith(".scale"):
        # config rules make every quantised width a multiple of the tile, so the weight's shape follows
        columns *= _TILE
        rows *= 1 if table or expert else _TILE
    elif expert:
        columns *= 2
    quantise = quantise_rows if table else quantise_fp4 if expert else quantise_fp8
    codes, scales = _quantised(_stream(name, seed), rows, columns, 1.0 if table else columns**-0.5, quantise)
    return [scales if spec.name.endswith(".scale") else codes for spec in specs]


def stem(spec: TensorSpec) -> str:
    """What a quantised weight and its scale share; the name itself for a plain tensor."""
    if spec.dtype in ("BF16", "F32"):
        return spec.name
    return spec.name.removesuffix(".scale").removesuffix(".weight")


def _stream(name: str, seed: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def _plain(spec: TensorSpec, seed: int) -> torch.Tensor:
    values = torch.from_numpy(_stream(spec.name, seed).standard_normal(spec.shape, dtype=np.float32))
    mean, deviation = _moments(spec)
    return values.mul_(deviation).add_(mean)


def _moments(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of an unquantised tensor."""
    name = spec.name
    last = name.rsplit(".", 1)[-1]
    if last.endswith(("_fn", "attn_sink")):
        return 0.0, 1.0 if last == "attn_sink" else spec.shape[-1] ** -0.5
    if last.endswith("_base"):
        return 0.0, 0.5
    if last.endswith("_scale"):
        return 1.0, 0.1
    if last in ("bias", "bias_vl"):
        return 0.0, 0.1
    if name.endswith("embed.weight") or name.startswith("image_"):
        return 0.0, 1.0
    if len(spec.shape) == 1 or last in ("q_weight", "k_weight"):
        return 1.0, 0.1
    gain = 2.0 if name.endswith("wgate.weight") else 1.0
    return 0.0, gain / math.sqrt(spec.shape[-1])


def _quantised(
    stream: np.random.Generator,
    rows: int,
    columns: int,
    deviation: float,
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a normal matrix, made in runs of whole tiles."""
    step = max(1, _CHUNK // columns // _TILE) * _TILE
    pieces = []
    for start in range(0, rows, step):
        shape = (min(step, rows - start), columns)
        values = torch.from_numpy(stream.standard_normal(shape, dtype=np.float32)).mul_(deviation)
        pieces.append(quantise(values))
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])

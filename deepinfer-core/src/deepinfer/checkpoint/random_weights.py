"""Random tensors of a synthetic checkpoint, each from its own stream (recipe of spec/model appendix D)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch

from deepinfer.checkpoint.formats import quantise_fp4, quantise_fp8, quantise_rows
from deepinfer.models.deepseek_v41.tensors import TensorSpec

__all__ = ["make_tensor"]

_CHUNK = 1 << 18  # elements; what fits a core's cache through all steps of the quantisers
_TILE = 32


def make_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The stored bytes of `spec`: depends on `seed` and the tensor's name alone.

    A weight and its scale come from one stream, whichever is asked for.
    """
    stem = spec.name.removesuffix(".scale").removesuffix(".weight")
    if spec.dtype == "BF16":
        return _plain(spec, seed).to(torch.bfloat16)
    if spec.dtype == "F32":
        return _plain(spec, seed)
    table = stem.endswith("engram.embed")
    expert = ".experts." in stem
    is_scale = spec.name.endswith(".scale")
    rows, columns = spec.shape
    if is_scale:
        # config rules make every quantised width a multiple of the tile, so the weight's shape follows
        columns *= _TILE
        rows *= 1 if table or expert else _TILE
    elif expert:
        columns *= 2
    quantise = quantise_rows if table else quantise_fp4 if expert else quantise_fp8
    deviation = 1.0 if table else columns**-0.5
    return _quantised(stem, seed, rows, columns, deviation, quantise, int(is_scale))


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
    stem: str,
    seed: int,
    rows: int,
    columns: int,
    deviation: float,
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    part: int,
) -> torch.Tensor:
    """Part 0 (codes) or 1 (scales) of a quantised matrix, made in runs of whole tiles."""
    stream = _stream(stem, seed)
    step = max(1, _CHUNK // columns // _TILE) * _TILE
    pieces = []
    for start in range(0, rows, step):
        shape = (min(step, rows - start), columns)
        values = torch.from_numpy(stream.standard_normal(shape, dtype=np.float32)).mul_(deviation)
        pieces.append(quantise(values)[part])
    return torch.cat(pieces)

"""Which form each weight group has on the device, and its bytes again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.api.backend import Numerics, Placement, Shard, WeightGroup
from deepinfer.api.errors import CapabilityError
from deepinfer.api.ops import DenseWeight, EngramTable
from deepinfer_cuda.expert_words import TILE_INPUTS, TILE_OUTPUTS, ExpertWords, pack_words
from deepinfer_cuda.handles import GROUP, ExpertMatrices, Fp4Experts, Fp8Weight
from deepinfer_cuda.kernels.codes import INTERPRETED

__all__ = ["Handle", "load", "plan_weights", "unpack"]

Handle = DenseWeight | Fp8Weight | Fp4Experts | EngramTable

EXPERT_WORDS = "fp4_expert_words"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plan_weights(groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
    """Placement of every group; the layout names its form and the compute dtype.

    Raises:
        CapabilityError: more than one shard was asked for.
    """
    if shard.size != 1:
        raise CapabilityError(f"the NVIDIA backend holds whole weights so far; got shard {shard.rank} of {shard.size}")
    return [_plan(group, numerics) for group in groups]


def _plan(group: WeightGroup, numerics: Numerics) -> Placement:
    nbytes = sum(math.prod(part.shape) * _width(part.dtype) for part in group.parts)
    dtype = numerics.compute_dtype
    form: str = group.kind
    if group.kind == "fp8_block32":
        codes = [part for part in group.parts if part.dtype != "F8_E8M0"]
        nbytes = sum(math.prod(part.shape) + part.shape[0] * -(-part.shape[1] // GROUP) for part in codes)
    elif group.kind == "bf16":
        nbytes = sum(math.prod(part.shape) for part in group.parts) * dtype.itemsize
    elif group.kind == "fp4_experts" and _fits_words(group, numerics):
        form = EXPERT_WORDS
    return Placement(group, nbytes, layout=f"{form}:{str(dtype).removeprefix('torch.')}")


def _fits_words(group: WeightGroup, numerics: Numerics) -> bool:
    """Whether experts go to FP8 matrix units: quantised activations, whole tiles, and not in the interpreter."""
    width, half = group.parts[0].shape
    whole = width % TILE_OUTPUTS == 0 and half * 2 % TILE_INPUTS == 0
    return whole and numerics.compute_dtype is torch.bfloat16 and numerics.activation_quant and not INTERPRETED


def _width(dtype: str) -> int:
    return {"F32": 4, "BF16": 2}.get(dtype, 1)


def load(placement: Placement, raw: Mapping[str, Tensor], device: torch.device) -> Handle:
    """Bring one group to the device; see `Backend.load`."""
    form, _, name = placement.layout.partition(":")
    dtype = DTYPES[name]
    names = [part.name for part in placement.group.parts]
    here = {name: raw[name].to(device) for name in names}
    if form == "fp8_rows":
        return EngramTable(here[names[0]], here[names[1]])
    if form == "fp8_block32":
        return _load_fp8(
            [(here[code], here[scale]) for code, scale in zip(names[0::2], names[1::2], strict=True)], dtype
        )
    if form == EXPERT_WORDS:
        return _load_words([here[name] for name in names], dtype)
    if form == "fp4_experts":
        return _load_experts([here[name] for name in names], dtype)
    kept = torch.float32 if form == "float32" else dtype
    return DenseWeight(torch.cat([here[name].to(kept) for name in names]))


def _load_fp8(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Fp8Weight:
    codes = torch.cat([code.view(torch.uint8) for code, _ in parts]).view(torch.float8_e4m3fn)
    scales = torch.cat([scale.repeat_interleave(GROUP, 0)[: code.shape[0]] for code, scale in parts])
    return Fp8Weight(codes, scales, tuple(code.shape[0] for code, _ in parts), dtype)


def _load_experts(parts: list[Tensor], dtype: torch.dtype) -> Fp4Experts:
    """Experts from (w1, scale, w3, scale, w2, scale) of each."""
    experts, (width, half) = len(parts) // 6, parts[0].shape
    rows, inner = parts[4].shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(experts, *shape, dtype=torch.uint8, device=parts[0].device)

    gate_up = ExpertMatrices(empty(2 * width, half), empty(2 * width, parts[1].shape[1]), dtype)
    down = ExpertMatrices(empty(rows, inner), empty(rows, parts[5].shape[1]), dtype)
    for expert in range(experts):
        w1, s1, w3, s3, w2, s2 = parts[6 * expert : 6 * expert + 6]
        gate_up.codes[expert, :width], gate_up.scales[expert, :width] = w1, s1
        gate_up.codes[expert, width:], gate_up.scales[expert, width:] = w3, s3
        down.codes[expert], down.scales[expert] = w2, s2
    return Fp4Experts(gate_up, down)


def _load_words(parts: list[Tensor], dtype: torch.dtype) -> Fp4Experts:
    """The same, packed for FP8 matrix units one expert at a time."""
    experts, (width, half), rows = len(parts) // 6, parts[0].shape, parts[4].shape[0]

    def empty(outputs: int, inputs: int) -> ExpertWords:
        words, scales = (
            torch.empty(experts, outputs * inputs // codes, dtype=torch.int32, device=parts[0].device)
            for codes in (8, TILE_INPUTS)
        )
        return ExpertWords(words, scales, (experts, outputs, inputs), dtype)

    gate_up, down = empty(2 * width, 2 * half), empty(rows, width)
    for expert in range(experts):
        w1, s1, w3, s3, w2, s2 = parts[6 * expert : 6 * expert + 6]
        gate_up.words[expert], gate_up.scales[expert] = pack_words(torch.cat((w1, w3)), torch.cat((s1, s3)))
        down.words[expert], down.scales[expert] = pack_words(w2, s2)
    return Fp4Experts(gate_up, down)


def unpack(placement: Placement, handle: Handle) -> dict[str, Tensor]:
    """The checkpoint's tensors again, byte for byte, on the host."""
    parts = placement.group.parts
    if isinstance(handle, EngramTable):
        return {parts[0].name: handle.codes.cpu(), parts[1].name: handle.scales.cpu()}
    if isinstance(handle, Fp4Experts):
        return _unpack_experts([part.name for part in parts], handle)
    if isinstance(handle, Fp8Weight):
        out = {}
        for index, (codes, scales) in enumerate(
            zip(handle.codes.split(handle.part_rows), handle.scales.split(handle.part_rows), strict=True)
        ):
            out[parts[2 * index].name] = codes.cpu()
            out[parts[2 * index + 1].name] = scales[::GROUP].cpu().contiguous()
        return out
    rows = handle.values.split([part.shape[0] for part in parts])
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {part.name: value.to(kinds[part.dtype]).cpu() for part, value in zip(parts, rows, strict=True)}


def _unpack_experts(names: list[str], experts: Fp4Experts) -> dict[str, Tensor]:
    out = {}
    for expert in range(experts.down.shape[0]):
        pieces: list[Tensor] = []
        for matrices, count in ((experts.gate_up, 2), (experts.down, 1)):
            codes, scales = matrices.stored(expert)
            pieces += [part for pair in zip(codes.chunk(count), scales.chunk(count), strict=True) for part in pair]
        for name, piece in zip(names[6 * expert : 6 * expert + 6], pieces, strict=True):
            out[name] = piece.cpu()
    return out

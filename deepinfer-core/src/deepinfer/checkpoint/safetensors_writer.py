"""Writing safetensors files tensor by tensor, so that a shard never has to be in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from deepinfer.checkpoint.header import DTYPE_BYTES
from deepinfer.checkpoint.index import INDEX_FILE, SINGLE_FILE
from deepinfer.checkpoint.tensor_spec import TensorSpec

__all__ = ["file_order", "shard_names", "split_shards", "write_index", "write_shard"]

_ALIGNMENT = 8  # bytes; the header is padded so that payloads begin aligned


def split_shards(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Cut `specs` into at most `count` runs of about equal bytes; an Engram weight and its scale stay together."""
    total = sum(spec.nbytes for spec in specs)
    shards: list[list[TensorSpec]] = [[]]
    done = 0
    for spec in specs:
        joined = spec.name.endswith(".engram.embed.scale")
        if shards[-1] and not joined and len(shards) < count and done >= total * len(shards) / count:
            shards.append([])
        shards[-1].append(spec)
        done += spec.nbytes
    return shards


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Wide dtypes first, so that every tensor is aligned without gaps."""
    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def shard_names(count: int) -> list[str]:
    """File names of `count` shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def write_shard(
    path: Path,
    specs: Sequence[TensorSpec],
    payload: Iterable[tuple[str, torch.Tensor]],
    progress: Callable[[int], None],
) -> None:
    """Write the tensors of `specs` (in that order) to `path`; `payload` yields each name with its tensor, in order.

    Raises:
        ValueError: `payload` yields other tensors than `specs` say.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec, (name, tensor) in zip(specs, payload, strict=True):
            if name != spec.name or tuple(tensor.shape) != spec.shape or tensor.nbytes != spec.nbytes:
                raise ValueError(f"{name} {list(tensor.shape)} was made where {spec.name} {list(spec.shape)} is due")
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            progress(spec.nbytes)


def write_index(folder: Path, shards: Sequence[Sequence[TensorSpec]], names: Sequence[str]) -> None:
    """Write the index of a sharded checkpoint."""
    weight_map = {spec.name: name for specs, name in zip(shards, names, strict=True) for spec in specs}
    total = sum(spec.nbytes for specs in shards for spec in specs)
    (folder / INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1), encoding="utf-8"
    )

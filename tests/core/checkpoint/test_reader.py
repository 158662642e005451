from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.checkpoint import Checkpoint, reader
from deepinfer.errors import CheckpointError


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_read_equals_the_library(tiny_single: Path, tiny_sharded: Path, threads: int) -> None:
    expected = load_file(tiny_single / "model.safetensors")
    for folder in (tiny_single, tiny_sharded):
        checkpoint = Checkpoint.open(folder, threads=threads)
        done: list[int] = []
        tensors = checkpoint.read(checkpoint.names, progress=done.append)
        assert set(tensors) == set(expected)
        assert all(same_bytes(tensors[name], expected[name]) for name in expected)
        assert sum(done) == checkpoint.stats.bytes == sum(item.nbytes for item in expected.values())
        assert checkpoint.stats.gigabytes_per_second > 0


def test_dtypes(tiny_single: Path) -> None:
    names = {
        "embed.weight": torch.bfloat16,
        "layers.0.attn.attn_sink": torch.float32,
        "layers.0.attn.wq_a.weight": torch.float8_e4m3fn,
        "layers.0.attn.wq_a.scale": torch.uint8,
        "layers.0.ffn.experts.0.w1.weight": torch.uint8,
    }
    tensors = Checkpoint.open(tiny_single).read(names)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == names


def test_neighbours_are_read_together(tiny_single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny_single)
    ordered = sorted(checkpoint.names, key=lambda name: checkpoint.location(name).entry.start)
    checkpoint.read(ordered[10:40])
    assert checkpoint.stats.requests == 1
    checkpoint.read([ordered[0], ordered[2]])
    assert checkpoint.stats.requests == 3
    # a small request size splits tensors, also inside one, and still brings every byte
    monkeypatch.setattr(reader, "_REQUEST_BYTES", 1000)
    monkeypatch.setattr(reader, "_MAX_VECTORS", 3)
    split = Checkpoint.open(tiny_single, threads=4)
    expected = load_file(tiny_single / "model.safetensors")
    tensors = split.read(ordered[:60])
    assert split.stats.requests > 60
    assert all(same_bytes(tensors[name], expected[name]) for name in ordered[:60])


def test_short_reads_are_continued(tiny_single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return whole(descriptor, [buffers[0][:777]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    expected = load_file(tiny_single / "model.safetensors")
    names = ["embed.weight", "norm.weight", "layers.0.attn.attn_sink"]
    tensors = Checkpoint.open(tiny_single).read(names)
    assert all(same_bytes(tensors[name], expected[name]) for name in names)


def test_file_that_shrinks_after_opening(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    with (single / "model.safetensors").open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(CheckpointError, match=r"ended at byte 200000 .* the file changed or is truncated"):
        checkpoint.read(checkpoint.names)
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.read(["embed.weight"])


def test_unknown_name(tiny_single: Path) -> None:
    checkpoint = Checkpoint.open(tiny_single)
    for call in (lambda: checkpoint.read(["nope"]), lambda: checkpoint.mmap("nope")):
        with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
            call()
    assert checkpoint.read([]) == {}


def test_mmap_is_a_view_of_the_file(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    name = "layers.1.engram.embed.weight"
    table = checkpoint.mmap(name)
    assert table.dtype is torch.float8_e4m3fn
    assert same_bytes(table, checkpoint.read([name])[name])
    start = checkpoint.location(name).entry.start
    with (single / "model.safetensors").open("r+b") as file:
        file.seek(start + 5)
        file.write(b"\x38")  # 1.0 in e4m3
    assert float(table.view(-1)[5]) == 1.0
    del checkpoint
    assert float(table.view(-1)[5]) == 1.0


def test_every_tensor_of_a_made_checkpoint_can_be_mapped(tiny_sharded: Path) -> None:
    checkpoint = Checkpoint.open(tiny_sharded)
    tensors = checkpoint.read(checkpoint.names)
    assert all(same_bytes(checkpoint.mmap(name), tensors[name]) for name in checkpoint.names)


def test_reads_into_given_buffers(tiny_single: Path) -> None:
    checkpoint = Checkpoint.open(tiny_single)
    names = ["embed.weight", "layers.0.attn.attn_sink", "layers.0.attn.wq_a.weight"]
    staging = torch.zeros(checkpoint.location(names[0]).entry.nbytes, dtype=torch.uint8)
    sink = torch.zeros(8)
    tensors = checkpoint.read(names, into={names[0]: staging, names[1]: sink})
    assert tensors[names[0]].data_ptr() == staging.data_ptr()
    assert tensors[names[0]].shape == (512, 256)
    assert torch.equal(tensors[names[1]], sink)
    expected = load_file(tiny_single / "model.safetensors")
    assert all(same_bytes(tensors[name], expected[name]) for name in names)
    for wrong in (torch.zeros(7), torch.zeros(2, 8)[:, ::2], torch.zeros(8, device="meta")):
        with pytest.raises(ValueError, match="attn_sink needs a contiguous CPU buffer of 32 bytes"):
            checkpoint.read([names[1]], into={names[1]: wrong})

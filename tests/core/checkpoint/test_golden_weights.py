from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from deepinfer.checkpoint import Checkpoint
from deepinfer.checkpoint.formats import dequantise, dequantise_fp4, dequantise_fp8
from deepinfer.models.deepseek_v41.config import load_config
from deepinfer.models.deepseek_v41.tensors import expected_tensors


def test_every_weight_equals_its_float32_twin(golden: Path) -> None:
    folder = golden / "v41-tiny-a"
    checkpoint = Checkpoint.open(folder)
    checkpoint.validate(expected_tensors(load_config(folder)))
    values = dequantise(checkpoint.read(checkpoint.names))
    twin = load(lzma.decompress((folder / "model_fp32.safetensors.xz").read_bytes()))
    assert set(values) == set(twin)
    different = [
        name for name, value in twin.items() if not torch.equal(values[name].view(torch.int32), value.view(torch.int32))
    ]
    assert different == []


def test_weight_vectors(golden: Path) -> None:
    vectors = np.load(golden / "ops.npz")

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(vectors[name].copy())

    fp8 = dequantise_fp8(tensor("weight_fp8.bytes").view(torch.float8_e4m3fn), tensor("weight_fp8.scale"))
    assert torch.equal(fp8, tensor("weight_fp8.value"))
    fp4 = dequantise_fp4(tensor("weight_fp4.bytes"), tensor("weight_fp4.scale"))
    assert torch.equal(fp4, tensor("weight_fp4.value"))

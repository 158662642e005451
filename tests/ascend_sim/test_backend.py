"""The backend object: honest capabilities, and stored bytes that come back."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from deepinfer.api.backend import Numerics, Shard, WeightGroup, WeightPart
from deepinfer.api.errors import CapabilityError
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer_ascend.backend import create_backend
from deepinfer_ascend.handles import MxExperts, MxWeight

BACKEND = create_backend()
RELEASE = Numerics()
FLOAT32 = Numerics(compute_dtype=torch.float32, activation_quant=False)


def test_it_promises_nothing_that_nobody_measured():
    capabilities = BACKEND.capabilities()
    assert capabilities.device_type == "npu"
    assert not capabilities.row_invariant
    assert capabilities.row_invariant_references == frozenset()
    assert "all_reduce" in capabilities.collectives - capabilities.fixed_order_collectives
    assert capabilities.verified_on == ()
    assert BACKEND.environment()["hardware"] == "never run on hardware"
    assert BACKEND.environment()["TASK_QUEUE_ENABLE"] == os.environ["TASK_QUEUE_ENABLE"] == "0"


def test_batch_invariance_is_refused():
    with pytest.raises(CapabilityError, match="ascend"):
        KernelTable.bind(all_contracts(), BACKEND, Numerics(batch_invariant=True))


def test_shards_and_float64_are_refused():
    with pytest.raises(CapabilityError, match="shard 1 of 2"):
        BACKEND.plan_weights([], Shard(1, 2), RELEASE)
    with pytest.raises(CapabilityError, match="float64"):
        BACKEND.kernels(Numerics(compute_dtype=torch.float64))


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def fp8_codes(*shape: int) -> torch.Tensor:
    """Every e4m3 code but NaN."""
    codes = random_bytes(*shape)
    return torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)


def linear_group(columns: int) -> tuple[WeightGroup, dict[str, torch.Tensor]]:
    raw = {}
    for name, rows in (("a", 64), ("b", 96)):
        raw[f"{name}.weight"] = fp8_codes(rows, columns)
        raw[f"{name}.scale"] = random_bytes(rows // 32, columns // 32, low=110, high=140)
    kinds = {"weight": "F8_E4M3", "scale": "F8_E8M0"}
    parts = tuple(WeightPart(key, tuple(value.shape), kinds[key.split(".")[1]]) for key, value in raw.items())
    return WeightGroup("ab", "fp8_block32", parts), raw


def expert_group(width: int, hidden: int) -> tuple[WeightGroup, dict[str, torch.Tensor]]:
    raw = {}
    for expert in range(3):
        for name, (rows, columns) in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
            key = f"{expert}.{name}"
            raw[f"{key}.weight"] = random_bytes(rows, columns // 2, seed=expert)
            raw[f"{key}.scale"] = random_bytes(rows, columns // 32, low=110, high=140, seed=expert)
    parts = tuple(
        WeightPart(key, tuple(value.shape), "I8" if key.endswith("weight") else "F8_E8M0") for key, value in raw.items()
    )
    return WeightGroup("experts", "fp4_experts", parts), raw


@pytest.mark.parametrize("numerics", [RELEASE, FLOAT32], ids=["release", "float32"])
@pytest.mark.parametrize("made", [linear_group(128), linear_group(96), expert_group(64, 128), expert_group(96, 64)])
def test_stored_bytes_come_back(made, numerics):
    group, raw = made
    (placement,) = BACKEND.plan_weights([group], Shard(), numerics)
    back = BACKEND.unpack(placement, BACKEND.load(placement, raw))
    assert set(back) == set(raw)
    for name, stored in raw.items():
        assert torch.equal(back[name].view(torch.uint8), stored.view(torch.uint8)), name


def test_weights_that_meet_plain_rows_are_kept_as_values():
    group, raw = linear_group(128)
    (placement,) = BACKEND.plan_weights([replace(group, plain_rows=True)], Shard(), RELEASE)
    handle = BACKEND.load(placement, raw)
    assert placement.layout == "values:bfloat16"
    assert handle.values.dtype is torch.bfloat16
    assert handle.quantised
    back = BACKEND.unpack(placement, handle)
    assert all(torch.equal(back[name].view(torch.uint8), stored.view(torch.uint8)) for name, stored in raw.items())


@pytest.mark.parametrize("made", [linear_group(128), expert_group(64, 128)])
def test_codes_are_kept_in_release_numerics(made):
    group, raw = made
    (placement,) = BACKEND.plan_weights([group], Shard(), RELEASE)
    handle = BACKEND.load(placement, raw)
    assert isinstance(handle, (MxWeight, MxExperts))
    fields = [getattr(handle, name) for name in handle.__dataclass_fields__ if name != "part_rows"]
    assert placement.layout == "mx"
    assert placement.nbytes == sum(field.numel() * field.element_size() for field in fields)

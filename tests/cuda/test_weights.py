"""Weights in the backend's forms: planned bytes are the bytes taken, stored bytes come back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from deepinfer.api.backend import Numerics, Shard, WeightGroup, WeightPart
from deepinfer.api.formats import dequantise_fp4
from tests.cuda.interpreted import InterpretedBackend

from deepinfer_cuda import weights  # isort: skip
from deepinfer_cuda.expert_words import pack_words, unpack_words  # isort: skip

EXPERTS, WIDTH, HIDDEN = 2, 128, 256


def _bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)


def _group(kind: str) -> tuple[WeightGroup, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    raw: dict[str, torch.Tensor] = {}
    if kind == "fp4_experts":
        for expert in range(EXPERTS):
            for name, (n, k) in {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}.items():
                raw[f"{expert}.{name}.weight"] = _bytes(generator, n, k // 2)
                raw[f"{expert}.{name}.scale"] = _bytes(generator, n, k // 32)
    elif kind == "fp8_block32":
        for name, n in {"a": 96, "b": 33}.items():
            raw[f"{name}.weight"] = _bytes(generator, n, 160).view(torch.float8_e4m3fn)
            raw[f"{name}.scale"] = _bytes(generator, -(-n // 32), 5)
    else:
        raw["w.weight"] = torch.randn(7, 33, generator=generator).to(torch.bfloat16)
    dtypes = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}
    parts = tuple(
        WeightPart(name, tuple(value.shape), dtypes.get(value.dtype, "F8_E8M0" if name.endswith("scale") else "I8"))
        for name, value in raw.items()
    )
    return WeightGroup("group", kind, parts), raw  # type: ignore[arg-type]


def _nbytes(handle: Any) -> int:
    if isinstance(handle, torch.Tensor):
        return handle.nbytes
    fields = dataclasses.fields(handle) if dataclasses.is_dataclass(handle) else ()
    return sum(_nbytes(getattr(handle, item.name)) for item in fields)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("kind", ["fp4_experts", "fp8_block32", "bf16"])
def test_stored_bytes_come_back_from_as_many_bytes_as_planned(
    kind: str, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "INTERPRETED", not words)
    backend = InterpretedBackend()
    group, raw = _group(kind)
    placement = backend.plan_weights([group], Shard(), Numerics())[0]
    assert (placement.layout.partition(":")[0] == weights.EXPERT_WORDS) == (words and kind == "fp4_experts")
    handle = backend.load(placement, raw)
    assert _nbytes(handle) == placement.nbytes
    given = backend.unpack(placement, handle)
    assert list(given) == list(raw)
    for name, value in raw.items():
        assert torch.equal(given[name].view(torch.uint8), value.view(torch.uint8)), name


def _permute_bytes(low: int, high: int, selector: int) -> int:
    """The device's byte permutation: nibble i of the selector names the source of byte i."""
    table = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(table[(selector >> (4 * i)) & 7] for i in range(4)), "little")


def _widened(word: int) -> list[int]:
    """Eight e4m3 bytes of a word, by the instructions of `deepinfer_cuda.kernels.moe_sm90.widen`."""
    low, high = 0x3C383000, 0x4C484440
    magnitudes = word & 0x77777777
    first = _permute_bytes(low, high, magnitudes) | (word & 0x80808080)
    second = _permute_bytes(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080)
    return [*first.to_bytes(4, "little"), *second.to_bytes(4, "little")]


def test_packed_words_widen_to_the_values_of_their_codes() -> None:
    """Every byte of the checkpoint, at every place of a word."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128).view(128, 256)
    codes = torch.stack([row.roll(shift) for shift, row in enumerate(codes)])
    scales = torch.full((128, 16), 127, dtype=torch.uint8)
    words, packed_scales = pack_words(codes, scales)
    back = unpack_words(words, packed_scales, 128, 512)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)
    wanted = dequantise_fp4(codes, scales)
    for row in range(128):
        for half in range(8):
            block = words.view(4, 2, 128, 8)[half // 2, half % 2, row].tolist()
            found = [_widened(word & 0xFFFFFFFF) for word in block]
            inputs = [value for part in (slice(0, 4), slice(4, 8)) for word in found for value in word[part]]
            values = torch.tensor(inputs, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            assert torch.equal(values, wanted[row, 64 * half : 64 * half + 64].float())

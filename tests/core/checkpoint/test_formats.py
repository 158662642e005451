from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint import formats
from deepinfer.errors import CheckpointError

E2M1 = torch.tensor(formats.E2M1)


def test_all_scale_bytes() -> None:
    values = formats.scale_values(torch.arange(255, dtype=torch.uint8))
    assert [float(value) for value in values] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    with pytest.raises(CheckpointError, match="layer: 2 of 3 e8m0 scale bytes are 255"):
        formats.scale_values(torch.tensor([255, 1, 255], dtype=torch.uint8), "layer")


def test_all_packed_bytes_round_trip() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = formats.unpack_fp4(packed)
    assert codes.shape == (2, 256)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]  # bytes 0x00, 0x01: low nibble first
    assert torch.equal(formats.pack_fp4(codes), packed)


def test_fp4_values_by_hand() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x7F  # low nibble 15 = -6, high nibble 7 = 6
    packed[0, 1] = 0x91  # 0.5, -0.5
    values = formats.dequantise_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :5].tolist() == [-12.0, 12.0, 1.0, -1.0, 0.0]


def test_fp8_tiles_cover_ragged_edges() -> None:
    weight = torch.ones(40, 70).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    values = formats.dequantise_fp8(weight, scale)
    for row in (0, 31, 32, 39):
        for column in (0, 31, 32, 63, 64, 69):
            assert float(values[row, column]) == 2.0 ** (3 * (row // 32) + column // 32)


def test_rows_have_a_scale_per_32_channels() -> None:
    weight = torch.ones(3, 64).to(torch.float8_e4m3fn)
    scale = torch.arange(127, 133, dtype=torch.uint8).view(3, 2)
    values = formats.dequantise_rows(weight, scale)
    assert values[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [4, 4, 8, 8], [16, 16, 32, 32]]


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (formats.dequantise_fp8, torch.zeros(32, 32).to(torch.float8_e4m3fn)),
        (formats.dequantise_fp4, torch.zeros(32, 32, dtype=torch.uint8)),
        (formats.dequantise_rows, torch.zeros(32, 32).to(torch.float8_e4m3fn)),
    ],
)
def test_wrong_scale_shape(function, weight: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"w: scale has shape \[7, 7\], expected"):
        function(weight, torch.zeros(7, 7, dtype=torch.uint8), "w")


def test_dequantise_needs_the_scale() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight is quantised but its scale"):
        formats.dequantise({"a.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn)})


def test_e2m1_rounding_is_nearest_with_ties_to_even() -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    grid = [step / 64 for step in range(6 * 64 + 1)]
    values = torch.zeros(len(grid), 32)
    values[:, 0], values[:, 1], values[:, 2] = torch.tensor(grid), -torch.tensor(grid), 6.0
    packed, scale = formats.quantise_fp4(values)
    assert scale.unique().tolist() == [127]
    result = formats.dequantise_fp4(packed, scale)
    for row, value in enumerate(grid):
        distance = (E2M1 - value).abs()
        nearest = E2M1[distance == distance.min()].tolist()
        assert float(result[row, 0]) == (ties[value] if len(nearest) > 1 else nearest[0])
        assert float(result[row, 1]) == -float(result[row, 0])


@pytest.mark.parametrize(("amax", "byte"), [(0.0, 105), (1.0, 119), (448.0, 127), (449.0, 128)])
def test_fp8_scale_examples(amax: float, byte: int) -> None:
    values = torch.zeros(32, 32)
    values[3, 4] = amax
    assert formats.quantise_fp8(values)[1].tolist() == [[byte]]
    assert formats.quantise_rows(values)[1][3].tolist() == [byte]


@given(rows=st.integers(1, 3), groups=st.integers(1, 3), seed=st.integers(0, 2**32), exponent=st.integers(-90, 90))
@settings(max_examples=60, deadline=None)
def test_quantised_values_are_fixed_points(rows: int, groups: int, seed: int, exponent: int) -> None:
    """Quantising what a format can hold loses nothing; quantising anything errs by half a step at most."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows * 20, groups * 32, generator=generator) * 2.0**exponent
    pairs = (
        (formats.quantise_fp8, formats.dequantise_fp8),
        (formats.quantise_rows, formats.dequantise_rows),
        (formats.quantise_fp4, formats.dequantise_fp4),
    )
    for quantise, dequantise in pairs:
        once = dequantise(*quantise(values))
        assert torch.equal(dequantise(*quantise(once)), once)
        if exponent > -6:
            assert float((once - values).abs().max()) <= float(values.abs().max()) / 3

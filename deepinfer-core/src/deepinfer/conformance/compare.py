"""How two results are compared: bit for bit, within a tolerance, or code by code of a quantised row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.ops import RowFormat
from deepinfer.conformance.trees import bits, leaves, same_bits

__all__ = [
    "FLIP_RTOL",
    "ConformanceFailure",
    "bit_difference",
    "code_difference",
    "difference",
    "flipped_rows",
    "value_difference",
]

FLIP_RTOL = 0.12
"""Largest deviation of a row that holds a flipped FP8 code inside: one step of one operand of a short sum."""

FLIP_ROWS = 8
"""One row in so many may hold a flipped code; at the model's widths a row has thousands of codes."""

BF16_BITS = 8
"""Significant bits of bfloat16."""


class ConformanceFailure(AssertionError):
    """A kernel breaks its contract; the message names operation, sample and what differs."""


def _paired(actual: Any, expected: Any) -> tuple[list[tuple[str, Tensor, Tensor]], str | None]:
    left, right = list(leaves(actual)), list(leaves(expected))
    if [path for path, _ in left] != [path for path, _ in right]:
        names = [", ".join(path or "result" for path, _ in side) or "nothing" for side in (left, right)]
        return [], f"the result consists of {names[0]}, expected {names[1]}"
    return [(path or "result", a.cpu(), e.cpu()) for (path, a), (_, e) in zip(left, right, strict=True)], None


def difference(
    actual: Any, expected: Any, compare: Callable[[Tensor, Tensor], str | None], *, ignore: tuple[str, ...] = ()
) -> str | None:
    """First difference of two results, leaf by leaf, or None."""
    pairs, problem = _paired(actual, expected)
    if problem:
        return problem
    for path, a, e in pairs:
        found = None if path in ignore else compare(a, e)
        if found:
            return f"{path}: {found}"
    return None


def bit_difference(actual: Tensor, expected: Tensor) -> str | None:
    """Where two tensors differ in any bit."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{_kind(actual)}, expected {_kind(expected)}"
    if same_bits(actual, expected):
        return None
    wrong = bits(actual) != bits(expected)
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ in bits, {_example(actual, expected, wrong)}"


def flipped_rows(rows: int) -> int:
    """How many rows a flipped code inside may move: one in eight, and one more."""
    return 1 + rows // FLIP_ROWS


def value_difference(
    actual: Tensor, expected: Tensor, rtol: float, *, flips: int = 0, scale: float | None = None
) -> str | None:
    """Whether values are further from the float64 result than `rtol` of its scale.

    Integers must be equal, infinities lie at the same places, NaN is never right.

    Args:
        actual, expected: of one shape.
        rtol: allowed error in units of the scale.
        flips: so many rows may be off by the step of an inner code instead.
        scale: size of the terms of which the values are sums; None: the largest expected magnitude, which is right
            where many values come from terms of one size.
    """
    if actual.shape != expected.shape:
        return f"{_kind(actual)}, expected {_kind(expected)}"
    if not expected.is_floating_point():
        wrong = actual != expected
        return f"{int(wrong.sum())} values differ, {_example(actual, expected, wrong)}" if bool(wrong.any()) else None
    a, e = actual.to(torch.float64), expected.to(torch.float64)
    infinite = torch.isinf(e)
    wrong = torch.isnan(a) | (torch.isinf(a) & (a != e)) | (infinite & (a != e))
    if bool(wrong.any()):
        return f"{int(wrong.sum())} values are not finite where they should be or the reverse, {_example(a, e, wrong)}"
    largest = scale if scale is not None else float(e.masked_fill(infinite, 0).abs().max()) if e.numel() else 0.0
    error = (a - e).abs().masked_fill(infinite, 0)
    wrong = error > rtol * largest
    if not bool(wrong.any()):
        return None
    if float(error.max()) <= FLIP_RTOL * largest:
        rows = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
        if int(rows.sum()) <= flips:
            return None
    worst = float(error.max()) / largest if largest else float("inf")
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values are off by up to {worst:.2e} of their scale, "
        f"allowed {rtol:.1e}, {_example(a, e, wrong)}"
    )


def code_difference(
    actual: Tensor,
    expected: Tensor,
    exact: Tensor,
    row_format: RowFormat,
    flip_share: float,
    *,
    may_move_rows: bool = False,
) -> str | None:
    """Compare packed rows: a code or scale one step off only near a rounding boundary, and seldom.

    Args:
        actual, expected: [..., row bytes] uint8.
        exact: [..., width] float64 values that the codes stand for, before rounding.
        row_format: a quantised format.
        flip_share: allowed share of flipped codes and of flipped scales; one of each is always allowed.
        may_move_rows: an inner code may have flipped, which moves one row in eight, and one more, by its step.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{_kind(actual)}, expected {_kind(expected)}"
    sides = [rows.flatten(0, -2) for rows in (actual, expected)]
    exact = exact.flatten(0, -2)
    if may_move_rows:
        moved = _moved_rows(sides[0], sides[1], exact, row_format)
        if int(moved.sum()) > flipped_rows(moved.shape[0]):
            return f"{int(moved.sum())} of {moved.shape[0]} rows are off by more than a rounding"
        sides, exact = [rows[~moved] for rows in sides], exact[~moved]
    return _code_difference(sides[0], sides[1], exact, row_format, flip_share)


def _code_difference(
    actual: Tensor, expected: Tensor, exact: Tensor, row_format: RowFormat, flip_share: float
) -> str | None:
    split, group = row_format.data_bytes, row_format.width // row_format.scale_bytes
    scale_steps = (actual[:, split:].int() - expected[:, split:].int()).abs()
    boundary = _near_scale_boundary(exact, row_format)
    wrong = (scale_steps > 1) | ((scale_steps == 1) & ~boundary)
    if bool(wrong.any()):
        return f"{int(wrong.sum())} scales are wrong, {_example(actual[:, split:], expected[:, split:], wrong)}"
    allowed = max(1, int(flip_share * scale_steps.numel()))
    if int((scale_steps == 1).sum()) > allowed:
        return f"{int((scale_steps == 1).sum())} of {scale_steps.numel()} scales lie one step off, allowed {allowed}"
    comparable = (scale_steps == 0).repeat_interleave(group, -1)
    ranks = [_ranks(rows[:, :split], row_format) for rows in (actual, expected)]
    flipped = (ranks[0] != ranks[1]) & comparable
    if not bool(flipped.any()):
        return None
    far = ((ranks[0] - ranks[1]).abs() > 1) & comparable
    values = [_values(rows, row_format) for rows in (actual, expected)]
    if bool(far.any()):
        return f"{int(far.sum())} codes are more than one step off, {_example(values[0], values[1], far)}"
    clear = flipped & ((exact - (values[0] + values[1]) / 2).abs() > 2 * _ulp(exact))
    if bool(clear.any()):
        return f"{int(clear.sum())} codes are wrong away from a rounding boundary, {_example(values[0], exact, clear)}"
    allowed = max(1, int(flip_share * flipped.numel()))
    if int(flipped.sum()) > allowed:
        return f"{int(flipped.sum())} of {flipped.numel()} codes lie one step off, allowed {allowed}"
    return None


def _ulp(exact: Tensor) -> Tensor:
    """Distance of neighbouring bfloat16 values at these magnitudes."""
    return torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-300))) - (BF16_BITS - 1))


def _near_scale_boundary(exact: Tensor, row_format: RowFormat) -> Tensor:
    """Groups whose scale would differ if their largest value moved by two bfloat16 steps."""
    largest = exact.unflatten(-1, (row_format.scale_bytes, -1)).abs().amax(-1)
    low, high = largest - 2 * _ulp(largest), largest + 2 * _ulp(largest)
    if row_format.name == "fp4_block16":
        codes = [(side / 6).clamp(max=448).float().to(torch.float8_e4m3fn).view(torch.uint8) for side in (low, high)]
        return codes[0] != codes[1]
    top = 448 if row_format.name == "fp8_block32" else 6
    return torch.ceil(torch.log2(low / top)) != torch.ceil(torch.log2(high / top))


def _moved_rows(actual: Tensor, expected: Tensor, exact: Tensor, row_format: RowFormat) -> Tensor:
    """Rows that differ by more than roundings, yet by less than the step of an inner code explains."""
    values = [_values(rows, row_format) for rows in (actual, expected)]
    wrong = torch.tensor(
        [
            _code_difference(actual[row : row + 1], expected[row : row + 1], exact[row : row + 1], row_format, 1.0)
            is not None
            for row in range(actual.shape[0])
        ],
        dtype=torch.bool,
    )
    largest = values[1].nan_to_num().abs().amax() if values[1].numel() else 0.0
    close = ((values[0] - values[1]).abs().nan_to_num() <= 2 * FLIP_RTOL * largest).all(1)
    return wrong & close


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _codes(data: Tensor, row_format: RowFormat) -> Tensor:
    if row_format.name == "fp8_block32":
        return data.to(torch.int64)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).to(torch.int64)


def _ranks(data: Tensor, row_format: RowFormat) -> Tensor:
    """Codes as integers in the order of their values; both zeros are 0."""
    codes, sign = _codes(data, row_format), 0x80 if row_format.name == "fp8_block32" else 0x8
    return torch.where(codes >= sign, -(codes - sign), codes)


def _values(rows: Tensor, row_format: RowFormat) -> Tensor:
    split = row_format.data_bytes
    data, scales = rows[..., :split].contiguous(), rows[..., split:].contiguous()
    if row_format.name == "fp8_block32":
        values = data.view(torch.float8_e4m3fn).to(torch.float64)
    else:
        codes = _codes(data, row_format)
        values = _E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    if row_format.name == "fp4_block16":
        scale = scales.view(torch.float8_e4m3fn).to(torch.float64)
    else:
        scale = torch.exp2(scales.to(torch.float64) - 127)
    return values * scale.repeat_interleave(row_format.width // row_format.scale_bytes, -1)


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _example(actual: Tensor, expected: Tensor, wrong: Tensor) -> str:
    place = tuple(int(index) for index in wrong.nonzero()[0])
    return f"first at {list(place)}: {actual[place].item()!r}, expected {expected[place].item()!r}"

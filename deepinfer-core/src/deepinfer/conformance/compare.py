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
    rtol: float,
    *,
    may_move_rows: bool = False,
) -> str | None:
    """Compare packed rows: another code or scale only where a value within the tolerance has it, and seldom.

    Args:
        actual, expected: [..., row bytes] uint8.
        exact: [..., width] float64 values that the codes stand for, before rounding.
        row_format: a quantised format.
        flip_share: allowed share of flipped codes and of flipped scales; one of each is always allowed.
        rtol: allowed error of a value before it is rounded, in units of its row's largest: sums may cancel.
        may_move_rows: an inner code may have flipped, which moves one row in eight, and one more, by its step.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{_kind(actual)}, expected {_kind(expected)}"
    sides = [rows.flatten(0, -2) for rows in (actual, expected)]
    exact = exact.flatten(0, -2)
    if may_move_rows:
        moved = _moved_rows(sides[0], sides[1], exact, row_format, rtol)
        if int(moved.sum()) > flipped_rows(moved.shape[0]):
            return f"{int(moved.sum())} of {moved.shape[0]} rows are off by more than a rounding"
        sides, exact = [rows[~moved] for rows in sides], exact[~moved]
    return _code_difference(sides[0], sides[1], exact, row_format, flip_share, rtol)


def _code_difference(
    actual: Tensor, expected: Tensor, exact: Tensor, row_format: RowFormat, flip_share: float, rtol: float
) -> str | None:
    split, group = row_format.data_bytes, row_format.width // row_format.scale_bytes
    scale_steps = (actual[:, split:].int() - expected[:, split:].int()).abs()
    error = _allowed_error(exact, rtol)
    boundary = _near_scale_boundary(exact, error, row_format)
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
    scales = _scales(expected[:, split:], row_format)
    low, high = (_nearest_ranks((exact + side) / scales, row_format) for side in (-error, error))
    wrong = flipped & ((ranks[0] < low) | (ranks[0] > high))
    if bool(wrong.any()):
        values = _values(actual, row_format)
        return f"{int(wrong.sum())} codes are off by more than a rounding, {_example(values, exact, wrong)}"
    allowed = max(1, int(flip_share * flipped.numel()))
    if int(flipped.sum()) > allowed:
        return f"{int(flipped.sum())} of {flipped.numel()} codes are flipped, allowed {allowed}"
    return None


def _allowed_error(exact: Tensor, rtol: float) -> Tensor:
    """Two bfloat16 steps of a value; more where it is small in its row, as what cancelled may have been large."""
    steps = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-300))) - (BF16_BITS - 2))
    return torch.maximum(steps, rtol * exact.abs().amax(-1, keepdim=True))


def _near_scale_boundary(exact: Tensor, error: Tensor, row_format: RowFormat) -> Tensor:
    """Groups whose scale would differ if their largest value moved by its allowed error."""
    groups = exact.abs().unflatten(-1, (row_format.scale_bytes, -1))
    largest, place = groups.max(-1)
    moved = error.unflatten(-1, (row_format.scale_bytes, -1)).gather(-1, place[..., None])[..., 0]
    low, high = (largest - moved).clamp(min=0), largest + moved
    if row_format.name == "fp4_block16":
        codes = [(side / 6).clamp(max=448).float().to(torch.float8_e4m3fn).view(torch.uint8) for side in (low, high)]
        return codes[0] != codes[1]
    top = 448 if row_format.name == "fp8_block32" else 6
    return torch.ceil(torch.log2(low / top)) != torch.ceil(torch.log2(high / top))


def _moved_rows(actual: Tensor, expected: Tensor, exact: Tensor, row_format: RowFormat, rtol: float) -> Tensor:
    """Rows that differ by more than roundings, yet by less than the step of an inner code explains."""
    values = [_values(rows, row_format) for rows in (actual, expected)]
    wrong = torch.tensor(
        [
            _code_difference(
                actual[row : row + 1], expected[row : row + 1], exact[row : row + 1], row_format, 1.0, rtol
            )
            is not None
            for row in range(actual.shape[0])
        ],
        dtype=torch.bool,
    )
    largest = values[1].nan_to_num().abs().amax() if values[1].numel() else 0.0
    close = ((values[0] - values[1]).abs().nan_to_num() <= 2 * FLIP_RTOL * largest).all(1)
    return wrong & close


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def _magnitudes(row_format: RowFormat) -> Tensor:
    """Values of the codes without sign, ascending."""
    return _E4M3 if row_format.name == "fp8_block32" else _E2M1


def _codes(data: Tensor, row_format: RowFormat) -> Tensor:
    if row_format.name == "fp8_block32":
        return data.to(torch.int64)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).to(torch.int64)


def _ranks(data: Tensor, row_format: RowFormat) -> Tensor:
    """Codes as integers in the order of their values; both zeros are 0."""
    codes, sign = _codes(data, row_format), 0x80 if row_format.name == "fp8_block32" else 0x8
    return torch.where(codes >= sign, -(codes - sign), codes)


def _nearest_ranks(units: Tensor, row_format: RowFormat) -> Tensor:
    """Ranks of the codes nearest to values in units of their scale."""
    levels = _magnitudes(row_format)
    ranks = torch.searchsorted((levels[1:] + levels[:-1]) / 2, units.abs())
    return torch.where(units < 0, -ranks, ranks)


def _scales(data: Tensor, row_format: RowFormat) -> Tensor:
    """Scale of every value of a row."""
    if row_format.name == "fp4_block16":
        scales = data.contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    else:
        scales = torch.exp2(data.to(torch.float64) - 127)
    return scales.repeat_interleave(row_format.width // row_format.scale_bytes, -1)


def _values(rows: Tensor, row_format: RowFormat) -> Tensor:
    split = row_format.data_bytes
    ranks = _ranks(rows[..., :split].contiguous(), row_format)
    levels = torch.cat((_magnitudes(row_format), torch.tensor([torch.nan], dtype=torch.float64)))
    return levels[ranks.abs()] * ranks.sign() * _scales(rows[..., split:], row_format)


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _example(actual: Tensor, expected: Tensor, wrong: Tensor) -> str:
    place = tuple(int(index) for index in wrong.nonzero()[0])
    return f"first at {list(place)}: {actual[place].item()!r}, expected {expected[place].item()!r}"

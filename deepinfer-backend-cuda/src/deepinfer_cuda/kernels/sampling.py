"""From logits to tokens without an intermediate of the size of the logits, and without asking the device anything.

What top-k and top-p keep of a row is the start of its order by value, then by lower id. It is described by the value
and the id of the last kept entry, found by bisection over the values' bit patterns. Mass is a sum of integers, which
has no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.launch import EXACT
from deepinfer_cuda.kernels.noise import fixed_log, log_noise

__all__ = ["apply_filters", "kernels", "sample_rows", "sample_step"]

BLOCK = 8192
"""Ids that a program looks at at a time."""

STATUS_BAD_LOGITS = 1
LOWEST_KEY, HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
MASS_UNIT = tl.constexpr(2.0**40)


@triton.jit
def _order(value):
    """Signed integers that order as float32 values do; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _scaled(logits, start, vocab, largest, temperature, BLOCK: tl.constexpr):
    """(logit - largest) / temperature of ids from `start` on; -inf behind the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    value = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    return ids, tl.div_rn(value - largest, tl.zeros((BLOCK,), tl.float32) + temperature)


@triton.jit
def _largest(logits, largest, first, bad, vocab: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit of a row and the lowest id that has it; bad rows (a NaN, +inf or all -inf) get 0 instead."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((), float("-inf"), tl.float32)
    where = tl.full((), 0, tl.int32)
    nans = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        is_nan = value != value
        nans += tl.sum(is_nan.to(tl.int32))
        value = tl.where(is_nan, float("-inf"), value)
        here = tl.max(value)
        place = tl.min(tl.where(value == here, ids, vocab))
        where = tl.where(here > best, place, where)
        best = tl.maximum(best, here)
    is_bad = (nans > 0) | (tl.abs(best) == float("inf"))
    tl.store(largest + row, tl.where(is_bad, 0.0, best))
    tl.store(first + row, where)
    tl.store(bad + row, is_bad.to(tl.int32))


@triton.jit
def _limits(
    logits, largest, temperature, top_k, top_p, bad, last_key, last_id, vocab: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The last entry of a row that top-k and top-p keep: its key, and the highest id among those of this key."""
    row = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    low, high = tl.full((), LOWEST_KEY, tl.int64), tl.full((), LOWEST_KEY, tl.int64)
    final_id = vocab
    if (t > 0) & ((k >= 0) | (p < 1)) & (tl.load(bad + row) == 0):
        source, top = logits + row * vocab, tl.load(largest + row)
        allowed = tl.where(k < 0, vocab, k)
        total = tl.full((), 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            _, value = _scaled(source, start, vocab, top, t, BLOCK)
            total += tl.sum((tl.exp(value).to(tl.float64) * MASS_UNIT).to(tl.int64))
        limit = tl.where(p < 1, total.to(tl.float64) * p.to(tl.float64), float("inf"))
        # The least key that fewer than `allowed` entries and less than `limit` of mass stand before.
        high = tl.full((), HIGHEST_KEY, tl.int64)
        count = tl.full((), 0, tl.int32)
        mass = tl.full((), 0, tl.int64)
        while low < high:
            middle = (low + high) >> 1
            above, weight = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
            for start in range(0, vocab, BLOCK):
                ids, value = _scaled(source, start, vocab, top, t, BLOCK)
                stands = (_order(value).to(tl.int64) > middle) & (ids < vocab)
                above += tl.sum(stands.to(tl.int32))
                weight += tl.sum(tl.where(stands, (tl.exp(value).to(tl.float64) * MASS_UNIT).to(tl.int64), 0))
            enough = (above < allowed) & (weight.to(tl.float64) < limit)
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
            count = tl.where(enough, above, count)
            mass = tl.where(enough, weight, mass)
        # Equal values are kept from the lowest id on.
        final_id = -1
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids, value = _scaled(source, start, vocab, top, t, BLOCK)
            equal = (_order(value).to(tl.int64) == high) & (ids < vocab)
            before = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
            each = (tl.exp(value).to(tl.float64) * MASS_UNIT).to(tl.int64)
            kept = equal & (count + before < allowed) & ((mass + before * each).to(tl.float64) < limit)
            final_id = tl.maximum(final_id, tl.max(tl.where(kept, ids, -1)))
            seen += tl.sum(equal.to(tl.int32))
    tl.store(last_key + row, high.to(tl.int32))
    tl.store(last_id + row, final_id)


@triton.jit
def _kept(
    logits, largest, first, temperature, last_key, last_id, min_p, row, start, vocab,
    HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids from `start` on and their scaled logits, -inf where a filter drops them."""
    t = tl.load(temperature + row)
    ids, value = _scaled(logits + row * vocab, start, vocab, tl.load(largest + row), tl.where(t > 0, t, 1.0), BLOCK)
    key, final = _order(value), tl.load(last_key + row)
    keep = (key > final) | ((key == final) & (ids <= tl.load(last_id + row)))
    value = tl.where(keep, value, float("-inf"))
    value = tl.where(t > 0, value, tl.where(ids == tl.load(first + row), 0.0, float("-inf")))
    if HAS_MIN_P:
        share = tl.zeros((1,), tl.float32) + tl.load(min_p + row)
        least = tl.where(share > 0, fixed_log(tl.maximum(share, 1.1754943508222875e-38)), float("-inf"))
        value = tl.where(value >= least, value, float("-inf"))
    return ids, value


@triton.jit
def _filter(
    logits, largest, first, temperature, last_key, last_id, min_p, out, vocab: tl.constexpr,
    HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids, value = _kept(
        logits, largest, first, temperature, last_key, last_id, min_p, row, tl.program_id(1) * BLOCK, vocab,
        HAS_MIN_P, BLOCK,
    )  # fmt: skip
    tl.store(out + row * vocab + ids, value, mask=ids < vocab)


@triton.jit
def _noise(seeds, positions, completions, row, start, BLOCK: tl.constexpr):
    """log E of ids from `start` on, a multiple of 4: each counter gives the words of four ids."""
    group = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    same = tl.zeros_like(group)
    position = same + tl.load(positions + row).to(tl.uint32)
    purpose = same + (tl.load(completions + row).to(tl.uint32) * 256).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seeds + row).to(tl.uint64), group, position, purpose, same)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    return log_noise(words)


@triton.jit
def _best(value, ids, vocab):
    """Largest value and the lowest id that has it."""
    largest = tl.max(value)
    return largest, tl.min(tl.where((value == largest) & (ids < vocab), ids, vocab))


@triton.jit
def _draw(
    logits, largest, first, temperature, last_key, last_id, min_p, seeds, positions, completions,
    noisy, noisy_id, plain, plain_id,
    vocab: tl.constexpr, HAS_MIN_P: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best id of a block of ids with and without noise; `SCALED`: the logits are filtered already."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SCALED:
        ids = part * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    else:
        ids, value = _kept(
            logits, largest, first, temperature, last_key, last_id, min_p, row, part * BLOCK, vocab, HAS_MIN_P, BLOCK
        )
    place = row * tl.num_programs(1) + part
    best, where = _best(value, ids, vocab)
    tl.store(plain + place, best)
    tl.store(plain_id + place, where)
    if tl.load(temperature + row) > 0:
        value = value - _noise(seeds, positions, completions, row, part * BLOCK, BLOCK)
        best, where = _best(tl.where(value != value, float("-inf"), value), ids, vocab)
    tl.store(noisy + place, best)
    tl.store(noisy_id + place, where)


@triton.jit
def _choose(noisy, noisy_id, plain, plain_id, bad, tokens, status, parts, HAS_BAD: tl.constexpr, PARTS: tl.constexpr):
    """The best of a row's blocks; if every kept id drew infinite noise, the best without noise."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    live = part < parts
    place = row * parts + part
    value = tl.load(noisy + place, mask=live, other=float("-inf"))
    best = tl.max(value)
    token = tl.min(tl.where(live & (value == best), tl.load(noisy_id + place, mask=live, other=0), HIGHEST_KEY))
    value = tl.load(plain + place, mask=live, other=float("-inf"))
    sure = tl.min(tl.where(live & (value == tl.max(value)), tl.load(plain_id + place, mask=live, other=0), HIGHEST_KEY))
    token = tl.where(best == float("-inf"), sure, token)
    if HAS_BAD:
        is_bad = tl.load(bad + row)
        token = tl.where(is_bad != 0, -1, token)
        tl.store(status + row, is_bad)
    tl.store(tokens + row, token.to(tl.int64))


class _Filters:
    """What the filters keep of each row of logits float32 [S, V]."""

    def __init__(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> None:
        rows, self.vocab = logits.shape
        self.logits, self.temperature, self.min_p = logits.contiguous(), temperature, min_p
        self.largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
        self.first, self.bad, self.last_key, self.last_id = torch.empty(
            4, rows, dtype=torch.int32, device=logits.device
        ).unbind(0)
        _largest[(rows,)](self.logits, self.largest, self.first, self.bad, self.vocab, BLOCK=BLOCK, num_warps=8)
        _limits[(rows,)](
            self.logits, self.largest, temperature, top_k, top_p, self.bad, self.last_key, self.last_id, self.vocab,
            BLOCK=BLOCK, num_warps=8, **EXACT,
        )  # fmt: skip

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What `_kept` reads."""
        min_p = self.temperature if self.min_p is None else self.min_p
        return self.logits, self.largest, self.first, self.temperature, self.last_key, self.last_id, min_p


def apply_filters(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """See the contract `apply_filters`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows, vocab = logits.shape
    if rows:
        filters = _Filters(logits, temperature, top_k, top_p, min_p)
        _filter[(rows, triton.cdiv(vocab, BLOCK))](
            *filters.arguments, out, vocab, HAS_MIN_P=min_p is not None, BLOCK=BLOCK, num_warps=8, **EXACT
        )
    return out


def _drawn(
    arguments: tuple[Tensor, ...], draws: tuple[Tensor, Tensor, Tensor], bad: Tensor | None, has_min_p: bool
) -> tuple[Tensor, Tensor]:
    logits = arguments[0]
    rows, vocab = logits.shape
    parts, device = triton.cdiv(vocab, BLOCK), logits.device
    values = torch.empty(2, rows, parts, dtype=torch.float32, device=device)
    ids = torch.empty(2, rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    status = torch.empty(rows, dtype=torch.int32, device=device)
    _draw[(rows, parts)](
        *arguments, *draws, values[0], ids[0], values[1], ids[1], vocab,
        HAS_MIN_P=has_min_p, SCALED=bad is None, BLOCK=BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    _choose[(rows,)](
        values[0], ids[0], values[1], ids[1], status if bad is None else bad, tokens, status, parts,
        HAS_BAD=bad is not None, PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return tokens, status


def sample_rows(scaled: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
    """See the contract `sample_rows`."""
    if not scaled.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=scaled.device)
    scaled, unread = scaled.contiguous(), temperature
    arguments = (scaled, unread, unread, temperature, unread, unread, unread)
    return _drawn(arguments, (seeds, positions, completions), None, False)[0]


def sample_step(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    completions: Tensor,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract `sample_step`."""
    if not logits.shape[0]:
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        return none, none.to(torch.int32)
    filters = _Filters(logits.to(torch.float32), temperature, top_k, top_p, min_p)
    return _drawn(filters.arguments, (seeds, positions, completions), filters.bad, min_p is not None)


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    found = (apply_filters, sample_rows, sample_step)
    return {function.__name__: Kernel(function, Determinism.ROW_INVARIANT) for function in found}

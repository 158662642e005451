"""From logits to tokens: filters, noise-coupled draws and the status of each row (design 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, composite, op
from deepinfer.ops.host_view import rows_where
from deepinfer.sampling.rng import log, noise

__all__ = [
    "STATUS_BAD_LOGITS",
    "STATUS_OK",
    "apply_filters",
    "draw_arguments",
    "logits_samples",
    "noisy_argmax",
    "rows_per_block",
    "sample_rows",
    "sample_step",
    "sampling_arguments",
    "sampling_bytes",
    "usable_logits",
]

STATUS_OK = 0
STATUS_BAD_LOGITS = 1
"""A logit is NaN or +inf, or every logit is -inf: the row has no token."""

MASS_BITS = 40
"""Probability mass is counted in units of 2**-40 of the largest probability: a sum of integers has no order."""

SMALLEST_NORMAL = 2.0**-126

BLOCK_ELEMENTS = 1 << 20
"""Logits that one block of rows works on, at least one row."""

BYTES_PER_ELEMENT = 100
"""Temporaries of filters and noise per logit: about a dozen int64 and float64 values at the peak."""


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Most bytes of temporaries of a `sample_step` call, beside the logits themselves."""
    return min(rows, rows_per_block(vocab_size)) * vocab_size * BYTES_PER_ELEMENT


def rows_per_block(vocab_size: int) -> int:
    """Rows of logits that are worked on at a time, so that temporaries stay bounded."""
    return max(1, BLOCK_ELEMENTS // vocab_size)


def _vocab(size: SampleSize) -> int:
    return {"tiny": 16, "odd": 509, "real": 129_280}[size]


def sampling_arguments(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sample filters: every combination of temperature, top-k and top-p."""
    choice = torch.arange(rows) % 5
    temperature = torch.where(choice == 0, 0.0, 0.25 + torch.rand(rows, generator=generator))
    return {
        "temperature": temperature,
        "top_k": torch.where((choice == 2) | (choice == 4), 1 + choice, -1).to(torch.int32),
        "top_p": torch.where(choice >= 3, 0.05 + 0.9 * torch.rand(rows, generator=generator), 1.0),
    }


def _min_p(rows: int, generator: torch.Generator) -> Tensor:
    return torch.where(torch.arange(rows) % 3 == 1, 0.5 * torch.rand(rows, generator=generator), 0.0)


def draw_arguments(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Sample arguments of a draw: seeds, positions and completions."""
    return {
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "positions": torch.randint(0, 2**20, (rows,), generator=generator),
        "completions": torch.randint(0, 4, (rows,), generator=generator).to(torch.int32),
    }


def logits_samples(size: SampleSize, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Labelled logits that a sampler must get right: none, ties, signed zeros, excluded and huge values."""
    vocab = _vocab(size)
    rows = {"tiny": 11, "odd": 35, "real": 6}[size]
    yield "empty", torch.empty(0, vocab)
    yield "one row", 4 * torch.randn(1, vocab, generator=generator)
    yield "rows", 4 * torch.randn(rows, vocab, generator=generator)
    yield "ties", torch.randint(-2, 3, (rows, vocab), generator=generator).float()
    yield "all equal", torch.zeros(5, vocab)
    yield "signed zeros", torch.where(torch.rand(5, vocab, generator=generator) < 0.5, 0.0, -0.0)
    masked = torch.randn(5, vocab, generator=generator)
    yield "masked", torch.where(torch.rand(5, vocab, generator=generator) < 0.5, masked, -torch.inf)
    yield "huge values", 1e30 * torch.randn(5, vocab, generator=generator)


def _filter_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        arguments = sampling_arguments(logits.shape[0], generator)
        yield Sample(label, {"logits": logits, **arguments}, ("logits", *arguments))
        arguments["min_p"] = _min_p(logits.shape[0], generator)
        yield Sample(f"{label}, min-p", {"logits": logits, **arguments}, ("logits", *arguments))


@op(samples=_filter_samples, determinism=Determinism.ROW_INVARIANT)
def apply_filters(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Scale logits by temperature and drop what top-k, top-p and min-p exclude (design 6).

    The order of ids is by value, then by lower id. An id is kept if fewer than top_k ids stand before it, the mass
    before it, relative to the whole distribution after temperature, is below top_p, and its probability is at least
    min_p times the largest one; so the first id always stays. Mass is counted in integers of 2**-40 of the largest
    probability. Temperature 0 keeps the first id alone.

    Args:
        logits: float32 [S, V] without NaN or +inf.
        temperature: float32 [S], 0 or positive.
        top_k: int32 [S], -1 for all.
        top_p: float32 [S], 1 for all.
        min_p: float32 [S], 0 for all; None: 0 for every row.

    Returns:
        float32 [S, V]: (logit - largest logit) / temperature where kept, else -inf.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    greedy = (temperature == 0)[:, None]
    first = torch.arange(logits.shape[-1], device=logits.device) == shifted.argmax(-1, keepdim=True)
    scaled = torch.where(
        greedy, torch.where(first, 0.0, -torch.inf), shifted / torch.where(greedy, 1.0, temperature[:, None])
    )
    limited = rows_where((temperature > 0) & ((top_k >= 0) | (top_p < 1)))
    if limited.numel():
        scaled[limited] = _keep_first(scaled[limited], top_k[limited], top_p[limited])
    if min_p is not None:
        # log(p / largest p) against log(min_p), which is a fixed sequence of operations on every backend.
        least = torch.where(min_p > 0, log(min_p.to(torch.float32).clamp(min=SMALLEST_NORMAL)), -torch.inf)
        scaled = torch.where(scaled >= least[:, None], scaled, -torch.inf)
    return scaled


def _keep_first(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scaled logits with -inf behind top-k and top-p; rows without limits, and greedy ones, come out as they are."""
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    keep &= (top_k < 0)[:, None] | (rank < top_k[:, None])
    nucleus = rows_where(top_p < 1)
    if nucleus.numel():
        mass = (torch.exp(ordered[nucleus]).double() * 2.0**MASS_BITS).to(torch.int64)
        through = torch.cumsum(mass, -1)
        limit = through[:, -1:].double() * top_p[nucleus, None].double()
        keep[nucleus] &= ((through - mass).double() < limit) | (top_p[nucleus, None] >= 1)
    return torch.full_like(scaled, -torch.inf).scatter_(-1, ids, torch.where(keep, ordered, -torch.inf))


def _row_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        arguments = sampling_arguments(logits.shape[0], generator)
        draws = draw_arguments(logits.shape[0], generator)
        kwargs = {"scaled": apply_filters(logits, **arguments), "temperature": arguments["temperature"], **draws}
        yield Sample(label, kwargs, tuple(kwargs))


def noisy_argmax(scaled: Tensor, log_e: Tensor) -> Tensor:
    """Argmax [S] of scaled - log E [S, V], ties to the lower id.

    Every kept id may have drawn infinite noise (one id kept: once in 2**25 draws); the best of them stands then.
    """
    noisy = scaled - log_e
    choice = noisy.argmax(-1)
    lost = noisy.gather(-1, choice[:, None])[:, 0] == -torch.inf
    return torch.where(lost, scaled.argmax(-1), choice)


def usable_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, V] with zeros in the rows that cannot be sampled, and which those are: bool [S]."""
    bad = ~torch.isfinite(logits.amax(-1))
    return logits.masked_fill(bad[:, None], 0.0), bad


@op(samples=_row_samples, determinism=Determinism.EXACT)
def sample_rows(scaled: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:
    """Draw one id per row: argmax of scaled - log E, ties to the lower id; plain argmax at temperature 0 (design 6).

    The noise log E of an id depends on seed, position, completion and id only (`deepinfer.sampling.rng`), in float32
    operations of a fixed order, so equal inputs give equal ids on every backend.

    Args:
        scaled: float32 [S, V], -inf where excluded, at least one finite entry a row.
        temperature: float32 [S], 0 switches the noise off.
        seeds: int64 [S].
        positions: int64 [S], position of the token to be drawn.
        completions: int32 [S].

    Returns:
        int64 [S].
    """
    tokens = scaled.argmax(-1)
    drawn = rows_where(temperature > 0)
    if drawn.numel():
        log_e = noise(seeds[drawn], positions[drawn], completions[drawn].to(torch.int64), scaled.shape[-1])
        tokens[drawn] = torch.where(temperature[drawn] > 0, noisy_argmax(scaled[drawn], log_e), tokens[drawn])
    return tokens


def _step_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        rows = logits.shape[0]
        arguments = {**sampling_arguments(rows, generator), **draw_arguments(rows, generator)}
        yield Sample(label, {"logits": logits, **arguments}, ("logits", *arguments))
        with_min_p = {**arguments, "min_p": _min_p(rows, generator)}
        yield Sample(f"{label}, min-p", {"logits": logits, **with_min_p}, ("logits", *with_min_p))
        if rows >= 4:
            bad = logits.clone()
            bad[0, 1], bad[1, 2], bad[2] = torch.nan, torch.inf, -torch.inf
            yield Sample(f"{label}, bad rows", {"logits": bad, **arguments}, ("logits", *arguments))


@composite(uses=("apply_filters", "sample_rows"), samples=_step_samples, determinism=Determinism.ROW_INVARIANT)
def sample_step(table: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Sample one token per row and say which rows cannot be sampled (design 6).

    Works in blocks of rows, so that memory does not grow with rows times vocabulary.

    Args of the operation:
        logits: float32 [S, V]; float64 and others are rounded to float32 first.
        temperature, top_p: float32 [S]; top_k, completions: int32 [S]; seeds: int64 [S].
        min_p: float32 [S], last and optional.
        positions: int64 [S], position of the token to be drawn: the row's position + 1.

    Returns of the operation:
        tokens: int64 [S], -1 where the status is not 0.
        status: int32 [S], 0 or `STATUS_BAD_LOGITS` (a NaN, a +inf or no finite logit); a bad row changes no other.
    """
    filters, draw = table.apply_filters, table.sample_rows

    def sample_block(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        completions: Tensor,
        min_p: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        safe, bad = usable_logits(logits)
        if not rows_where(temperature > 0).numel():
            tokens = safe.argmax(-1)
        else:
            kept = filters(safe, temperature, top_k, top_p, min_p)
            tokens = draw(kept, temperature, seeds, positions, completions)
        return torch.where(bad, -1, tokens), torch.where(bad, STATUS_BAD_LOGITS, STATUS_OK).to(torch.int32)

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
        rows, vocab = logits.shape
        arguments = [logits.to(torch.float32), temperature, top_k, top_p, seeds, positions, completions]
        if min_p is not None:
            arguments.append(min_p)
        block = rows_per_block(vocab)
        if rows <= block:
            return sample_block(*arguments)
        parts = [sample_block(*(part[at : at + block] for part in arguments)) for at in range(0, rows, block)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    return sample_step

"""What happens to logits before the filters, what is forced after the draw, and log-probabilities (design 6).

All operations work on R rows of logits and the tables of state slots; `slots` names the slot of each row, -1 leaves a
row as it is. None of them asks for a value on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op
from deepinfer.sampling.rng import log

__all__ = [
    "add_bias",
    "apply_penalties",
    "count_tokens",
    "forbid_tokens",
    "force_tokens",
    "pack_bits",
    "token_logprobs",
    "token_logprobs_bytes",
]

WORD_BITS = 32
MASS_BITS = 40
"""Mass is counted in units of 2**-40 of the largest probability: a sum of integers has no order."""
BLOCK_ELEMENTS = 1 << 20
"""Logits that one block of rows of `token_logprobs` works on, at least one row."""
LOGPROB_BYTES_PER_ELEMENT = 64
"""Temporaries of `token_logprobs` per logit of a block."""
ID_MASK = 0xFFFFFFFF

EXACT = Tolerance(0.0, 0.0)


def token_logprobs_bytes(rows: int, vocab_size: int) -> int:
    """Most bytes of temporaries of a `token_logprobs` call."""
    return min(rows, max(1, BLOCK_ELEMENTS // vocab_size)) * vocab_size * LOGPROB_BYTES_PER_ELEMENT


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool [..., V] into int32 [..., ceil(V / 32)]: id v is bit v % 32 of word v // 32."""
    words = -(-bits.shape[-1] // WORD_BITS)
    padded = torch.nn.functional.pad(bits.to(torch.int64), (0, words * WORD_BITS - bits.shape[-1]))
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=bits.device) << torch.arange(
        WORD_BITS, device=bits.device
    )
    packed = (padded.unflatten(-1, (words, WORD_BITS)) * weights).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _unpack_bits(words: Tensor, vocab_size: int) -> Tensor:
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :vocab_size].bool()


def _sizes(size: SampleSize) -> tuple[int, int, int]:
    """Vocabulary, rows and slots."""
    return {"tiny": (16, 5, 4), "odd": (509, 11, 9), "real": (129_280, 6, 5)}[size]


def _slots(rows: int, slots: int, generator: torch.Generator) -> Tensor:
    found = torch.randint(1, slots, (rows,), generator=generator)
    return torch.where(torch.arange(rows) % 4 == 3, -1, found)


def _others(used: Tensor, slots: int, *tables: str) -> dict[str, Tensor]:
    """Mask of the slots that no row names, for each of these tables: what must not be read."""
    mask = torch.ones(slots, dtype=torch.bool)
    mask[used[used >= 0]] = False
    return dict.fromkeys(tables, mask)


def _logits(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return 4 * torch.randn(rows, vocab, generator=generator)


def _bias_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, slots = _sizes(size)
    width = 7
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(slots)]).to(torch.int32)
    ids[:, 4:] = torch.where(torch.rand(slots, 3, generator=generator) < 0.5, -1, ids[:, 4:])
    values = 200 * torch.rand(slots, width, generator=generator) - 100
    for label, count in (("empty", 0), ("one row", 1), ("rows", rows)):
        kwargs = {"logits": _logits(count, vocab, generator), "slots": _slots(count, slots, generator)}
        unread = _others(kwargs["slots"], slots, "bias_values")
        yield Sample(label, {**kwargs, "bias_ids": ids, "bias_values": values}, ("logits", "slots"), unread)


@op(samples=_bias_samples, determinism=Determinism.EXACT, tolerance=Tolerance(1e-6, 1e-6))
def add_bias(logits: Tensor, slots: Tensor, bias_ids: Tensor, bias_values: Tensor) -> Tensor:
    """Add each slot's bias to the logits of its ids; one float32 addition an id.

    Args:
        logits: float32 [R, V].
        slots: int64 [R].
        bias_ids: int32 [slots, B], distinct within a slot, -1 for none.
        bias_values: float32 [slots, B].

    Returns:
        float32 [R, V].
    """
    safe = slots.clamp(min=0)
    ids = torch.where((slots >= 0)[:, None], bias_ids[safe].to(torch.int64), -1)
    # Entries of nothing add to a column that is cut off.
    wide = torch.nn.functional.pad(logits, (0, 1))
    target = torch.where(ids >= 0, ids, logits.shape[1])
    return wide.scatter(1, target, wide.gather(1, target) + bias_values[safe])[:, :-1]


def _penalty_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, slots = _sizes(size)
    counts = torch.randint(0, 3, (slots, vocab), generator=generator).to(torch.int32)
    prompt = pack_bits(torch.rand(slots, vocab, generator=generator) < 0.3)
    scales = {
        "repetition": 0.5 + torch.rand(slots, generator=generator),
        "presence": torch.rand(slots, generator=generator) - 0.5,
        "frequency": torch.rand(slots, generator=generator) - 0.5,
    }
    for label, count, width in (("empty", 0, 0), ("one row", 1, 0), ("rows", rows, 0), ("verify rows", rows, 3)):
        pending = torch.randint(-1, vocab, (count, width), generator=generator)
        kwargs = {"logits": _logits(count, vocab, generator), "slots": _slots(count, slots, generator)}
        arguments = {**kwargs, "pending": pending, "counts": counts, "prompt_bits": prompt, **scales}
        unread = _others(kwargs["slots"], slots, "counts", "prompt_bits", *scales)
        yield Sample(label, arguments, ("logits", "slots", "pending"), unread)


@op(samples=_penalty_samples, determinism=Determinism.EXACT, tolerance=Tolerance(1e-6, 1e-6))
def apply_penalties(
    logits: Tensor,
    slots: Tensor,
    pending: Tensor,
    counts: Tensor,
    prompt_bits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalise ids that the prompt or the output holds (design 6).

    Logits of ids in prompt or output are divided by `repetition` where positive and multiplied where not; then
    `frequency` times their count in the output is subtracted, then `presence` where that count is not 0. The output is
    what `counts` says and the row's `pending` ids, as if these had been emitted.

    Args:
        logits: float32 [R, V].
        slots: int64 [R].
        pending: int64 [R, D], drafts before the row, -1 for none.
        counts: int32 [slots, V], of the output's ids.
        prompt_bits: int32 [slots, ceil(V / 32)], ids of the prompt (`pack_bits`).
        repetition, presence, frequency: float32 [slots].

    Returns:
        float32 [R, V].
    """
    vocab = logits.shape[1]
    safe = slots.clamp(min=0)
    times = torch.nn.functional.pad(counts[safe], (0, 1))
    times.scatter_add_(1, torch.where(pending >= 0, pending, vocab), torch.ones_like(pending, dtype=times.dtype))
    times = times[:, :-1]
    seen = (times > 0) | _unpack_bits(prompt_bits[safe], vocab)
    factor = repetition[safe, None]
    repeated = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    lowered = repeated - frequency[safe, None] * times.to(torch.float32)
    lowered = lowered - torch.where(times > 0, presence[safe, None], 0.0)
    return torch.where((slots >= 0)[:, None], lowered, logits)


def _forbid_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, slots = _sizes(size)
    allowed = pack_bits(torch.rand(slots, vocab, generator=generator) < 0.7)
    ending = pack_bits(torch.rand(slots, vocab, generator=generator) < 0.2)
    least = torch.randint(0, 6, (slots,), generator=generator)
    for label, count in (("empty", 0), ("one row", 1), ("rows", rows)):
        kwargs = {
            "logits": _logits(count, vocab, generator),
            "slots": _slots(count, slots, generator),
            "output_index": torch.randint(0, 6, (count,), generator=generator),
        }
        unread = _others(kwargs["slots"], slots, "allowed", "ending", "min_tokens")
        tables = {"allowed": allowed, "ending": ending, "min_tokens": least}
        yield Sample(label, {**kwargs, **tables}, tuple(kwargs), unread)


@op(samples=_forbid_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def forbid_tokens(
    logits: Tensor, slots: Tensor, output_index: Tensor, allowed: Tensor, ending: Tensor, min_tokens: Tensor
) -> Tensor:
    """Replace by -inf the logits of banned ids and, before `min_tokens`, of ids that would end the text.

    Args:
        logits: float32 [R, V].
        slots: int64 [R].
        output_index: int64 [R], index in the output of the token to be drawn.
        allowed, ending: int32 [slots, ceil(V / 32)] (`pack_bits`).
        min_tokens: int64 [slots].

    Returns:
        float32 [R, V].
    """
    safe = slots.clamp(min=0)
    early = output_index < min_tokens[safe]
    words = allowed[safe] & ~torch.where(early[:, None], ending[safe], 0)
    words = torch.where((slots >= 0)[:, None], words, -1)
    return torch.where(_unpack_bits(words, logits.shape[1]), logits, -torch.inf)


def _force_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, slots = _sizes(size)
    forced = torch.randint(-1, 8, (slots, 5), generator=generator).to(torch.int32)
    for label, count in (("empty", 0), ("one row", 1), ("rows", rows)):
        kwargs = {
            "tokens": torch.randint(-1, vocab, (count,), generator=generator),
            "slots": _slots(count, slots, generator),
            "output_index": torch.randint(0, 9, (count,), generator=generator),
        }
        yield Sample(label, {**kwargs, "forced": forced}, tuple(kwargs), _others(kwargs["slots"], slots, "forced"))


@op(samples=_force_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def force_tokens(tokens: Tensor, slots: Tensor, output_index: Tensor, forced: Tensor) -> Tensor:
    """Replace drawn tokens by the forced ones; a row that could not be sampled (-1) stays so.

    Args:
        tokens: int64 [R], drawn.
        slots: int64 [R].
        output_index: int64 [R], index in the output of the token.
        forced: int32 [slots, F], F >= 1, -1 where free; free beyond F.

    Returns:
        int64 [R].
    """
    width = forced.shape[1]
    given = forced[slots.clamp(min=0), output_index.clamp(0, width - 1)].to(torch.int64)
    valid = (slots >= 0) & (output_index >= 0) & (output_index < width) & (given >= 0) & (tokens >= 0)
    return torch.where(valid, given, tokens)


def _count_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, slots = _sizes(size)
    for label, count in (("empty", 0), ("one row", 1), ("rows", rows)):
        counts = torch.randint(0, 3, (slots, vocab), generator=generator).to(torch.int32)
        tokens = torch.randint(-1, 4, (count, 3), generator=generator)
        used = _slots(count, slots, generator)
        unread = _others(used, slots, "counts")
        yield Sample(label, {"counts": counts, "slots": used, "tokens": tokens}, unread=unread)


@op(samples=_count_samples, determinism=Determinism.EXACT, tolerance=EXACT, mutates=("counts",))
def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Count emitted tokens into the records of their slots.

    Args:
        counts: int32 [slots, V], written in place.
        slots: int64 [S], -1 for nothing; a slot may occur more than once.
        tokens: int64 [S, D], -1 for nothing.
    """
    valid = (slots >= 0)[:, None] & (tokens >= 0)
    entries = slots.clamp(min=0)[:, None] * counts.shape[1] + tokens.clamp(min=0)
    # Nothing is added to entry 0 of slot 0, which is never handed out.
    counts.view(-1).index_add_(0, torch.where(valid, entries, 0).reshape(-1), valid.to(counts.dtype).reshape(-1))


def _logprob_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rows, _ = _sizes(size)
    masked = torch.where(
        torch.rand(rows, vocab, generator=generator) < 0.5, _logits(rows, vocab, generator), -torch.inf
    )
    masked[:, 3] = 0.0
    for label, logits, count in (
        ("empty", _logits(0, vocab, generator), 2),
        ("one row", _logits(1, vocab, generator), 1),
        ("rows", _logits(rows, vocab, generator), 5),
        ("many rows", _logits(33 if size == "odd" else rows, vocab, generator), 2),
        ("chosen only", _logits(rows, vocab, generator), 0),
        ("ties", torch.randint(-2, 3, (rows, vocab), generator=generator).float(), 6),
        ("masked", masked, 3),
        ("one sure id", torch.full((rows, vocab), -torch.inf).index_fill_(1, torch.tensor([3]), 2.5), 2),
    ):
        tokens = torch.randint(-1, vocab, (logits.shape[0],), generator=generator)
        yield Sample(label, {"logits": logits, "tokens": tokens, "count": count}, ("logits", "tokens"))


@op(samples=_logprob_samples, determinism=Determinism.ROW_INVARIANT, tolerance=Tolerance(4e-6, 4e-6))
def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of given tokens, and the most probable ids, of softmax(logits).

    The logarithm of the sum is taken of an integer count of mass in units of 2**-40 of the largest probability, so no
    order of summation enters, with the fixed logarithm of `deepinfer.sampling.rng`.

    Args:
        logits: float32 [R, V], others are rounded to it first; rows with a NaN or +inf, or without a finite value,
            have no log-probabilities.
        tokens: int64 [R], -1 for none.
        count: most probable ids to report, k <= V.

    Returns:
        chosen: float32 [R], of `tokens`; 0 where there is none.
        ranks: int64 [R], 1 for the most probable id; among equals the lower id comes first; -1 where there is none.
        ids: int64 [R, k], most probable first, the lower of equal ids first.
        values: float32 [R, k], of `ids`; 0 where there is none.
    """
    logits = logits.to(torch.float32)
    block = max(1, BLOCK_ELEMENTS // logits.shape[1])
    if logits.shape[0] <= block:
        return _block_logprobs(logits, tokens, count)
    starts = range(0, logits.shape[0], block)
    parts = [_block_logprobs(logits[at : at + block], tokens[at : at + block], count) for at in starts]
    chosen, ranks, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ranks, ids, values


def _block_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vocab = logits.shape[1]
    largest = logits.amax(-1, keepdim=True)
    bad = ~torch.isfinite(largest)
    shifted = logits.masked_fill(bad, 0.0) - largest.masked_fill(bad, 0.0)
    mass = (torch.exp(shifted).double() * 2.0**MASS_BITS).to(torch.int64).sum(-1, keepdim=True)
    normal = log((mass.double() * 2.0**-MASS_BITS).to(torch.float32))
    # One integer per id that orders by value, then by lower id: adding 0 makes one zero of both.
    bits = (shifted + 0.0).view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    keys = (ordered << 32) | (ID_MASK - torch.arange(vocab, device=logits.device))
    safe = tokens.clamp(min=0)[:, None]
    present = (tokens >= 0)[:, None] & ~bad
    chosen = torch.where(present, shifted.gather(1, safe) - normal, 0.0)[:, 0]
    ranks = torch.where(present, 1 + (keys > keys.gather(1, safe)).sum(-1, keepdim=True), -1)[:, 0]
    ids = ID_MASK - (torch.topk(keys, count, dim=-1).values & ID_MASK)
    values = torch.where(bad, 0.0, shifted.gather(1, ids) - normal)
    return chosen, ranks, ids, values

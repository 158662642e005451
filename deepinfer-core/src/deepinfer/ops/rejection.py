"""Rejection sampling of drafts: keeps the target's distribution, accepts more than coupled verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, composite, op
from deepinfer.ops.sampling import (
    STATUS_BAD_LOGITS,
    STATUS_OK,
    apply_filters,
    draw_arguments,
    logits_samples,
    noisy_argmax,
    rows_per_block,
    sampling_arguments,
    usable_logits,
)
from deepinfer.sampling.rng import UNIT, Purpose, noise, random_words

__all__ = ["draft_step", "draw_drafts", "judge_drafts", "judge_step"]


def _draw_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        rows = logits.shape[0]
        arguments = sampling_arguments(rows, generator)
        draws = draw_arguments(rows, generator)
        anchors = draws["positions"] - 1 - torch.randint(0, 5, (rows,), generator=generator)
        kwargs = {"scaled": apply_filters(logits, **arguments), **draws, "anchors": anchors}
        yield Sample(label, kwargs, tuple(kwargs))


@op(samples=_draw_samples, determinism=Determinism.EXACT)
def draw_drafts(scaled: Tensor, seeds: Tensor, positions: Tensor, completions: Tensor, anchors: Tensor) -> Tensor:
    """Draw one draft per row from the drafter's distribution, independently of everything that judges it.

    The noise depends on the block that a draft belongs to beside its position. A position may be drafted several times,
    and confidences of an earlier block may decide whether the draft is verified; with fresh noise they know nothing of
    it, so that choice cannot bend the distribution.

    Args:
        scaled: float32 [S, V] as `apply_filters` gives them; at temperature 0 one id is left.
        seeds, positions, completions: as `sample_rows` takes them.
        anchors: int64 [S], position of the last accepted row, which no two blocks of a request share.

    Returns:
        int64 [S].
    """
    log_e = noise(seeds, positions, completions.to(torch.int64), scaled.shape[-1], Purpose.DRAFT, anchors)
    return noisy_argmax(scaled, log_e)


def _judge_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        rows, vocab = logits.shape
        arguments = sampling_arguments(rows, generator)
        draws = draw_arguments(rows, generator)
        scaled = apply_filters(logits, **arguments)
        shift = torch.randn(rows, vocab, generator=generator)
        proposed = apply_filters(logits + shift, **arguments)
        drafts = draw_drafts(proposed, **draws, anchors=draws["positions"] - 2)
        kwargs = {"scaled": scaled, "proposed": proposed, "drafts": drafts, **draws}
        yield Sample(label, kwargs, tuple(kwargs))
        same = {**kwargs, "proposed": scaled, "drafts": draw_drafts(scaled, **draws, anchors=draws["positions"] - 2)}
        yield Sample(f"{label}, equal distributions", same, tuple(same))


@op(samples=_judge_samples, determinism=Determinism.ROW_INVARIANT)
def judge_drafts(
    scaled: Tensor, proposed: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor, completions: Tensor
) -> Tensor:
    """The token of each row that has a draft: the draft with probability min(1, p / q), else one of the rest.

    With p the target's and q the drafter's distribution the rest is max(p - q, 0); so the token is distributed as p,
    and it equals the draft exactly where that was accepted. Acceptance and the rest have noise of their own.

    Args:
        scaled: float32 [S, V], logits of p as `apply_filters` gives them.
        proposed: float32 [S, V], those of q.
        drafts: int64 [S], drawn from q.
        seeds, positions, completions: of the token to be drawn, as `sample_rows` takes them.

    Returns:
        int64 [S].
    """
    if not drafts.shape[0]:
        return drafts.clone()
    p, q = scaled.double().softmax(-1), proposed.double().softmax(-1)
    completions = completions.to(torch.int64)
    word = random_words(seeds, positions, completions, 1, Purpose.ACCEPT)[:, 0]
    drafted = drafts[:, None]
    accepted = (word.double() + 0.5) * UNIT * q.gather(-1, drafted)[:, 0] < p.gather(-1, drafted)[:, 0]
    rest = (p - q).clamp(min=0.0)
    # Equal distributions leave nothing but roundings; any id of p is right then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    other = noisy_argmax(rest.log(), noise(seeds, positions, completions, scaled.shape[-1], Purpose.RESIDUAL))
    return torch.where(accepted, drafts, other)


def _draft_step_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        rows = logits.shape[0]
        arguments = {**sampling_arguments(rows, generator), **draw_arguments(rows, generator)}
        arguments["anchors"] = arguments["positions"] - 2
        arguments["min_p"] = torch.zeros(rows)
        yield Sample(label, {"logits": logits, **arguments}, ("logits", *arguments))


@composite(uses=("apply_filters", "draw_drafts"), samples=_draft_step_samples, determinism=Determinism.ROW_INVARIANT)
def draft_step(table: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Draw one draft per sequence and say what it was drawn from.

    Args of the operation:
        logits: float32 [S, V].
        temperature, top_k, top_p, seeds, positions, completions, min_p: as `sample_step` takes them.
        anchors: int64 [S], as `draw_drafts` takes them.

    Returns of the operation:
        drafts: int64 [S], -1 where the logits cannot be sampled.
        proposed: float32 [S, V], what `judge_step` needs.
    """
    filters, draw = table.apply_filters, table.draw_drafts

    def draft_step(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        completions: Tensor,
        anchors: Tensor,
        min_p: Tensor,
    ) -> tuple[Tensor, Tensor]:
        arguments = (logits, temperature, top_k, top_p, seeds, positions, completions, anchors, min_p)
        proposed = torch.empty_like(logits)
        drafts = torch.empty_like(positions)
        size = rows_per_block(logits.shape[1])
        for at in range(0, logits.shape[0], size):
            block = slice(at, at + size)
            part, temp, k, mass, seed, position, completion, anchor, least = (value[block] for value in arguments)
            safe, bad = usable_logits(part)
            proposed[block] = filters(safe, temp, k, mass, least)
            drafts[block] = torch.where(bad, -1, draw(proposed[block], seed, position, completion, anchor))
        return drafts, proposed

    return draft_step


def _judge_step_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, logits in logits_samples(size, generator):
        rows, vocab = logits.shape
        arguments = {**sampling_arguments(rows, generator), **draw_arguments(rows, generator)}
        proposals = torch.randn(4, 3, vocab, generator=generator)
        places = torch.randint(-1, 12, (rows,), generator=generator)
        drafts = proposals.flatten(0, 1)[places.clamp(min=0)].argmax(-1) if rows else places
        arguments["drafts"] = torch.where(places >= 0, drafts, -1)
        arguments["places"] = places
        arguments["min_p"] = torch.zeros(rows)
        kwargs = {"logits": logits, **arguments, "proposals": proposals}
        yield Sample(label, kwargs, ("logits", *arguments))
        if rows >= 4:
            bad = logits.clone()
            bad[0, 1], bad[1, 2], bad[2] = torch.nan, torch.inf, -torch.inf
            yield Sample(f"{label}, bad rows", {**kwargs, "logits": bad}, ("logits", *arguments))


@composite(
    uses=("apply_filters", "sample_rows", "judge_drafts"),
    samples=_judge_step_samples,
    determinism=Determinism.ROW_INVARIANT,
)
def judge_step(table: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Sample one token per row, by judging the row's draft where it has one; otherwise as `sample_step`.

    The token equals the draft exactly where the draft is accepted, so `verify_coupled` reads acceptance from it.

    Args of the operation:
        logits: float32 [R, V].
        temperature, top_k, top_p, seeds, positions, completions, min_p: as `sample_step` takes them.
        drafts: int64 [R], the draft that the row judges; -1 for none.
        places: int64 [R], row of `proposals` that it was drawn from.
        proposals: float32 [slots, N, V], what drafts were drawn from.

    Returns of the operation:
        tokens, status: as `sample_step`.
    """
    filters, fresh, judge = table.apply_filters, table.sample_rows, table.judge_drafts

    def judge_step(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        completions: Tensor,
        drafts: Tensor,
        places: Tensor,
        min_p: Tensor,
        proposals: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = proposals.flatten(0, 1)
        arguments = (logits, temperature, top_k, top_p, seeds, positions, completions, drafts, places, min_p)
        tokens, status = torch.empty_like(positions), torch.empty_like(completions)
        size = rows_per_block(logits.shape[1])
        for at in range(0, logits.shape[0], size):
            block = slice(at, at + size)
            part, temp, k, mass, seed, position, completion, draft, place, least = (value[block] for value in arguments)
            safe, bad = usable_logits(part)
            kept = filters(safe, temp, k, mass, least)
            drawn = fresh(kept, temp, seed, position, completion)
            judged = judge(kept, rows[place.clamp(min=0)], draft.clamp(min=0), seed, position, completion)
            tokens[block] = torch.where(bad, -1, torch.where(draft >= 0, judged, drawn))
            status[block] = torch.where(bad, STATUS_BAD_LOGITS, STATUS_OK)
        return tokens, status.to(torch.int32)

    return judge_step

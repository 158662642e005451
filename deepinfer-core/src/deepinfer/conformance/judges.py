"""Comparisons of operations whose results are choices or packed bytes, where closeness needs its own rule.

A judge gets the exact table, the contract, fresh inputs, the outcome (result and written arguments), the expected
outcome and the relative tolerance; it returns what is wrong or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepinfer.api.ops import (
    FP8_BLOCK32,
    EntryCache,
    IndexParameters,
    OpContract,
    RowFormat,
    Rows,
    accumulate_dtype,
    visible_entries,
)
from deepinfer.conformance.compare import bit_difference, code_difference, difference, flipped_rows, value_difference
from deepinfer.conformance.trees import to_wide

__all__ = ["JUDGES", "Judge"]

Outcome: TypeAlias = tuple[Any, dict[str, Any]]
Judge: TypeAlias = Callable[[Any, OpContract, Mapping[str, Any], Outcome, Outcome, float], str | None]

CHAOTIC_RMS = 0.5
"""Root-mean-square error, relative to that of the result, that bfloat16 roundings may cause over a whole drafter."""

MANY_SEQUENCES = 16
"""From so many sequences on their median says something although single ones may meet a flip or another route."""


def _plain(width: int) -> RowFormat:
    return RowFormat("plain:float64", width)


def _near(contract: OpContract, rtol: float) -> Callable[[Tensor, Tensor], str | None]:
    def near(actual: Tensor, expected: Tensor) -> str | None:
        flips = flipped_rows(expected.shape[0]) if contract.tolerance.flip_share else 0
        return value_difference(actual, expected, rtol, flips=flips)

    return near


def _named(name: str, found: str | None) -> str | None:
    return f"{name}: {found}" if found else None


def _route(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Weights of the chosen experts; another choice only between scores that are equal within the tolerance."""
    (ids, weights), (right, right_weights) = outcome[0], expected[0]
    if ids.shape != right.shape or ids.dtype != right.dtype:
        return f"ids: {list(ids.shape)} {ids.dtype}, expected {list(right.shape)} {right.dtype}"
    ids = ids.cpu()
    wide = to_wide(inputs)
    scores = torch.sqrt(torch.nn.functional.softplus(wide["logits"]))
    ranked = scores + torch.where(wide["is_image"][:, None], wide["image_bias"], wide["bias"])
    if bool(((ids < 0) | (ids >= ranked.shape[1])).any()):
        return "ids: out of range"
    found = value_difference(ranked.gather(1, ids), ranked.gather(1, right), rtol)
    if found:
        return f"ids: score + bias of the choices: {found}"
    tied = (ids != right).any(1)
    return _named("weights", value_difference(weights.cpu()[~tied], right_weights[~tied], rtol))


def _boundary(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Streams, normed rows and mixes by value, the quantised rows code by code."""
    (streams, rows, mixes), (right_streams, right_rows, right_mixes) = outcome[0], expected[0]
    near = _near(contract, rtol)
    return (
        _named("streams", difference(streams, right_streams, near))
        or _named("rows.values", difference(rows.values, right_rows.values, near))
        or _named("rows.quantised", _rows_difference(rows, right_rows, contract.tolerance.flip_share, rtol))
        or _named("mixes", difference(mixes, right_mixes, near))
    )


def _rows_difference(rows: Rows, right: Rows, flip_share: float, rtol: float) -> str | None:
    """FP8-rounded values as codes under the scales of the expected values."""
    width = right.values.shape[-1]
    row_format = RowFormat(FP8_BLOCK32, width)
    largest = right.values.to(torch.float32).unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(largest.double() / 448))
    packed = []
    for values in (rows.quantised, right.quantised):
        units = values.cpu().double() / torch.exp2(exponent).repeat_interleave(32, -1)
        codes = units.float().to(torch.float8_e4m3fn)
        if not torch.equal(codes.double(), units):
            if values is right.quantised:
                return None
            wrong = codes.double() != units
            return f"{int(wrong.sum())} values are no FP8 codes under the scale of their group"
        packed.append(torch.cat((codes.view(torch.uint8), (exponent + 127).to(torch.uint8)), dim=-1))
    return code_difference(packed[0], packed[1], right.values.double(), row_format, flip_share, rtol)


def _project(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Projections by value, the window rows code by code."""
    actual, right = outcome[0], expected[0]
    names = ("query", "index_query", "index_weights", "latent", "gate")
    found, wanted = ({name: getattr(side, name) for name in names} for side in (actual, right))
    row_format = inputs["weights"].window_format
    weights = replace(inputs["weights"], window_format=_plain(row_format.width))
    plain = exact.qkv_project(**{**inputs, "weights": weights}).window_rows.view(torch.float64)
    share = contract.tolerance.flip_share
    return difference(found, wanted, _near(contract, rtol)) or _named(
        "window_rows", code_difference(actual.window_rows.cpu(), right.window_rows, plain, row_format, share, rtol)
    )


def _plain_cache(cache: EntryCache) -> EntryCache:
    """An empty cache of the same shape whose rows are float64 values."""
    width, index_width = cache.entry_format.width, cache.index_format.width
    pages, per_page = cache.entries.shape[0], cache.entries_per_page
    return replace(
        cache,
        entries=torch.zeros(pages, per_page, 8 * width, dtype=torch.uint8),
        index_keys=torch.zeros(pages, per_page * 8 * index_width, dtype=torch.uint8),
        state=None if cache.state is None else cache.state.clone(),
        entry_format=_plain(width),
        index_format=_plain(index_width),
    )


def _compress(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Entries and index keys code by code, the state bit by bit."""
    actual, right = outcome[1]["cache"], expected[1]["cache"]
    plain = _plain_cache(inputs["cache"])
    exact.compress_entries(**{**inputs, "cache": plain})
    share = contract.tolerance.flip_share
    places = torch.arange(plain.entries.shape[0] * plain.entries_per_page)[None]
    keys, right_keys = (
        exact.gather_index_keys(side.index_keys.cpu(), places, right.index_format)[0] for side in (actual, right)
    )
    values = plain.index_keys.contiguous().view(torch.float64).view(len(places[0]), -1)
    entries = plain.entries.contiguous().view(torch.float64)
    state = None
    if right.state is not None:
        state = _named("state", bit_difference(actual.state.cpu(), right.state))
    return (
        _named(
            "entries", code_difference(actual.entries.cpu(), right.entries, entries, right.entry_format, share, rtol)
        )
        or _named("index keys", code_difference(keys, right_keys, values, right.index_format, share, rtol))
        or state
    )


def _main_keys(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Ring rows code by code, with a few rows that an inner code has moved."""
    weights = inputs["weights"]
    row_format = weights.stages[0].attention.window_format
    stages = tuple(
        replace(stage, attention=replace(stage.attention, window_format=_plain(row_format.width)))
        for stage in weights.stages
    )
    rings = tuple(torch.zeros(*ring.shape[:2], 8 * row_format.width, dtype=torch.uint8) for ring in outcome[1]["rings"])
    exact.draft_main_keys(**{**inputs, "rings": rings, "weights": replace(weights, stages=stages)})
    for stage, (actual, right) in enumerate(zip(outcome[1]["rings"], expected[1]["rings"], strict=True)):
        values = rings[stage].view(torch.float64)
        found = code_difference(
            actual.cpu(), right, values, row_format, contract.tolerance.flip_share, rtol, may_move_rows=True
        )
        if found:
            return f"ring of stage {stage}: {found}"
    return None


def _index_select(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Another entry or block only where its score equals the expected one within the tolerance."""
    (selection, blocks), (right, right_blocks) = outcome[0], expected[0]
    parameters: IndexParameters = inputs["parameters"]
    step, cache, query = inputs["step"], inputs["cache"], inputs["query"]
    rounded = exact.round_rows(exact.rope(query, inputs["cos"], inputs["sin"]), parameters.query_format)
    weights = inputs["weights"].to(accumulate_dtype(query.dtype)) * parameters.scale
    visible = visible_entries(step.positions, cache.ratio)
    keys = (cache.index_keys, cache.index_format, step.slots, visible, step.page_table, cache.entries_per_page)
    scores = exact.index_scores(rounded, weights, *keys)
    if parameters.uses_candidates:
        scores = exact.restrict_to_blocks(scores, inputs["blocks"], parameters.block_size)
    found = _named("entries", _choice_difference(selection.logical().cpu(), right.entries, scores, rtol))
    if found:
        return found
    places = exact.resolve_entries(selection.logical().cpu(), step.slots, step.page_table, cache.entries_per_page)
    if not torch.equal(places, selection.physical.cpu()):
        return "physical places are not those of the logical entries"
    if (blocks is None) != (right_blocks is None):
        return f"blocks: {blocks}, expected {right_blocks}"
    if blocks is None or not parameters.is_candidate_source:
        return None if blocks is None else _named("blocks", bit_difference(blocks.cpu(), right_blocks))
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % parameters.block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, parameters.block_size)).amax(-1)
    newest = (visible - 1) // parameters.block_size
    forced = (torch.arange(best.shape[1]) == newest[:, None]) & (visible > 0)[:, None]
    best = best.masked_fill(forced, float(best[best > -torch.inf].max()) + 1 if bool((best > -torch.inf).any()) else 0)
    return _named("blocks", _choice_difference(blocks.cpu(), right_blocks, best, rtol))


def _choice_difference(chosen: Tensor, right: Tensor, scores: Tensor, rtol: float) -> str | None:
    """Two ascending choices per row, padded with -1, must have equally good scores."""
    if chosen.shape != right.shape or chosen.dtype != right.dtype:
        return f"{list(chosen.shape)} {chosen.dtype}, expected {list(right.shape)} {right.dtype}"
    if torch.equal(chosen, right):
        return None
    count = (chosen >= 0).sum(1)
    if not torch.equal(count, (right >= 0).sum(1)):
        return f"{count.tolist()} chosen per row, expected {(right >= 0).sum(1).tolist()}"
    place = torch.arange(chosen.shape[1])
    ascending = (chosen[:, 1:] > chosen[:, :-1]) | (place[1:] >= count[:, None])
    if not bool(ascending.all()) or bool((chosen >= scores.shape[1]).any()):
        return "not ascending, repeated or out of range, or -1 before the end"
    live = place < count[:, None]
    sides = []
    for side in (chosen, right):
        values = scores.gather(1, side.clamp(min=0)).masked_fill(~live, -torch.inf)
        sides.append(values.sort(dim=1, descending=True).values)
    return value_difference(sides[0], sides[1], rtol)


def _confidence(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """One sum a row, which may cancel: held to the size of its terms."""
    wide = to_wide(inputs)
    terms = torch.cat((wide["hidden"], wide["markov"]), dim=-1).abs() @ wide["weight"].abs()
    scale = float(terms.max()) if terms.numel() else 0.0
    return difference(outcome[0], expected[0], lambda a, e: value_difference(a, e, rtol, scale=scale)) or (
        None if outcome[0].dtype is accumulate_dtype(inputs["hidden"].dtype) else f"{outcome[0].dtype}"
    )


def _median_difference(actual: Tensor, expected: Tensor, limit: float) -> str | None:
    """Whether the median of many sequences is off by more than `limit`; few sequences say nothing."""
    if len(expected) < MANY_SEQUENCES:
        return None
    squares = [values.double().flatten(1).square().mean(1) for values in (actual.double() - expected, expected)]
    error = float((squares[0] / squares[1]).sqrt().median())
    return None if error <= limit else f"root-mean-square error {error:.2e} of the result's in the median sequence"


def _draft(
    exact: Any, contract: OpContract, inputs: Mapping[str, Any], outcome: Outcome, expected: Outcome, rtol: float
) -> str | None:
    """Ids against the drafter's own logits, confidences against their own logits, values against float64.

    Over a whole drafter any sequence may meet a flipped inner code, and in bfloat16 one rounding may change a route and
    so a whole sequence: there the median sequence of many is judged. The unquantised sample in float32 shows the
    arithmetic of every value.
    """
    actual, weights, live = outcome[0], inputs["weights"], inputs["slots"] >= 0
    names = ("ids", "logits", "confidences", "confidence_logits")
    right = replace(expected[0], **{name: getattr(expected[0], name)[live] for name in names})
    ids, logits, confidences, confidence_logits = (getattr(actual, name).cpu()[live] for name in names)
    if inputs["choose"] is None and not torch.equal(ids, logits.argmax(-1)):
        return "ids are not the lowest argmax of the logits"
    if inputs["choose"] is not None and not torch.equal(ids, right.ids):
        return "ids are not what `choose` returned"
    found = value_difference(confidences, torch.sigmoid(confidence_logits.double() / weights.temperature), 1e-6)
    if found:
        return f"confidences: {found}"
    same = (ids == right.ids).all(1)
    pairs = {"logits": (logits, right.logits), "confidence_logits": (confidence_logits, right.confidence_logits)}
    for name, (a, e) in pairs.items():
        if a.shape != e.shape or a.dtype != e.dtype:
            return f"{name}: {list(a.shape)} {a.dtype}, expected {list(e.shape)} {e.dtype}"
        if weights.embedding.dtype is torch.bfloat16:
            found = _median_difference(a[same], e[same], CHAOTIC_RMS)
        elif weights.quantise:
            found = _median_difference(a[same], e[same], rtol)
        else:
            found = value_difference(a[same], e[same], rtol)
        if found:
            return f"{name}: {found}"
    return None


JUDGES: dict[str, Judge] = {
    "route": _route,
    "hyper_connection_boundary": _boundary,
    "qkv_project": _project,
    "compress_entries": _compress,
    "draft_main_keys": _main_keys,
    "index_select": _index_select,
    "draft_block": _draft,
    "draft_confidence": _confidence,
}

"""The checks that every kernel must pass; each raises nothing and returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.ops import Determinism, OpContract, Sample
from deepinfer.conformance.compare import bit_difference, difference, flipped_rows, value_difference
from deepinfer.conformance.judges import JUDGES
from deepinfer.conformance.rows import row_count, take_rows, units
from deepinfer.conformance.targets import ExactTable, Target
from deepinfer.conformance.trees import bits, clone, leaves, map_leaves, same_bits

__all__ = ["check_poison", "check_repeat", "check_rows", "check_side_effects", "check_values", "promises"]

ROW_COUNTS = range(1, 34)
"""Row counts at which a row-invariant kernel is tried: across two edges of any tile up to 16."""

EDGE_COUNTS = (1, 2, 15, 16, 17, 33)
"""The same for compositions, whose finer ops are tried at every count."""

_STRENGTH = (Determinism.NONE, Determinism.RUN_TO_RUN, Determinism.ROW_INVARIANT, Determinism.EXACT)


def promises(target: Target, op: str, least: Determinism) -> bool:
    """Whether the bound function promises at least this class."""
    return _STRENGTH.index(target.bindings[op].determinism) >= _STRENGTH.index(least)


@contextmanager
def _threads(target: Target, count: int) -> Iterator[None]:
    """Run with a number of CPU threads; devices other than the CPU are not concerned."""
    before = torch.get_num_threads()
    if target.device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _outcome(target: Target, contract: OpContract, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Result and declared side effects of a call."""
    result = target.run(contract.name, arguments)
    return result, {name: arguments[name] for name in contract.mutates}


def check_values(
    target: Target, reference: Target, exact: ExactTable, contract: OpContract, sample: Sample
) -> str | None:
    """The result against the reference bit by bit (exact ops), else against float64 within the tolerance."""
    op = contract.name
    idle = sample.idle_rows
    actual = _live(_outcome(target, contract, target.arguments(contract, sample.kwargs)), idle)
    standard = _live(_outcome(reference, contract, reference.arguments(contract, sample.kwargs)), idle)
    if contract.determinism is Determinism.EXACT:
        return difference(actual, standard, bit_difference)
    arguments = reference.arguments(contract, sample.kwargs)
    tolerance = contract.tolerance
    rtol = tolerance.for_dtype(target.numerics.compute_dtype)
    expected = _live((exact.expected(contract, arguments), {name: arguments[name] for name in contract.mutates}), idle)
    for who, outcome in (("", actual), ("the reference itself: ", standard)):
        if op in JUDGES:
            inputs = reference.arguments(contract, sample.kwargs)
            found = JUDGES[op](exact, contract, inputs, outcome, expected, rtol)
        else:

            def near(a: Tensor, e: Tensor) -> str | None:
                return value_difference(a, e, rtol, flips=flipped_rows(e.shape[0]) if tolerance.flip_share else 0)

            found = difference(outcome, expected, near) or difference(outcome, standard, _same_kind)
        if found:
            return who + found
    return None


def _live(outcome: tuple[Any, dict[str, Any]], idle: Tensor | None) -> tuple[Any, dict[str, Any]]:
    """The outcome with zeros (-1 in integers) in result rows that are undefined."""
    if idle is None:
        return outcome

    def clear(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != idle.shape:
            return leaf
        nothing = 0 if leaf.is_floating_point() or leaf.dtype in (torch.uint8, torch.bool) else -1
        return leaf.masked_fill(idle.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1)), nothing)

    return map_leaves(clear, outcome[0]), outcome[1]


def _same_kind(actual: Tensor, standard: Tensor) -> str | None:
    if actual.dtype != standard.dtype or actual.shape != standard.shape:
        return f"{actual.dtype} {list(actual.shape)}, the reference gives {standard.dtype} {list(standard.shape)}"
    return None


def check_side_effects(target: Target, reference: Target, contract: OpContract, sample: Sample) -> str | None:
    """Only declared arguments change, only where the reference writes; results share no memory with arguments."""
    arguments = target.arguments(contract, sample.kwargs)
    before = clone(arguments)
    result = target.run(contract.name, arguments)
    written = _written(reference, contract, sample)
    for (path, now), (_, then) in zip(leaves(arguments), leaves(before), strict=True):
        changed = (bits(now) != bits(then)).cpu()
        if not bool(changed.any()):
            continue
        if path.split(".")[0] not in contract.mutates:
            return f"argument {path} was written, the contract declares {contract.mutates or 'no argument'}"
        stray = changed & ~written.get(path, torch.zeros_like(changed))
        if bool(stray.any()):
            place = stray.nonzero()[0].tolist()
            return f"argument {path} was written at {int(stray.sum())} places that the reference leaves, as {place}"
    return _aliasing(contract, arguments, result)


def _aliasing(contract: OpContract, arguments: Mapping[str, Any], result: Any) -> str | None:
    storages = {
        tensor.untyped_storage().data_ptr(): path
        for path, tensor in leaves(dict(arguments))
        if tensor.numel() and path.split(".")[0] not in contract.aliases
    }
    for path, tensor in leaves(result):
        owner = storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if owner:
            return f"{path or 'result'} shares memory with argument {owner}"
    return None


def _written(reference: Target, contract: OpContract, sample: Sample) -> dict[str, Tensor]:
    """Masks of what the reference writes: places that change, from the given content or from its complement."""
    masks: dict[str, Tensor] = {}
    for invert in (False, True):
        arguments = reference.arguments(contract, sample.kwargs)
        for name in contract.mutates:
            for _, tensor in leaves(arguments[name]):
                if invert and (tensor.is_floating_point() or tensor.dtype is torch.uint8):
                    tensor.copy_(bits(tensor).bitwise_not().view(tensor.dtype))
        before = clone(arguments)
        reference.run(contract.name, arguments)
        for (path, now), (_, then) in zip(leaves(arguments), leaves(before), strict=True):
            if path.split(".")[0] in contract.mutates:
                changed = bits(now) != bits(then)
                masks[path] = masks[path] | changed if path in masks else changed
    return masks


def check_poison(target: Target, contract: OpContract, sample: Sample) -> str | None:
    """What must not be read is filled with NaN or nonsense; nothing that counts may change."""
    clean, clean_effects = _outcome(target, contract, target.arguments(contract, sample.kwargs))
    poisoned, poisoned_effects = _outcome(target, contract, target.arguments(contract, _poison(sample)))
    idle = sample.idle_rows

    def same(actual: Tensor, expected: Tensor) -> str | None:
        if idle is not None and actual.shape[:1] == idle.shape:
            actual, expected = actual[~idle], expected[~idle]
        return bit_difference(actual, expected)

    found = difference(poisoned, clean, same)
    if found:
        return f"what must not be read shows in {found}"
    for (path, now), (_, then) in zip(leaves(poisoned_effects), leaves(clean_effects), strict=True):
        now, then = now.cpu(), then.cpu()
        differs = bits(now) != bits(then)
        mask = sample.unread.get(path)
        if mask is not None:
            differs = differs & ~mask.view(*mask.shape, *[1] * (differs.dim() - mask.dim()))
        if bool(differs.any()):
            return f"what must not be read shows in argument {path} at {differs.nonzero()[0].tolist()}"
    return None


def _poison(sample: Sample) -> dict[str, Any]:
    used = set()

    def fill(path: str, leaf: Any) -> Any:
        if path not in sample.unread or not isinstance(leaf, Tensor):
            return leaf
        used.add(path)
        return fill_tensor(leaf, sample.unread[path])

    def fill_tensor(tensor: Tensor, mask: Tensor) -> Tensor:
        poisoned: Tensor = clone(tensor)
        if poisoned.is_floating_point():
            poisoned[mask] = torch.nan
        elif poisoned.dtype is torch.uint8:
            poisoned[mask] = 0xFF
        else:
            poisoned[mask] = torch.iinfo(poisoned.dtype).max // 2
        return poisoned

    arguments: dict[str, Any] = map_leaves(fill, sample.kwargs)
    missing = set(sample.unread) - used
    if missing:
        raise ValueError(f"sample {sample.label!r} poisons {', '.join(sorted(missing))}, which is no tensor argument")
    return arguments


def check_repeat(target: Target, contract: OpContract, sample: Sample) -> str | None:
    """Three runs of the same call give the same bits, also in what they write."""
    if not promises(target, contract.name, Determinism.RUN_TO_RUN):
        return None
    first = _outcome(target, contract, target.arguments(contract, sample.kwargs))
    for again in (2, 3):
        other = _outcome(target, contract, target.arguments(contract, sample.kwargs))
        found = difference(other, first, bit_difference)
        if found:
            return f"run {again} differs from run 1: {found}"
    return None


def check_rows(
    target: Target, contract: OpContract, sample: Sample, generator: torch.Generator, thorough: bool
) -> str | None:
    """Every row alone, among others, in another order, at any row count and thread count: the same bits."""
    if not sample.row_args or not promises(target, contract.name, Determinism.ROW_INVARIANT):
        return None
    groups = units(sample)
    if not groups:
        return None
    with _threads(target, 2):
        whole = _RowRun(target, contract, sample, None)
    order = torch.randperm(len(groups), generator=generator).tolist()
    alone, counts = (3, EDGE_COUNTS) if contract.compose else (33, ROW_COUNTS)
    trials = [(f"alone, row {groups[unit][0]}", [unit]) for unit in order[: alone if thorough else 1]]
    trials.append(("shuffled", order))
    if thorough:
        trials.append(("every second, backwards", list(range(len(groups)))[::-2]))
        trials += [(f"first {count} of a shuffled order", order[:count]) for count in counts if count <= len(groups)]
    for label, chosen in trials:
        for threads in (2, 1) if label.startswith(("shuffled", "first 17 ")) else (2,):
            with _threads(target, threads):
                part = _RowRun(target, contract, sample, [row for unit in chosen for row in groups[unit]])
            found = part.differs_from(whole)
            if found:
                return f"row-invariance is promised but {label} ({threads} threads) gives other bits: {found}"
    return None


class _RowRun:
    """One call on some rows of a sample; None for all of them."""

    def __init__(self, target: Target, contract: OpContract, sample: Sample, rows: list[int] | None) -> None:
        self.count = row_count(sample)
        self.rows = torch.arange(self.count) if rows is None else torch.tensor(rows)
        kwargs = sample.kwargs if rows is None else take_rows(sample, rows)
        arguments = target.arguments(contract, kwargs)
        before = clone({name: arguments[name] for name in contract.mutates})
        self.result, effects = _outcome(target, contract, arguments)
        self.effects = {
            path: (now.cpu(), bits(now).ne(bits(then)).cpu())
            for (path, now), (_, then) in zip(leaves(effects), leaves(before), strict=True)
        }
        self.idle = sample.idle_rows

    def differs_from(self, whole: _RowRun) -> str | None:
        for path, (now, changed) in self.effects.items():
            full, full_changed = whole.effects[path]
            if bool((changed & ~full_changed).any()):
                return f"argument {path} is written where the whole call does not write"
            if not same_bits(now[changed], full[changed]):
                return f"argument {path} is written with other bytes"
        for (path, part), (_, full) in zip(leaves(self.result), leaves(whole.result), strict=True):
            if full.dim() == 0 or full.shape[0] != self.count:
                continue
            found = self._row_difference(part.cpu(), full.cpu()[self.rows])
            if found:
                return f"{path or 'result'}: {found}"
        return None

    def _row_difference(self, part: Tensor, full: Tensor) -> str | None:
        if self.idle is not None:
            live = ~self.idle[self.rows]
            part, full = part[live], full[live]
        if part.dim() == 2 and full.dim() == 2 and part.shape[1] != full.shape[1]:
            width = min(part.shape[1], full.shape[1])
            if not bool((part[:, width:] == -torch.inf).all() and (full[:, width:] == -torch.inf).all()):
                return "columns that only one of two calls has are not all -inf"
            part, full = part[:, :width], full[:, :width]
        return bit_difference(part, full)

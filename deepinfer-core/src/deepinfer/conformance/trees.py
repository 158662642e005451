"""Walks over arguments and results: tensors inside tuples, lists, dictionaries and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["clone", "leaves", "map_leaves", "same_bits", "to_wide"]


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def map_leaves(
    function: Callable[[str, Any], Any], value: Any, path: str = "", stop: tuple[type, ...] = (Tensor,)
) -> Any:
    """The same structure with `function(dotted path, leaf)` in place of every leaf.

    Leaves are instances of `stop` and everything that is no container. A container whose leaves all stay the same
    objects is returned as it is.
    """
    if isinstance(value, stop):
        return function(path, value)
    if _is_record(value):
        old: dict[Any, Any] = {item.name: getattr(value, item.name) for item in fields(value)}
    elif isinstance(value, dict):
        old = value
    elif isinstance(value, (tuple, list)):
        old = dict(enumerate(value))
    else:
        return function(path, value)
    new = {name: map_leaves(function, part, _join(path, str(name)), stop) for name, part in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    if _is_record(value):
        return replace(value, **new)
    return new if isinstance(value, dict) else type(value)(new.values())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its dotted path."""
    if isinstance(value, Tensor):
        yield path, value
    elif _is_record(value):
        for item in fields(value):
            yield from leaves(getattr(value, item.name), _join(path, item.name))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, _join(path, str(name)))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from leaves(part, _join(path, str(index)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _clone_tensor(_: str, value: Any) -> Any:
    """A copy with the same strides, so that a view of a page stays a strided view."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 0 or value.is_contiguous() or 0 in value.stride():
        return value.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def clone(value: Any) -> Any:
    """A deep copy of all tensors."""
    return map_leaves(_clone_tensor, value)


def to_wide(value: Any) -> Any:
    """Copies with float64 in place of float32 and bfloat16, also of a `torch.dtype`; everything else as it is."""

    def widen(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return torch.float64 if leaf in (torch.float32, torch.bfloat16) else leaf
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.float32, torch.bfloat16):
            return leaf.to(torch.float64)
        return _clone_tensor(path, leaf)

    return map_leaves(widen, value)


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(value: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    if value.dtype is torch.bool:
        return value
    return value.contiguous().view(_INTEGER_OF_SIZE[value.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether shape, dtype and every bit agree."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(bits(left), bits(right))

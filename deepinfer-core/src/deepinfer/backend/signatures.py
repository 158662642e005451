"""Compare the parameters of a kernel with those of its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["signature_difference"]


def signature_difference(kernel: Callable[..., Any], reference: Callable[..., Any]) -> str | None:
    """Why a kernel cannot stand in for a reference, or None if it can.

    Same names, same order, same kinds, and a default exactly where the reference has one. Annotations are free.
    """
    try:
        found = inspect.signature(kernel)
    except (TypeError, ValueError):
        return "its parameters cannot be read; wrap it into a Python function with named parameters"
    expected = inspect.signature(reference)
    return None if _shape(found) == _shape(expected) else f"it takes {_text(found)}, the contract has {_text(expected)}"


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, bool]]:
    return [(p.name, p.kind, p.default is inspect.Parameter.empty) for p in signature.parameters.values()]


def _text(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))

"""Errors that cross between processes: type, message and field stay, and the traceback comes along as the cause."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

import deepinfer.errors
from deepinfer.errors import DeepInferError, EngineDead

__all__ = ["ErrorFrame", "LoopTraceback", "pack_error", "unpack_error"]


class LoopTraceback(Exception):
    """The traceback of an error in the loop's process, as text; the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class ErrorFrame(msgspec.Struct, array_like=True):
    """One error.

    Attributes:
        kind: name of its class in `deepinfer.errors`; of the nearest base there for a plugin's own.
        message: its text. field, problems: as its class has them. trace: its traceback and causes; empty if it was
            never raised.
    """

    kind: str
    message: str
    field: str | None = None
    problems: tuple[str, ...] = ()
    trace: str = ""


def pack_error(error: BaseException) -> ErrorFrame:
    """An error as plain data; one that nobody raised on purpose becomes an `EngineDead` that names its type."""
    trace = ""
    if error.__traceback__ is not None or error.__cause__ is not None:
        trace = "".join(traceback.format_exception(error))
    if not isinstance(error, DeepInferError):
        return ErrorFrame(EngineDead.__name__, f"{type(error).__name__}: {error}", trace=trace)
    kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == deepinfer.errors.__name__)
    return ErrorFrame(kind, str(error), getattr(error, "field", None), tuple(getattr(error, "problems", ())), trace)


def unpack_error(frame: ErrorFrame) -> DeepInferError:
    """The error of a frame."""
    kind: Any = getattr(deepinfer.errors, frame.kind)
    # The message is whole already: constructors would put the field in front of it once more.
    error: DeepInferError = kind.__new__(kind)
    error.args = (frame.message,)
    if issubclass(kind, deepinfer.errors.ConfigError | deepinfer.errors.InvalidRequest):
        error.field = frame.field  # type: ignore[attr-defined]
    if issubclass(kind, deepinfer.errors.CheckpointError):
        error.problems = frame.problems  # type: ignore[attr-defined]
    if frame.trace:
        error.__cause__ = LoopTraceback(frame.trace)
    return error

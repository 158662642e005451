"""Every error that DeepInfer raises on purpose.

Each message names the thing, the value that was found and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AcceleratorUnavailable",
    "CapabilityError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "EngineDead",
    "GrammarError",
    "InvalidRequest",
    "PluginError",
    "RequestFailed",
]


class DeepInferError(Exception):
    """Base class: catching it catches everything the project raises on purpose."""


class ConfigError(DeepInferError, ValueError):
    """A setting or a checkpoint's config holds a value that cannot work."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.field = field


class CheckpointError(DeepInferError):
    """A checkpoint is missing, truncated or does not match its config."""

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__("\n  - ".join([message, *problems]))
        self.problems = problems


class AcceleratorUnavailable(DeepInferError):
    """The asked (or any) accelerator cannot be used on this machine."""


class CapabilityError(DeepInferError):
    """The selected backend cannot do what a setting demands."""


class PluginError(DeepInferError):
    """A plugin is broken, incompatible or clashes with another."""


class InvalidRequest(DeepInferError, ValueError):
    """A request holds a value that cannot be served; other requests are unaffected."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.field = field


class RequestFailed(DeepInferError):
    """The device could not finish a request (a step failed, or its logits were not numbers); others go on."""


class CapacityError(DeepInferError):
    """A request or a model needs more memory than there is; the numbers are in the message."""


class GrammarError(DeepInferError, ValueError):
    """A structured-output grammar cannot be compiled or followed."""


class EngineDead(DeepInferError):
    """The engine stopped and accepts no more work; the cause is chained."""

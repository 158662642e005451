"""Light half of a plugin: what it offers, as data and text, with nothing but the standard library.

A distribution names a *descriptor module* in the entry-point group `deepinfer.plugins`. That module imports this one
and nothing heavy, describes what it offers and implements hooks:

    from deepinfer.api.descriptor import BackendDescriptor, Probe

    def probe():
        return Probe.match() if board_present() else Probe.no_match("no Acme board", hardware_present=False)

    ACME = BackendDescriptor(
        name="acme", api=(1, 0), module="acme_deepinfer.backend:create_backend", summary="Acme boards", probe=probe
    )

    def deepinfer_register_backends(registry):
        registry.add(ACME)

Every function of the module whose name starts with `deepinfer_` is a hook implementation; one that has no
specification is refused. `hookimpl(tryfirst=True)` and `hookimpl(trylast=True)` order implementations of one hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "HOOK_OPTIONS",
    "BackendDescriptor",
    "CodecDescriptor",
    "Descriptor",
    "KVStoreDescriptor",
    "ModelDescriptor",
    "ObserverDescriptor",
    "Probe",
    "hookimpl",
]

API_VERSION = (1, 0)
"""(major, minor) of `deepinfer.api`. A minor step adds, a major step may remove. Plugins write their own literal."""

ENTRY_POINT_GROUP = "deepinfer.plugins"

HOOK_OPTIONS = "__deepinfer_hook__"
"""Attribute under which `hookimpl` leaves its options on the function."""

F = TypeVar("F", bound=Callable[..., Any])


def hookimpl(*, tryfirst: bool = False, trylast: bool = False) -> Callable[[F], F]:
    """Order a hook implementation before or after the others of the same hook."""

    def mark(function: F) -> F:
        setattr(function, HOOK_OPTIONS, {"tryfirst": tryfirst, "trylast": trylast})
        return function

    return mark


@dataclass(frozen=True)
class Probe:
    """Answer of a backend to "can you run on this machine?".

    Attributes:
        status: `match`, `no_match`, or `error` when the probe itself failed.
        reasons: everything that stands in the way (no match), or remarks (match); all of them, not the first.
        devices: number of devices that can be used.
        hardware_present: for `no_match`, whether the hardware is there but cannot be used. Under `auto`, absent
            hardware lets the CPU run; present but unusable hardware is an error that the user should see.
        traceback: for `error`, the text of the exception.
    """

    status: Literal["match", "no_match", "error"]
    reasons: tuple[str, ...] = ()
    devices: int = 0
    hardware_present: bool = False
    traceback: str = ""

    @classmethod
    def match(cls, *remarks: str, devices: int = 1) -> Probe:
        """The backend can run here."""
        return cls("match", remarks, devices=devices, hardware_present=True)

    @classmethod
    def no_match(cls, *reasons: str, hardware_present: bool) -> Probe:
        """The backend cannot run here, for all these reasons (at least one)."""
        if not reasons:
            raise ValueError("Probe.no_match needs at least one reason")
        return cls("no_match", reasons, hardware_present=hardware_present)


def _always() -> Probe:
    return Probe.match()


@dataclass(frozen=True)
class Descriptor:
    """What every descriptor says.

    Attributes:
        name: unique name among descriptors of its kind; lower case letters, digits, `-` and `_`.
        api: (major, minor) of `deepinfer.api` that the plugin was written for, as a literal.
        module: heavy module and factory as text, `package.module:function`; imported only when selected.
        summary: one line for lists.
    """

    name: str
    api: tuple[int, int]
    module: str
    summary: str = ""


@dataclass(frozen=True)
class BackendDescriptor(Descriptor):
    """A backend; the factory takes no argument and returns a `deepinfer.api.backend.Backend`.

    Attributes:
        probe: quick look at the machine: no allocation, no device context, no heavy import.
        is_accelerator: False for a backend that `auto` never prefers (the CPU).
        variables: environment variables that it reads (full names) and their meaning.
        verified_on: hardware on which it has been run, for `deepinfer backends info`; empty means none.
    """

    probe: Callable[[], Probe] = _always
    is_accelerator: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    verified_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelDescriptor(Descriptor):
    """A model family; the factory takes (checkpoint directory, backend, settings, resolver of backends by name).

    Attributes:
        architectures: values of `architectures` in a checkpoint's config that it serves.
        ops: names of the ops that its graph asks the kernel table for; empty if it does not say. Kernels that none of
            them leads to are reported by `deepinfer doctor`.
    """

    architectures: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class CodecDescriptor(Descriptor):
    """A text and chat codec, for lists; the object itself comes from the hook `deepinfer_make_codec`.

    Attributes:
        model_types: values of `model_type` in a checkpoint's config that it serves.
    """

    model_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class KVStoreDescriptor(Descriptor):
    """A store for cache pages outside the device; the factory takes the settings and returns the store."""


@dataclass(frozen=True)
class ObserverDescriptor(Descriptor):
    """Someone who hears of every step; the factory takes the settings and returns a `StepObserver`."""

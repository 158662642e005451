"""Registries that the hooks fill: names, origins, the API handshake and the refusal of clashes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepinfer.api.descriptor import API_VERSION, Descriptor
from deepinfer.errors import PluginError

__all__ = ["CORE_DISTRIBUTION", "CORE_NAMES", "FORBIDDEN_NAMES", "Origin", "Registered", "Registry", "check_api"]

CORE_DISTRIBUTION = "deepinfer-core"
CORE_NAMES = frozenset({"cpu", "sim"})
"""Backend names that only core may register."""
FORBIDDEN_NAMES = frozenset({"auto", "composite", "native", "none", "reference"})
"""Names that mean something else in a setting, so nobody may register them."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")

D = TypeVar("D", bound=Descriptor)


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from: entry point, descriptor module, distribution and its version."""

    entry_point: str
    module: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Registered(Generic[D]):
    """A descriptor and where it came from."""

    descriptor: D
    origin: Origin


class Registry(Generic[D]):
    """Descriptors of one kind by name; `add` is what a hook implementation calls."""

    def __init__(self, kind: str, descriptor_type: type[D]) -> None:
        self.kind = kind
        self._type = descriptor_type
        self._entries: dict[str, Registered[D]] = {}
        self._conflicts: dict[str, list[Origin]] = {}
        self._origin: Origin | None = None

    def add(self, descriptor: D) -> None:
        """Offer a descriptor under its name.

        Raises:
            PluginError: wrong type, malformed or reserved name, incompatible `api`, or a module that is not text of
                the form `package.module:function`. A name that another distribution offers too is refused for both.
        """
        if self._origin is None:
            raise PluginError(f"{self.kind} registry: add() works only inside a registration hook")
        if not isinstance(descriptor, self._type):
            raise PluginError(
                f"{self._origin}: expected a {self._type.__name__} in the {self.kind} registry, "
                f"found {type(descriptor).__name__}"
            )
        self._check_name(descriptor.name, self._origin)
        check_api(descriptor, self._origin)
        if not isinstance(descriptor.module, str) or descriptor.module.count(":") != 1:
            raise PluginError(
                f"{self._origin}: {self.kind} {descriptor.name!r} must name its heavy module as text "
                f"'package.module:function', found {descriptor.module!r}"
            )
        self._enter(descriptor, self._origin)

    def _check_name(self, name: str, origin: Origin) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(
                f"{origin}: {self.kind} name {name!r} is malformed; use lower case letters, digits, '-' and '_'"
            )
        if self.kind != "backend":
            return
        if name in FORBIDDEN_NAMES or (name in CORE_NAMES and origin.distribution != CORE_DISTRIBUTION):
            owner = "a word of the settings" if name in FORBIDDEN_NAMES else f"the backend of {CORE_DISTRIBUTION}"
            raise PluginError(
                f"backend name {name!r} is reserved ({owner} {_core_version()}), but {origin} offers it too; "
                f"the plugin must choose another name"
            )

    def _enter(self, descriptor: D, origin: Origin) -> None:
        name = descriptor.name
        if name in self._conflicts:
            self._conflicts[name].append(origin)
        elif name in self._entries:
            # Neither wins: the order of installed distributions must not decide what runs.
            self._conflicts[name] = [self._entries.pop(name).origin, origin]
        else:
            self._entries[name] = Registered(descriptor, origin)
            return
        raise PluginError(self.conflict(name) or "")

    def conflict(self, name: str) -> str | None:
        """Why nobody provides this name although several offer it; None when there is no clash."""
        origins = self._conflicts.get(name)
        if not origins:
            return None
        names = " and ".join(str(origin) for origin in origins)
        return f"{self.kind} {name!r} is offered by {names}; uninstall one or leave it out with DEEPINFER_PLUGINS"

    def conflicts(self) -> dict[str, list[Origin]]:
        """Names that more than one distribution offers, with their origins."""
        return {name: list(origins) for name, origins in self._conflicts.items()}

    def get(self, name: str) -> Registered[D] | None:
        """The entry of this name, or None."""
        return self._entries.get(name)

    def names(self) -> list[str]:
        """Registered names in alphabetical order."""
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Registered[D]]:
        return iter([self._entries[name] for name in self.names()])

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, origin: Origin) -> None:
        """Say on whose behalf the next `add` calls come (called by the plugin host)."""
        self._origin = origin

    def end(self) -> None:
        """Close the registry for `add` again (called by the plugin host)."""
        self._origin = None

    def withdraw(self, origin: Origin) -> None:
        """Remove everything that a failed plugin had already added (called by the plugin host)."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry.origin != origin}


def check_api(descriptor: Descriptor, origin: Origin) -> None:
    """Compare the API version that a plugin was written for with ours, before anything heavy is imported.

    Raises:
        PluginError: another major version, or a newer minor version than this core offers; says which side to upgrade.
    """
    api = descriptor.api
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(part, int) for part in api)):
        raise PluginError(f"{origin}: {descriptor.name!r} must give api as (major, minor), found {api!r}")
    if api[0] == API_VERSION[0] and api[1] <= API_VERSION[1]:
        return
    theirs, ours = f"{api[0]}.{api[1]}", f"{API_VERSION[0]}.{API_VERSION[1]}"
    upgrade = CORE_DISTRIBUTION if api > API_VERSION else origin.distribution
    raise PluginError(
        f"{origin}: {descriptor.name!r} was written for plugin API {theirs}, {CORE_DISTRIBUTION} {_core_version()} "
        f"offers {ours}; upgrade {upgrade} (pip install --upgrade {upgrade})"
    )


def _core_version() -> str:
    from deepinfer import __version__

    return __version__

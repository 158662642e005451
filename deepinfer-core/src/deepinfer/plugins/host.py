"""Find, check and load plugins; a broken one is reported and never breaks the others."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import logging
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pluggy

from deepinfer.api.descriptor import (
    ENTRY_POINT_GROUP,
    HOOK_OPTIONS,
    BackendDescriptor,
    CodecDescriptor,
    KVStoreDescriptor,
    ModelDescriptor,
    ObserverDescriptor,
    Probe,
)
from deepinfer.errors import ConfigError, DeepInferError, PluginError
from deepinfer.plugins import hookspecs
from deepinfer.plugins.registry import CORE_DISTRIBUTION, Origin, Registered, Registry

__all__ = ["BUILT_IN", "PluginHost", "PluginRecord", "default_host", "import_factory"]

BUILT_IN = {"cpu": "deepinfer.cpu.descriptor", "deepseek_v41": "deepinfer.models.deepseek_v41.descriptor"}
"""Core's own entry points, for a source tree that was put on the path without being installed."""

HOOK_PREFIX = "deepinfer_"

_REGISTRY_HOOKS = {
    "deepinfer_register_backends": "backends",
    "deepinfer_register_models": "models",
    "deepinfer_register_codecs": "codecs",
    "deepinfer_register_kv_stores": "kv_stores",
    "deepinfer_register_observers": "observers",
}

_logger = logging.getLogger("deepinfer")


@dataclass(frozen=True)
class PluginRecord:
    """What became of one entry point.

    Attributes:
        origin: entry point, descriptor module, distribution, version.
        status: `loaded`, `failed` or `left out` (by `DEEPINFER_PLUGINS`).
        error: for a failure, one paragraph: what, which distribution and version, cause.
        traceback: for a failure by an exception of the plugin, its text.
        hooks: names of the hooks that it implements.
        cause: the exception itself, for chaining.
    """

    origin: Origin
    status: Literal["loaded", "failed", "left out"]
    error: str = ""
    traceback: str = ""
    hooks: tuple[str, ...] = ()
    cause: BaseException | None = None

    @property
    def may_offer_backend(self) -> bool:
        """Whether a backend may be missing because of this failure: unknown hooks count as yes."""
        return self.status == "failed" and (not self.hooks or "deepinfer_register_backends" in self.hooks)


class _Manager(pluggy.PluginManager):
    """Takes every function named `deepinfer_*` of a module as a hook implementation.

    So a descriptor module needs neither pluggy nor a decorator, and a misspelt hook is seen instead of ignored.
    """

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Options of a hook implementation, or None if the name is not one."""
        if not name.startswith(HOOK_PREFIX):
            return None
        function = getattr(plugin, name)
        if not callable(function) or isinstance(function, (type, ModuleType)):
            return None
        marked = getattr(function, HOOK_OPTIONS, {})
        return {
            "wrapper": False,
            "hookwrapper": False,
            "optionalhook": False,
            "tryfirst": bool(marked.get("tryfirst")),
            "trylast": bool(marked.get("trylast")),
            "specname": None,
        }


class PluginHost:
    """All plugins of a process after discovery: records, registries and the hooks that are called at start."""

    def __init__(self) -> None:
        self.records: list[PluginRecord] = []
        self.backends: Registry[BackendDescriptor] = Registry("backend", BackendDescriptor)
        self.models: Registry[ModelDescriptor] = Registry("model", ModelDescriptor)
        self.codecs: Registry[CodecDescriptor] = Registry("codec", CodecDescriptor)
        self.kv_stores: Registry[KVStoreDescriptor] = Registry("KV store", KVStoreDescriptor)
        self.observers: Registry[ObserverDescriptor] = Registry("observer", ObserverDescriptor)
        self.manager = _Manager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self._probes: dict[str, Probe] = {}

    @classmethod
    def discover(cls, selection: str = "") -> PluginHost:
        """Load every installed plugin that `selection` (the text of `DEEPINFER_PLUGINS`) admits.

        Raises:
            ConfigError: the selection names a plugin that is not installed.
        """
        host = cls()
        found = list(_entry_points())
        admitted = _admitted(selection, [origin.entry_point for origin in found])
        for origin in found:
            if origin.entry_point in admitted:
                host.load(origin)
            else:
                host.records.append(PluginRecord(origin, "left out"))
        return host

    def load(self, origin: Origin) -> PluginRecord:
        """Import one descriptor module and let it register; a failure is kept in its record."""
        hooks: tuple[str, ...] = ()
        try:
            module = importlib.import_module(origin.module)
            hooks = tuple(name for name in vars(module) if self.manager.parse_hookimpl_opts(module, name))
            self._register(module, origin)
            record = PluginRecord(origin, "loaded", hooks=hooks)
        except PluginError as error:
            record = PluginRecord(origin, "failed", error=str(error), hooks=hooks, cause=error)
        except (Exception, SystemExit) as error:
            record = PluginRecord(
                origin,
                "failed",
                error=f"plugin {origin.entry_point!r} of {origin}: importing {origin.module} failed: "
                f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
                hooks=hooks,
                cause=error,
            )
        self.records.append(record)
        return record

    def _register(self, module: ModuleType, origin: Origin) -> None:
        """Enter a module into pluggy and call its registration hooks; undo everything if one fails."""
        name = f"{origin.entry_point} ({origin.distribution})"
        try:
            self.manager.register(module, name=name)
            self.manager.check_pending()
            for hook, registry in _REGISTRY_HOOKS.items():
                self._call_registration(module, hook, getattr(self, registry), origin)
        except Exception as error:
            if self.manager.is_registered(module):
                self.manager.unregister(module)
            for registry in _REGISTRY_HOOKS.values():
                getattr(self, registry).withdraw(origin)
            if isinstance(error, pluggy.PluginValidationError):
                raise PluginError(_validation_text(module, origin, error)) from error
            raise

    def _call_registration(self, module: ModuleType, hook: str, registry: Registry[Any], origin: Origin) -> None:
        registry.begin(origin)
        try:
            self._only(module, hook)(registry=registry)
        finally:
            registry.end()

    # What others ask.

    def failures(self) -> list[PluginRecord]:
        """Records of the plugins that failed."""
        return [record for record in self.records if record.status == "failed"]

    def variables(self) -> dict[str, str]:
        """Environment variables that installed backends declare, with their meaning."""
        return {name: text for entry in self.backends for name, text in entry.descriptor.variables.items()}

    def probe(self, name: str) -> Probe:
        """Ask a registered backend once whether it can run here; an exception becomes the answer `error`.

        Raises:
            KeyError: no backend of this name is registered.
        """
        if name not in self._probes:
            entry = self.backends.get(name)
            if entry is None:
                raise KeyError(name)
            self._probes[name] = _run_probe(entry)
        return self._probes[name]

    def load_backend(self, name: str) -> Any:
        """Import the heavy module of a registered backend and build the `Backend`.

        Raises:
            PluginError: the module cannot be imported, the factory fails, or what it returns is no backend of this
                name; distribution, version and cause are in the message.
            KeyError: no backend of this name is registered.
        """
        entry = self.backends.get(name)
        if entry is None:
            raise KeyError(name)
        factory = import_factory(entry)
        try:
            backend = factory()
        except Exception as error:
            raise PluginError(
                f"backend {name!r} of {entry.origin}: {entry.descriptor.module} raised {type(error).__name__}: {error}"
            ) from error
        from deepinfer.backend.backend import Backend  # Torch is imported from here on.

        if not isinstance(backend, Backend) or backend.name != name:
            found = f"a backend named {backend.name!r}" if isinstance(backend, Backend) else type(backend).__name__
            raise PluginError(
                f"backend {name!r} of {entry.origin}: {entry.descriptor.module} must return a "
                f"deepinfer.api.backend.Backend named {name!r}, found {found}"
            )
        return backend

    def model_for(self, architecture: str) -> Registered[ModelDescriptor]:
        """The model family that serves an `architectures` entry of a checkpoint's config.

        Raises:
            ConfigError: no installed plugin serves it; the message lists those that are served.
            PluginError: more than one does.
        """
        serving = [entry for entry in self.models if architecture in entry.descriptor.architectures]
        if len(serving) == 1:
            return serving[0]
        if serving:
            names = " and ".join(f"{entry.descriptor.name!r} of {entry.origin}" for entry in serving)
            raise PluginError(
                f"architecture {architecture!r} is served by {names}; leave one out with DEEPINFER_PLUGINS"
            )
        served = sorted(name for entry in self.models for name in entry.descriptor.architectures)
        raise ConfigError(
            f"{architecture!r} is served by no installed plugin; served: {', '.join(served) or 'none'}",
            field="architectures",
        )

    def make_codec(
        self, model_dir: Path, model_type: str, tokenizer_json: Path, served_names: tuple[str, ...] = ()
    ) -> Any:
        """The first codec that a plugin builds for a checkpoint; None if no plugin serves it.

        Raises:
            PluginError: a plugin that was asked failed; no other is tried, for the text would silently differ.
        """
        for implementation in reversed(self.manager.hook.deepinfer_make_codec.get_hookimpls()):
            try:
                codec = self._only(implementation.plugin, "deepinfer_make_codec")(
                    model_dir=model_dir, model_type=model_type, tokenizer_json=tokenizer_json, served_names=served_names
                )
            except DeepInferError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plugin {implementation.plugin_name}: deepinfer_make_codec raised {type(error).__name__}: {error}"
                ) from error
            if codec is not None:
                return codec
        return None

    def _only(self, plugin: Any, hook: str) -> Any:
        """Caller of a hook for one plugin alone."""
        others = [other for other in self.manager.get_plugins() if other is not plugin]
        return self.manager.subset_hook_caller(hook, others)

    def extend_cli(self, app: Any) -> list[PluginRecord]:
        """Let every plugin add commands; one that fails is skipped, reported in the log and returned."""
        failed = []
        for record in [record for record in self.records if "deepinfer_extend_cli" in record.hooks]:
            module = self.manager.get_plugin(f"{record.origin.entry_point} ({record.origin.distribution})")
            if module is None:
                continue
            try:
                self._only(module, "deepinfer_extend_cli")(app=app)
            except Exception as error:
                _logger.warning("%s: deepinfer_extend_cli raised %s: %s", record.origin, type(error).__name__, error)
                failed.append(record)
        return failed


def import_factory(entry: Registered[Any]) -> Any:
    """Import the heavy module that a descriptor names and return its factory.

    Raises:
        PluginError: the import fails or the attribute is missing; distribution, version and cause are in the message.
    """
    module_name, _, attribute = entry.descriptor.module.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise PluginError(
            f"{entry.descriptor.name!r} of {entry.origin}: importing {entry.descriptor.module} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


@functools.cache
def default_host() -> PluginHost:
    """The plugins of this process, discovered on first use under the `DEEPINFER_PLUGINS` of that moment."""
    return PluginHost.discover(os.environ.get("DEEPINFER_PLUGINS", ""))


def _run_probe(entry: Registered[BackendDescriptor]) -> Probe:
    try:
        answer = entry.descriptor.probe()
        if not isinstance(answer, Probe):
            raise TypeError(f"probe() must return a Probe, found {type(answer).__name__}")
    except (Exception, SystemExit) as error:
        return Probe("error", (f"{type(error).__name__}: {error}",), traceback=traceback.format_exc())
    return answer


def _entry_points() -> Iterable[Origin]:
    """Origins in the order core first, then by distribution and name; the same entry point twice counts once."""
    seen: dict[tuple[str, str, str], Origin] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
        distribution = re.sub(r"[-_.]+", "-", distribution).lower()
        seen.setdefault((distribution, point.name, point.value), Origin(point.name, point.value, distribution, version))
    origins = sorted(seen.values(), key=lambda o: (o.distribution != CORE_DISTRIBUTION, o.distribution, o.entry_point))
    if not any(origin.distribution == CORE_DISTRIBUTION for origin in origins):
        from deepinfer import __version__

        origins = [Origin(name, module, CORE_DISTRIBUTION, __version__) for name, module in BUILT_IN.items()] + origins
    return origins


def _admitted(selection: str, names: list[str]) -> set[str]:
    """Names that `a,b,-c` admits: only those without a minus if there are any, otherwise all but those with one."""
    words = [word.strip() for word in selection.split(",") if word.strip()]
    denied = {word[1:].strip() for word in words if word.startswith("-")}
    wanted = {word for word in words if not word.startswith("-")}
    for word in sorted(denied | wanted):
        if word not in names:
            raise ConfigError(
                f"no installed plugin is named {word!r}; installed: {', '.join(names)}", field="DEEPINFER_PLUGINS"
            )
    return (wanted or set(names)) - denied


def _validation_text(module: ModuleType, origin: Origin, error: pluggy.PluginValidationError) -> str:
    """A hook without a specification is named with its nearest neighbour; other refusals keep pluggy's words."""
    known = [name for name in vars(hookspecs) if name.startswith(HOOK_PREFIX)]
    unknown = [
        name
        for name in vars(module)
        if name.startswith(HOOK_PREFIX) and callable(getattr(module, name)) and name not in known
    ]
    if not unknown:
        return f"plugin {origin.entry_point!r} of {origin}: {error}"
    hints = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return (
        f"plugin {origin.entry_point!r} of {origin} implements a hook that DeepInfer does not have: "
        f"{', '.join(hints)}; hooks: {', '.join(known)}"
    )

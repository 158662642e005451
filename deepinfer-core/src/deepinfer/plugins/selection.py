"""Which backend runs the model: argument, then `DEEPINFER_ACCELERATOR`, then `auto`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.api.descriptor import Probe
from deepinfer.errors import AcceleratorUnavailable, ConfigError, PluginError

if TYPE_CHECKING:
    from deepinfer.backend.backend import Backend
    from deepinfer.plugins.host import PluginHost

__all__ = ["KNOWN_DISTRIBUTIONS", "Selection", "select_accelerator", "select_backend"]

KNOWN_DISTRIBUTIONS = {"nvidia": "deepinfer-backend-cuda", "ascend": "deepinfer-backend-ascend"}
"""Distribution that brings a backend, for the advice in error messages."""

SETTING = "DEEPINFER_ACCELERATOR"

_logger = logging.getLogger("deepinfer")


@dataclass(frozen=True)
class Selection:
    """The chosen backend.

    Attributes:
        name: name in the backend registry.
        because: why this one, for reports.
        notices: what the user should know although it is no error (absent hardware, failed plugins).
    """

    name: str
    because: str
    notices: tuple[str, ...] = ()


def select_accelerator(host: PluginHost, accelerator: str) -> Selection:
    """Choose a registered backend by the value of the setting (or of the argument that overrides it).

    A name is binding: if it cannot be used, the error says why, and nothing else is tried. Under `auto`:

    - exactly one accelerator matches: it is chosen; failed plugins are listed in the notices;
    - two or more match: the user has to choose;
    - none matches, and every installed accelerator answers that its hardware is *absent* (or none is installed): the
      CPU, with a notice per installed accelerator. So installing an accelerator's package on a machine without the
      hardware leaves the CPU working;
    - none matches, but one has its hardware present and unusable, or its probe failed, or a plugin that may offer a
      backend could not be loaded, or a name is offered twice: an error. The CPU would hide a fault that costs a
      factor of a thousand; whoever wants it says so with `DEEPINFER_ACCELERATOR=cpu`.

    Raises:
        AcceleratorUnavailable: the asked backend, or under `auto` an installed one, cannot be used.
        PluginError: the asked backend's plugin is broken, or two distributions offer it.
        ConfigError: two accelerators match under `auto`.
    """
    asked = accelerator.strip().lower() or "auto"
    return _automatic(host) if asked == "auto" else _explicit(host, asked)


def select_backend(accelerator: str, host: PluginHost | None = None) -> tuple[Backend, Selection]:
    """Choose, import and build the backend; notices go to the log.

    Args:
        accelerator: value of the argument or setting; `load_settings(accelerator=...).accelerator` already merges both.
        host: plugins to choose from; those of the process if None.

    Raises:
        AcceleratorUnavailable, ConfigError, PluginError: as `select_accelerator`; also if the heavy import fails.
    """
    if host is None:
        from deepinfer.plugins.host import default_host

        host = default_host()
    selection = select_accelerator(host, accelerator)
    for notice in selection.notices:
        _logger.warning("%s", notice)
    backend: Any = host.load_backend(selection.name)
    return backend, selection


def _explicit(host: PluginHost, asked: str) -> Selection:
    entry = host.backends.get(asked)
    if entry is None:
        _explain_missing(host, asked)
    probe = host.probe(asked)
    if probe.status == "match":
        return Selection(asked, f"asked for by name ({entry.origin})")
    what = "its probe failed" if probe.status == "error" else "it cannot run on this machine"
    _unavailable(host, asked, f"{entry.origin} offers it, but {what}: {'; '.join(probe.reasons)}", probe)


def _explain_missing(host: PluginHost, asked: str) -> NoReturn:
    """Say why nobody provides the asked name: a clash, a broken plugin of that name, or nothing installed."""
    conflict = host.backends.conflict(asked)
    if conflict:
        raise PluginError(conflict)
    for record in host.failures():
        names = {record.origin.entry_point, record.origin.distribution}
        if asked in names or KNOWN_DISTRIBUTIONS.get(asked) in names:
            raise PluginError(f"accelerator {asked!r} was asked for, but {record.error}") from record.cause
    _unavailable(host, asked, "no installed plugin offers it")


def _automatic(host: PluginHost) -> Selection:
    offered = [entry for entry in host.backends if entry.descriptor.is_accelerator]
    probes = {entry.descriptor.name: host.probe(entry.descriptor.name) for entry in offered}
    matches = [entry for entry in offered if probes[entry.descriptor.name].status == "match"]
    broken = [record.error for record in host.failures() if record.may_offer_backend]
    if len(matches) > 1:
        names = " and ".join(f"{entry.descriptor.name!r} ({entry.origin})" for entry in matches)
        example = matches[0].descriptor.name
        raise ConfigError(f"{names} can both run here; choose one, for example {SETTING}={example}", field=SETTING)
    notices, faults = list(broken), list(broken)
    for entry in offered:
        probe = probes[entry.descriptor.name]
        if probe.status == "match":
            continue
        text = f"{entry.descriptor.name!r} of {entry.origin} is not used: {'; '.join(probe.reasons)}"
        notices.append(text)
        if probe.status == "error" or probe.hardware_present:
            faults.append(text)
    if matches:
        return Selection(
            matches[0].descriptor.name, f"the only accelerator that matches ({matches[0].origin})", tuple(notices)
        )
    if faults:
        raise AcceleratorUnavailable(
            "no accelerator can be used, and running on the CPU instead would hide why:\n  - "
            + "\n  - ".join(faults)
            + f"\nRun `deepinfer doctor` for details, or set {SETTING}=cpu to run on the CPU."
        )
    reason = "hardware of the installed accelerators is absent" if offered else "no accelerator plugin is installed"
    return Selection("cpu", reason, tuple(notices))


def _unavailable(host: PluginHost, asked: str, why: str, probe: Probe | None = None) -> NoReturn:
    """Raise the error that says what is installed, why not, and what to type."""
    lines = [f"accelerator {asked!r} is not available: {why}", "  installed: " + _installed(host)]
    if probe is None and asked in KNOWN_DISTRIBUTIONS:
        lines.append(f"  to install it: pip install {KNOWN_DISTRIBUTIONS[asked]}")
    elif probe is None:
        lines.append("  to install it: pip install the distribution that offers a backend of this name")
    lines.append(f"  to run on the CPU instead: {SETTING}=cpu")
    if probe is not None and probe.traceback:
        lines.append(probe.traceback.rstrip())
    raise AcceleratorUnavailable("\n".join(lines))


def _installed(host: PluginHost) -> str:
    parts = []
    for entry in host.backends:
        probe = host.probe(entry.descriptor.name)
        state = "can run here" if probe.status == "match" else "; ".join(probe.reasons)
        parts.append(f"{entry.descriptor.name} ({entry.origin}: {state})")
    parts += [
        f"{record.origin.entry_point} ({record.origin}: {record.status.upper()})"
        for record in host.records
        if record.status != "loaded"
    ]
    return ", ".join(parts) or "nothing"

"""Can this machine run the Ascend backend? Looks at files and metadata only (standard library only).

`torch_npu` is not imported: without CANN that fails, and it takes a second.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from deepinfer.api.descriptor import Probe

__all__ = ["TORCH_NPU", "devices", "look"]

TORCH_NPU = "2.13"
"""Version of torch_npu whose operators the package was written for."""

LIBRARIES = ("libascendcl.so", "libhccl.so")
"""What torch_npu links to; both come with CANN."""


def devices(root: Path = Path("/")) -> tuple[int, ...]:
    """Indices of the device files below a root folder: `/dev/davinci0` is device 0."""
    names = (path.name for path in (root / "dev").glob("davinci*"))
    return tuple(sorted(int(match.group(1)) for name in names if (match := re.fullmatch(r"davinci(\d+)", name))))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cannot_load(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def look(
    root: Path = Path("/"),
    version: Callable[[str], str | None] = _version,
    cannot_load: Callable[[str], str | None] = _cannot_load,
) -> Probe:
    """The probe's answer with every reason that stands in the way.

    Args:
        root: folder that holds `dev`.
        version: installed version of a distribution, or None.
        cannot_load: why a shared library cannot be loaded, or None.
    """
    found = devices(root)
    reasons = []
    if not found:
        driver = (root / "dev" / "davinci_manager").exists()
        manager = "the driver is there, but lists no device" if driver else "no Ascend driver"
        reasons.append(f"{manager}: {root / 'dev'} has no davinci0")
    for library in LIBRARIES:
        if why := cannot_load(library):
            reasons.append(f"CANN is not set up: {why}; source its set_env.sh")
            break
    installed = version("torch-npu")
    if installed is None:
        reasons.append(f"torch-npu is not installed: pip install 'torch-npu=={TORCH_NPU}.*'")
    elif not installed.startswith(f"{TORCH_NPU}."):
        reasons.append(f"torch-npu {installed} is installed, {TORCH_NPU} is needed")
    if reasons:
        return Probe.no_match(*reasons, hardware_present=bool(found))
    return Probe.match("never run on hardware", devices=len(found))

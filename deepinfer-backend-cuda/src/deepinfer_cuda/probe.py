"""Can this machine run the NVIDIA backend? Asks the driver without making a context (standard library only)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from deepinfer.api.descriptor import Probe

__all__ = ["Driver", "look", "read_driver"]

MIN_DRIVER = 12000
"""Oldest CUDA version of a driver that current builds of PyTorch run on, as `cuDriverGetVersion` writes it."""

MIN_CAPABILITY = (8, 0)
"""bfloat16 matrix products came with compute capability 8.0."""

CU_MAJOR, CU_MINOR = 75, 76


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        version: newest CUDA version that it supports, 1000 x major + 10 x minor; 0 without a driver.
        capabilities: (major, minor) of each visible device.
        problem: why it could not be asked; empty if it could.
    """

    version: int = 0
    capabilities: tuple[tuple[int, int], ...] = field(default=())
    problem: str = ""


def read_driver(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Driver:
    """Ask libcuda for its version and the visible devices; `load` opens the library."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return Driver(problem="no NVIDIA driver: libcuda.so.1 cannot be loaded")
    value = ctypes.c_int()
    if code := cuda.cuInit(0):
        return Driver(problem=f"the NVIDIA driver does not start: cuInit gives error {code}")
    cuda.cuDriverGetVersion(ctypes.byref(value))
    version = value.value
    if code := cuda.cuDeviceGetCount(ctypes.byref(value)):
        return Driver(version, problem=f"the NVIDIA driver lists no devices: error {code}")
    found = []
    for index in range(value.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), CU_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), CU_MINOR, device)
        found.append((major.value, minor.value))
    return Driver(version, tuple(found))


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has_cuda_build() -> bool:
    """Whether the installed PyTorch was built for CUDA, without importing it."""
    spec = util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


def look(driver: Driver | None = None) -> Probe:
    """The probe's answer with every reason that stands in the way."""
    driver = read_driver() if driver is None else driver
    reasons = [driver.problem] if driver.problem else []
    usable = [pair for pair in driver.capabilities if pair >= MIN_CAPABILITY]
    if not driver.problem and not driver.capabilities:
        reasons.append("the NVIDIA driver sees no device; check CUDA_VISIBLE_DEVICES")
    elif driver.capabilities and not usable:
        names = ", ".join(f"{major}.{minor}" for major, minor in driver.capabilities)
        reasons.append(f"compute capability {names}: {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is the least")
    if driver.version and driver.version < MIN_DRIVER:
        reasons.append(f"the driver supports CUDA {driver.version // 1000}.{driver.version % 1000 // 10}; update it")
    if _package("triton") is None:
        reasons.append("Triton is not installed: pip install triton")
    if not _has_cuda_build():
        reasons.append("this PyTorch has no CUDA: install a CUDA build from pytorch.org")
    if reasons:
        return Probe.no_match(*reasons, hardware_present=bool(driver.capabilities))
    return Probe.match(devices=len(usable))

"""An installed backend that fails where a prompt tells it to: faults from the public API down to the kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.plugins.host import default_host

__all__ = ["FAULTY", "NOT_A_NUMBER", "RAISE", "faulty_backend"]

FAULTY = "faulty"
"""Name of the backend."""

RAISE, NOT_A_NUMBER = 499, 498
"""A row with this id makes the step raise in the middle, or its own numbers NaN."""

FILES = {
    "faulty_plugin/__init__.py": "",
    "faulty_plugin/descriptor.py": f'''
from deepinfer.api.descriptor import BackendDescriptor, Probe

FAULTY = BackendDescriptor(
    name="{FAULTY}", api=(1, 0), module="faulty_plugin.backend:FaultyBackend", summary="Fails on demand",
    probe=Probe.match, is_accelerator=False,
)

def deepinfer_register_backends(registry):
    registry.add(FAULTY)
''',
    "faulty_plugin/backend.py": f'''
from deepinfer.api.backend import Determinism, Kernel
from deepinfer.cpu.backend import CpuBackend  # Stands in for a vendor's backend.

def embedding(ids, table):
    if (ids == {RAISE}).any():
        raise RuntimeError("the device fell over")
    rows = table[ids.clamp(min=0)].masked_fill((ids < 0)[:, None], 0.0)
    return rows.masked_fill((ids == {NOT_A_NUMBER})[:, None], float("nan"))

class FaultyBackend(CpuBackend):
    name = "{FAULTY}"
    version = "1.0"

    def kernels(self, numerics):
        return {{**super().kernels(numerics), "embedding": Kernel(embedding, Determinism.ROW_INVARIANT)}}
''',
    "faulty_plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 1.0\n",
    "faulty_plugin-1.0.dist-info/entry_points.txt": f"[deepinfer.plugins]\n{FAULTY} = faulty_plugin.descriptor\n",
}


@contextmanager
def faulty_backend(folder: Path) -> Iterator[str]:
    """Install the backend into a folder that this process, and those that it starts, find packages in."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    default_host.cache_clear()
    try:
        yield FAULTY
    finally:
        sys.path.remove(str(folder))
        default_host.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "faulty_plugin"]:
            del sys.modules[name]

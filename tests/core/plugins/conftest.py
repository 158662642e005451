"""Fake descriptor modules: a plugin is a module in a temporary directory and an `Origin`."""

from __future__ import annotations

import sys
import textwrap

import pytest

from deepinfer.plugins.host import PluginHost
from deepinfer.plugins.registry import Origin

BACKEND = """
from deepinfer.api.descriptor import BackendDescriptor, Probe

def probe():
    {probe}

def deepinfer_register_backends(registry):
    registry.add(BackendDescriptor(name={name!r}, api={api!r}, module="{module}", probe=probe))
"""


class Workshop:
    """Writes descriptor modules and loads them into one host."""

    def __init__(self, folder):
        self.folder = folder
        self.host = PluginHost()
        self.count = 0

    def load(self, source, entry_point="plugin", distribution="some-dist", version="1.2"):
        self.count += 1
        module = f"fake_descriptor_{self.count}_{self.folder.name.replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        return self.host.load(Origin(entry_point, module, distribution, version))

    def backend(self, name, probe="return Probe.match()", api=(1, 0), module="fake.heavy:create", **origin):
        source = BACKEND.format(name=name, probe=probe, api=api, module=module)
        return self.load(source, **{"entry_point": name, "distribution": f"dist-{name}", **origin})

    def core(self):
        return self.host.load(Origin("cpu", "deepinfer.cpu.descriptor", "deepinfer-core", "0.1.0"))


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Workshop(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]

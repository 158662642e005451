"""A throw-away plugin, installed with pip into a folder of its own: found, selected, called; its broken twins reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

DESCRIPTOR = """
from deepinfer.api.descriptor import BackendDescriptor, Probe

ACME = BackendDescriptor(
    name="acme",
    api=(1, 0),
    module="{package}.backend:create_backend",
    summary="Throw-away backend over host memory",
    variables={{"DEEPINFER_ACME_SPEED": "How fast."}},
)

def deepinfer_register_backends(registry):
    registry.add(ACME)
"""

HEAVY = """
import torch

from deepinfer.api.backend import Capabilities, Determinism, Kernel
from deepinfer.api.ops import accumulate_dtype
from deepinfer.cpu.backend import CpuBackend  # Stands in for the vendor's runtime, which this test has not got.

calls = {"rms_norm": 0}

def rms_norm(x, weight, eps):
    calls["rms_norm"] += 1
    wide = x.to(accumulate_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

class AcmeBackend(CpuBackend):
    name = "acme"
    version = "1.0"

    def kernels(self, numerics):
        kernel = Kernel(rms_norm, Determinism.ROW_INVARIANT, note="counts its calls")
        return {**super().kernels(numerics), "rms_norm": kernel}

def create_backend():
    return AcmeBackend()
"""

RUN = """
import json, sys, torch
from pathlib import Path
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.plugins.host import default_host
from deepinfer.plugins.selection import select_backend
from deepinfer.settings import load_settings

settings = load_settings()
assert "acme_plugin.backend" not in sys.modules, "heavy module imported before it was selected"
backend, selection = select_backend(settings.accelerator)
table = KernelTable.bind(all_contracts(), backend, settings.numerics(), fallback=settings.fallback)
pluggy_calls = []
host = default_host()
host.manager.add_hookcall_monitoring(lambda *call: pluggy_calls.append(call[0]), lambda *call: None)
x, weight = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
for _ in range(100):
    table.rms_norm(x, weight, 1e-20)
    table.quantise_rows(x.repeat(1, 4), True)
seen = len(pluggy_calls)
host.make_codec(Path("d"), "no such model", Path("t"))
from acme_plugin.backend import calls, rms_norm
print(json.dumps({
    "name": backend.name, "because": selection.because, "calls": calls["rms_norm"],
    "plain": vars(table)["rms_norm"] is rms_norm, "pluggy_calls": seen, "monitor_works": len(pluggy_calls) > seen,
}))
"""

GENERATE = """
import json
from deepinfer import LLM, SamplingParams
from deepinfer.plugins.host import default_host

llm = LLM(model="tiny", max_model_len=64, max_num_seqs=2)
from acme_plugin.backend import calls
before = calls["rms_norm"]
pluggy_calls = []
default_host().manager.add_hookcall_monitoring(lambda *call: pluggy_calls.append(call[0]), lambda *call: None)
outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
print(json.dumps({
    "tokens": [len(output.outputs[0].token_ids) for output in outputs],
    "called": calls["rms_norm"] > before,
    "pluggy_calls": pluggy_calls,
}))
"""


def make_wheel(folder: Path, name: str, files: dict[str, str], entry_point: str, version: str = "1.0") -> Path:
    """Write a wheel: the files of one package, and an entry point that names its descriptor module."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    contents = {f"{package}/{path}": textwrap.dedent(text) for path, text in {"__init__.py": "", **files}.items()}
    contents |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[deepinfer.plugins]\n{entry_point} = {package}.descriptor\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


class Site:
    """A folder that pip installs into and that subprocesses see beside the environment of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels = folder / "site", folder
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("DEEPINFER_")}
        path = [str(self.folder), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))

    def install(
        self, name: str, files: dict[str, str], entry_point: str, version: str = "1.0", *, pip: bool = False
    ) -> None:
        """Install a generated wheel: with pip, or by unpacking it, which leaves the same files in less time."""
        wheel = make_wheel(self.wheels, name, files, entry_point, version)
        if not pip:
            zipfile.ZipFile(wheel).extractall(self.folder)
            return
        options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(self.folder)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | variables
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
        )

    def deepinfer(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "deepinfer", *arguments, **variables)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture
def acme(site):
    files = {"descriptor.py": DESCRIPTOR.format(package="acme_plugin"), "backend.py": HEAVY}
    site.install("acme-plugin", files, "acme", pip=True)
    return site


def plugin_row(site: Site, name: str) -> dict:
    rows = json.loads(site.deepinfer("backends", "list", "--json").stdout)["plugins"]
    return next(row for row in rows if row["distribution"] == name)


def test_plugin_is_found_selected_and_called_without_pluggy(acme):
    done = acme.python("-c", RUN, DEEPINFER_ACCELERATOR="acme", DEEPINFER_ACME_SPEED="9")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == {
        "name": "acme",
        "because": "asked for by name (acme-plugin 1.0)",
        "calls": 100,
        "plain": True,
        "pluggy_calls": 0,
        "monitor_works": True,
    }
    assert "DEEPINFER_ACME_SPEED" not in done.stderr


def test_public_api_generates_with_the_kernel_of_the_plugin(acme, tmp_path):
    done = acme.python("-c", GENERATE, DEEPINFER_ACCELERATOR="acme", DEEPINFER_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": [4, 4], "called": True, "pluggy_calls": []}


def test_plugin_in_the_command_line(acme):
    listed = json.loads(acme.deepinfer("backends", "list", "--json").stdout)
    assert listed["selection"]["selected"] == "acme"
    row = next(row for row in listed["backends"] if row["name"] == "acme")
    assert (row["status"], row["distribution"], row["version"]) == ("match", "acme-plugin", "1.0")
    ops = json.loads(acme.deepinfer("backends", "ops", "acme", "--json").stdout)
    bound = {row["op"]: row for row in ops["ops"]}
    assert bound["rms_norm"]["kind"] == "native"
    assert bound["rms_norm"]["backend"] == "acme"
    assert bound["rms_norm"]["note"] == "counts its calls"
    info = acme.deepinfer("backends", "info", "acme")
    assert "never run on hardware" in info.stdout
    doctor = acme.deepinfer("doctor")
    assert doctor.returncode == 0, doctor.stdout


def test_two_plugins_under_auto_need_a_choice(acme):
    twin = DESCRIPTOR.format(package="bolt_plugin").replace('"acme"', '"bolt"')
    acme.install("bolt-plugin", {"descriptor.py": twin, "backend.py": HEAVY}, "bolt")
    done = acme.python("-c", RUN)
    assert done.returncode != 0
    assert "ConfigError: DEEPINFER_ACCELERATOR: 'acme' (acme-plugin 1.0) and 'bolt' (bolt-plugin 1.0)" in done.stderr


def test_twin_that_cannot_be_imported(acme):
    acme.install("twin-plugin", {"descriptor.py": "import library_that_is_gone\n"}, "twin", "2.5")
    row = plugin_row(acme, "twin-plugin")
    assert row["status"] == "failed"
    assert "plugin 'twin' of twin-plugin 2.5" in row["error"]
    assert "No module named 'library_that_is_gone'" in row["error"]
    assert json.loads(acme.python("-c", RUN, DEEPINFER_ACCELERATOR="acme").stdout)["calls"] == 100
    asked = acme.python("-c", RUN, DEEPINFER_ACCELERATOR="twin")
    assert "PluginError: accelerator 'twin' was asked for, but plugin 'twin' of twin-plugin 2.5" in asked.stderr
    doctor = acme.deepinfer("doctor", "--json")
    assert doctor.returncode == 1
    report = json.loads(doctor.stdout)
    assert [check["name"] for check in report["checks"] if check["status"] == "failure"] == ["plugin twin"]


def test_twin_whose_heavy_module_cannot_be_imported(site):
    files = {"descriptor.py": DESCRIPTOR.format(package="acme_plugin"), "backend.py": "import library_that_is_gone\n"}
    site.install("acme-plugin", files, "acme", "3.1")
    done = site.python("-c", RUN, DEEPINFER_ACCELERATOR="auto")
    assert done.returncode != 0
    assert "PluginError: 'acme' of acme-plugin 3.1: importing acme_plugin.backend:create_backend failed" in done.stderr
    assert "No module named 'library_that_is_gone'" in done.stderr


def test_twin_of_another_api_major(site):
    source = DESCRIPTOR.format(package="acme_plugin").replace("api=(1, 0)", "api=(2, 0)")
    files = {"descriptor.py": source, "backend.py": "raise RuntimeError('must not be imported')\n"}
    site.install("acme-plugin", files, "acme")
    row = plugin_row(site, "acme-plugin")
    assert "acme-plugin 1.0: 'acme' was written for plugin API 2.0" in row["error"]
    assert "upgrade deepinfer-core (pip install --upgrade deepinfer-core)" in row["error"]
    done = site.python("-c", RUN, DEEPINFER_ACCELERATOR="acme")
    assert "accelerator 'acme' was asked for, but acme-plugin 1.0: 'acme' was written for plugin API 2.0" in done.stderr
    assert "must not be imported" not in done.stderr


def test_twin_of_the_same_name(acme):
    files = {"descriptor.py": DESCRIPTOR.format(package="evil_plugin"), "backend.py": HEAVY}
    acme.install("evil-plugin", files, "evil", "6.6")
    asked = acme.python("-c", RUN, DEEPINFER_ACCELERATOR="acme")
    assert "PluginError: backend 'acme' is offered by acme-plugin 1.0 and evil-plugin 6.6" in asked.stderr
    rows = json.loads(acme.deepinfer("backends", "list", "--json").stdout)["backends"]
    assert next(row["status"] for row in rows if row["name"] == "acme") == "conflict"
    left_out = acme.python("-c", RUN, DEEPINFER_ACCELERATOR="acme", DEEPINFER_PLUGINS="-evil")
    assert json.loads(left_out.stdout)["calls"] == 100


def test_twin_whose_probe_raises(site):
    source = DESCRIPTOR.format(package="acme_plugin").replace(
        "variables=", "probe=lambda: open('/no/such/device'), variables="
    )
    site.install("acme-plugin", {"descriptor.py": source, "backend.py": HEAVY}, "acme")
    automatic = site.python("-c", RUN)
    assert "AcceleratorUnavailable" in automatic.stderr
    assert "FileNotFoundError" in automatic.stderr
    assert "DEEPINFER_ACCELERATOR=cpu" in automatic.stderr
    shown = site.deepinfer("backends", "info", "acme", "--json")
    assert json.loads(shown.stdout)["status"] == "error"
    forced = site.deepinfer("backends", "list", "--json", DEEPINFER_ACCELERATOR="cpu")
    assert json.loads(forced.stdout)["selection"]["selected"] == "cpu"


def test_plugin_without_its_hardware_leaves_the_cpu_working(site):
    source = DESCRIPTOR.format(package="acme_plugin").replace(
        "variables=", "probe=lambda: Probe.no_match('no Acme board', hardware_present=False), variables="
    )
    site.install("acme-plugin", {"descriptor.py": source, "backend.py": "raise RuntimeError('not needed')\n"}, "acme")
    listed = site.deepinfer("backends")
    assert "no Acme board" in listed.stdout
    assert "* would run (hardware of the installed accelerators is absent)" in listed.stdout
    assert site.deepinfer("doctor").returncode == 0

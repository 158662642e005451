"""What the import contracts of `nox -s lint` cannot see: vendor devices behind attributes, and unlisted rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "deepinfer-core" / "src" / "deepinfer"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
DESCRIPTORS = [
    "deepinfer.cpu.descriptor",
    "deepinfer.models.deepseek_v41.descriptor",
    "deepinfer_ascend.descriptor",
    "deepinfer_recipe.descriptor",
    "deepinfer_recipe.text_descriptor",
    "deepinfer_cuda.descriptor",
]
VENDORS = {"cuda", "npu", "xpu", "hpu", "musa"}


def contract(name: str) -> dict:
    return next(entry for entry in CONTRACTS if entry["id"] == name)


def test_core_reaches_for_no_vendor_device():
    found = [
        f"{file.relative_to(CORE)}:{node.lineno}: .{node.attr}"
        for file in sorted(CORE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in VENDORS
    ]
    assert found == []


def test_every_room_has_its_layer():
    layers = {name.strip(" ()") for line in contract("rooms")["layers"] for name in line.split("|")}
    rooms = {path.parent.name for path in CORE.glob("*/__init__.py")}
    modules = {path.stem for path in CORE.glob("*.py")} - {"__init__", "__main__"}
    assert rooms | modules <= layers


def test_only_the_engine_and_the_command_line_see_all_rooms():
    forbidden = contract("backends")["forbidden_modules"]
    rooms = {f"deepinfer.{path.parent.name}" for path in CORE.glob("*/__init__.py")}
    assert rooms - set(forbidden) == {"deepinfer.api", "deepinfer.cpu"}


@pytest.mark.parametrize("module", ["deepinfer", "deepinfer.api.descriptor", *DESCRIPTORS])
def test_light_modules_import_nothing_heavy(module):
    heavy = ["torch", "numpy", "pydantic", "tokenizers", "deepseek_recipe", "msgspec", "typer", "huggingface_hub"]
    code = f"import sys, {module}; print(sorted(set({heavy}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "room", ["scheduler.scheduler", "scheduler.plan", "settings", "plugins.host", "plugins.selection"]
)
def test_rooms_without_torch_run_without_torch(room):
    code = f"import sys; sys.modules['torch'] = None; import deepinfer.{room}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

"""Rules that the syntax tree can show: backends import `deepinfer.api` only, core names no vendor's device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.backend.kernels import ENGINE_OPS
from deepinfer.models.deepseek_v41.descriptor import DEEPSEEK_V41

ROOT = Path(__file__).parents[3]
CORE = ROOT / "deepinfer-core" / "src" / "deepinfer"
VENDOR_ATTRIBUTES = {"cuda", "npu", "xpu", "mps", "hpu", "musa", "mtia", "privateuseone"}


def backend_files() -> list[Path]:
    packages = [CORE / "cpu", *ROOT.glob("deepinfer-backend-*/src/*")]
    return sorted(file for package in packages for file in package.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", backend_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_backends_import_only_the_api(file):
    allowed = ["deepinfer.api.", "deepinfer.cpu.", "deepinfer.__version__"]
    if not file.is_relative_to(CORE):
        allowed = ["deepinfer.api."]
    names = [
        name for name in imported(ast.parse(file.read_text())) if name == "deepinfer" or name.startswith("deepinfer.")
    ]
    assert [name for name in names if not f"{name}.".startswith(tuple(allowed)) and name not in allowed] == []


def test_the_rule_sees_what_it_should():
    tree = ast.parse("from deepinfer.backend import kernels\nimport deepinfer.ops\nfrom . import x")
    assert list(imported(tree)) == ["deepinfer.backend.kernels", "deepinfer.ops"]
    assert len(backend_files()) >= 5


def test_core_touches_no_vendor_attribute_of_torch():
    found = []
    for file in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                found += [f"{file.name}: torch.{node.attr}"] * (node.attr in VENDOR_ATTRIBUTES)
    assert found == []


def kernel_attributes(file: Path, owner: str) -> set[str]:
    """Attributes that are read from a variable or attribute of the given name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            value = node.value
            name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            if name == owner:
                found.add(node.attr)
    return found


def test_the_descriptor_names_the_ops_of_the_graph():
    assert kernel_attributes(CORE / "models" / "deepseek_v41" / "graph.py", "kernels") == set(DEEPSEEK_V41.ops)


def test_the_engine_asks_only_for_the_declared_ops():
    members = {"bindings", "numerics", "capabilities", "workspace_bytes", "backend_name", "unreachable"}
    asked = set()
    for file in (CORE / "engine").rglob("*.py"):
        asked |= kernel_attributes(file, "table") - members
    assert asked <= set(ENGINE_OPS)

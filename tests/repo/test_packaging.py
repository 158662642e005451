"""Versions, entry points, declared dependencies and licences of the distributions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer
from deepinfer.api.descriptor import ENTRY_POINT_GROUP
from deepinfer.plugins.host import BUILT_IN

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "deepinfer-backend-ascend": "deepinfer_ascend",
    "deepinfer-backend-cuda": "deepinfer_cuda",
    "deepinfer-core": "deepinfer",
    "deepinfer-recipe-bindings": "deepinfer_recipe",
}
EXAMPLE = ROOT / "examples" / "minimal-backend"
# Names that a distribution installs under another name than its own.
IMPORT_NAMES = {
    "pydantic_settings": "pydantic-settings",
    "deepseek_recipe": "deepseek-recipe",
    "deepinfer": "deepinfer-core",
    "torch_npu": "torch-npu",
}


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def requirement_names(folder: Path) -> set[str]:
    """Distributions that are required, or offered as an extra."""
    about = project(folder)
    lines = [
        *about["dependencies"],
        *(line for extra in about.get("optional-dependencies", {}).values() for line in extra),
    ]
    return {re.match(r"[\w.-]+", line).group().lower() for line in lines}


def imports(package: Path) -> set[str]:
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {package.name}


def test_all_distributions_have_one_version():
    versions = {name: project(ROOT / name)["version"] for name in PACKAGES}
    assert set(versions.values()) == {deepinfer.__version__}


def test_the_changelog_speaks_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(deepinfer.__version__)}\]?", text, re.MULTILINE)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_imported_is_declared(name):
    package = ROOT / name / "src" / PACKAGES[name]
    imported = {IMPORT_NAMES.get(module, module) for module in imports(package)}
    assert imported - requirement_names(ROOT / name) == set()


def test_entry_points_are_the_built_in_ones_and_name_real_modules():
    assert project(ROOT / "deepinfer-core")["entry-points"][ENTRY_POINT_GROUP] == BUILT_IN
    for name, package in PACKAGES.items():
        for module in project(ROOT / name)["entry-points"][ENTRY_POINT_GROUP].values():
            assert module.partition(".")[0] == package
            assert (ROOT / name / "src" / Path(*module.split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize("name", PACKAGES)
def test_distributions_carry_licence_readme_and_types(name):
    folder = ROOT / name
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert project(folder)["license"] == "Apache-2.0"
    assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    assert (folder / "src" / PACKAGES[name] / "py.typed").is_file()


def test_the_example_is_a_distribution_of_the_same_shape():
    assert requirement_names(EXAMPLE) == {"deepinfer-core"}
    assert (EXAMPLE / "src" / "acme_deepinfer" / "py.typed").is_file()

"""The structure map of the documentation and the tree say the same, in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
SOURCES = {
    "deepinfer-backend-ascend": ROOT / "deepinfer-backend-ascend" / "src" / "deepinfer_ascend",
    "deepinfer-core": ROOT / "deepinfer-core" / "src" / "deepinfer",
    "deepinfer-recipe-bindings": ROOT / "deepinfer-recipe-bindings" / "src" / "deepinfer_recipe",
    "deepinfer-backend-cuda": ROOT / "deepinfer-backend-cuda" / "src" / "deepinfer_cuda",
}


def section(title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", MAP, re.MULTILINE | re.DOTALL)
    assert match, f"docs/structure.md has no section {title!r}"
    return match.group(1)


def rows(title: str) -> dict[str, str]:
    found = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section(title), re.MULTILINE)
    assert len(found) == len(dict(found)), "a path is listed twice"
    return dict(found)


def files(package: Path) -> set[str]:
    """Modules of a package; a room's `__init__.py` speaks through the room's heading."""
    found = {file.relative_to(package) for file in package.rglob("*.py")}
    return {
        path.as_posix()
        for path in found
        if path.name != "__init__.py" or (path.parent == Path() and package.name == "deepinfer")
    }


@pytest.mark.parametrize("distribution", SOURCES)
def test_every_file_is_on_the_map_and_every_line_has_its_file(distribution):
    listed, present = set(rows(distribution)), files(SOURCES[distribution])
    assert present - listed == set(), "add these to docs/structure.md"
    assert listed - present == set(), "remove these from docs/structure.md"


def test_every_room_has_a_heading():
    core = SOURCES["deepinfer-core"]
    rooms = {file.parent.relative_to(core).as_posix() + "/" for file in core.rglob("*/__init__.py")}
    headings = set(re.findall(r"^### (\S+/)$", section("deepinfer-core"), re.MULTILINE))
    assert headings == rooms


def test_every_distribution_and_path_of_the_map_exists():
    distributions = {path.parent.name for path in ROOT.glob("deepinfer-*/pyproject.toml")}
    assert distributions == set(SOURCES)
    for path in rows("Around the packages"):
        assert (ROOT / path).exists(), path


def test_every_line_says_something():
    for title in [*SOURCES, "Around the packages"]:
        for path, text in rows(title).items():
            assert len(text) > 10, path

"""The generated parts of the documentation are complete, and what it shows as code is code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from deepinfer.backend.kernels import all_contracts
from deepinfer.cli import COMMANDS
from deepinfer.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("deepinfer-*/README.md"))
_spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_generator_is_used_and_every_mark_has_one():
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- generated: ([a-z-]+) -->", page.read_text())]
    assert sorted(marks) == sorted(hooks.GENERATORS)


def test_an_unknown_mark_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        hooks.on_page_markdown("<!-- generated: nothing -->")


def test_the_settings_page_has_every_variable():
    table = hooks.settings()
    assert all(f"| `{PREFIX}{name.upper()}` |" in table for name in Settings.model_fields)


def test_the_operation_page_has_every_contract():
    text = hooks.operations()
    missing = [name for name in all_contracts() if not re.search(rf"^### {name}$", text, re.MULTILINE)]
    assert missing == []


def test_the_command_page_has_every_command():
    text = hooks.commands()
    assert all(re.search(rf"^## deepinfer {name}\b", text, re.MULTILINE) for name in COMMANDS)


def test_the_plugin_reference_has_every_name_of_the_api():
    from deepinfer.api import backend, descriptor

    text = hooks.descriptors() + hooks.backend()
    names = [
        name for module in (backend, descriptor) for name in module.__all__ if isinstance(getattr(module, name), type)
    ]
    assert [name for name in names if f"### {name}\n" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        if "--8<--" not in block and not block.startswith(">>>"):
            ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_variables_that_a_page_names_exist(page):
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    named = set(re.findall(r"\bDEEPINFER_[A-Z0-9_]+\b", page.read_text(encoding="utf-8")))
    assert {name for name in named if name not in known and not name.startswith("DEEPINFER_TEST_")} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_a_page_shows_exist(page):
    lines = [line for language in ("console", "sh") for block in blocks(page, language) for line in block.splitlines()]
    asked = [words.group(1) for line in lines if (words := re.search(r"(?:^|[ /])deepinfer ([a-z]+)", line))]
    assert set(asked) <= set(COMMANDS)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_starts_with_one_line_to_run_and_one_to_test():
    run, test = blocks(ROOT / "README.md", "sh")[:2]
    assert run.count("\n") == test.count("\n") == 1
    assert "deepinfer generate" in run
    assert "nox -s tests" in test

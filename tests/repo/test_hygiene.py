from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("hygiene", Path(__file__).with_name("hygiene.py"))
hygiene = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hygiene)


def test_the_tree_is_clean():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert [problem for path in hygiene.tracked(ROOT) for problem in hygiene.problems(path)] == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("x = 1", "no newline"),
        ("x = 1 \n", "trailing"),
        ("x = 1\n\n", "blank lines"),
        ("\tx = 1\n", "tab"),
        ("<" * 7 + " a\n", "conflict"),
    ],
)
def test_faults_are_seen(tmp_path, content, problem):
    file = tmp_path / "x.py"
    file.write_text(content)
    assert any(problem in line for line in hygiene.problems(file))


def test_a_large_file_is_seen(tmp_path):
    file = tmp_path / "x.bin"
    file.write_bytes(bytes(hygiene.LARGEST + 1))
    assert list(hygiene.problems(file)) == [f"{file}: 500,001 bytes; large files do not belong here"]

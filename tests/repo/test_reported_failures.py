"""The index of reported failures names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (H\d+) \|.*\| ([^|]+) \|$", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_case_of_the_core_is_listed_once() -> None:
    assert [case for case, _ in ROWS] == [f"H{number}" for number in range(1, 16) if number != 6]


def test_every_test_of_the_index_exists() -> None:
    for case, cell in ROWS:
        named = re.findall(r"`([^`:]+\.py)::(test_\w+)`", cell)
        assert named, f"{case} has no test"
        for file, function in named:
            text = (TESTS / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), f"{case}: {file} has no {function}"

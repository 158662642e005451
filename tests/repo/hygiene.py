"""Trailing blanks, final newlines, tabs, conflict marks and large files; give paths, or take all tracked files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LARGEST = 500_000
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".typed", ""}


def problems(path: Path) -> Iterator[str]:
    """What is wrong with one file."""
    if path.stat().st_size > LARGEST:
        yield f"{path}: {path.stat().st_size:,} bytes; large files do not belong here"
    if path.suffix not in TEXT:
        return
    text = path.read_bytes().decode("utf-8")
    if text and not text.endswith("\n"):
        yield f"{path}: no newline at the end"
    if text.endswith("\n\n"):
        yield f"{path}: blank lines at the end"
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            yield f"{path}:{number}: trailing blanks"
        if re.match(r"(<{7}|={7}|>{7})( |$)", line):
            yield f"{path}:{number}: conflict mark"
        if "\t" in line and path.suffix in (".py", ".md", ".toml", ".yml", ".yaml"):
            yield f"{path}:{number}: tab"


def tracked(root: Path) -> list[Path]:
    """Files that git knows below a folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]] or tracked(Path(__file__).parents[2])
    found = [problem for path in paths for problem in problems(path)]
    print("\n".join(found), end="\n" if found else "")
    raise SystemExit(bool(found))

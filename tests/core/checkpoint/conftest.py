from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepinfer.checkpoint.synthetic import make_checkpoint


@pytest.fixture(scope="session")
def tiny_single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in one file; shared, must not be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("single") / "tiny", "tiny")


@pytest.fixture(scope="session")
def tiny_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in three files with an index; shared, must not be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("sharded") / "tiny", "tiny", shards=3)


@pytest.fixture
def single(tiny_single: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_single, tmp_path / "single"))


@pytest.fixture
def sharded(tiny_sharded: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_sharded, tmp_path / "sharded"))

"""The light half on machines of every kind, and what installing the package does to a user without an NPU."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deepinfer-backend-ascend"
sys.path.insert(0, str(PACKAGE / "src"))

from deepinfer_ascend.descriptor import ASCEND  # noqa: E402
from deepinfer_ascend.environment import VARIABLES, prepare  # noqa: E402
from deepinfer_ascend.probe import devices, look  # noqa: E402


@pytest.fixture
def board(tmp_path):
    """A root folder with the device files of a machine with two NPUs."""
    (tmp_path / "dev").mkdir()
    for name in ("davinci_manager", "davinci0", "davinci1", "davinci10", "davinci_x", "null"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def answer(root, version="2.13.0", library=None):
    return look(root, lambda _: version, lambda _: library)


def test_devices_are_counted(board):
    assert devices(board) == (0, 1, 10)


def test_everything_there(board):
    probe = answer(board)
    assert (probe.status, probe.devices) == ("match", 3)
    assert probe.reasons == ("never run on hardware",)


def test_nothing_there_gives_every_reason(tmp_path):
    probe = answer(tmp_path, None, "libascendcl.so: cannot open")
    assert (probe.status, probe.hardware_present) == ("no_match", False)
    driver, cann, package = probe.reasons
    assert driver.startswith("no Ascend driver")
    assert cann == "CANN is not set up: libascendcl.so: cannot open; source its set_env.sh"
    assert package == "torch-npu is not installed: pip install 'torch-npu==2.13.*'"


def test_a_board_without_software_is_an_error_under_auto(board):
    probe = answer(board, "2.12.0", None)
    assert (probe.status, probe.hardware_present) == ("no_match", True)
    assert probe.reasons == ("torch-npu 2.12.0 is installed, 2.13 is needed",)


def test_a_driver_without_devices(board):
    for index in devices(board):
        (board / "dev" / f"davinci{index}").unlink()
    (reason,) = answer(board).reasons
    assert reason.startswith("the driver is there, but lists no device")


def test_users_keep_their_variables():
    environ = {"TASK_QUEUE_ENABLE": "1"}
    assert prepare(environ)["TASK_QUEUE_ENABLE"] == "1"
    assert environ == {"TASK_QUEUE_ENABLE": "1", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert set(ASCEND.variables) == set(VARIABLES)


def test_it_says_that_it_never_ran_on_hardware():
    assert ASCEND.verified_on == ()
    assert "never run on hardware" in ASCEND.summary


def test_installing_it_brings_nothing_that_importing_torch_would_load():
    about = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert about["dependencies"] == ["deepinfer-core>=0.1,<0.2", "torch>=2.11"]
    # torch imports every entry point of `torch.backends` when it is imported itself.
    assert set(about["entry-points"]) == {"deepinfer.plugins"}
    assert about["optional-dependencies"] == {"npu": ["torch-npu==2.13.*"]}


def test_the_light_half_imports_nothing_heavy():
    code = "import sys, deepinfer_ascend.descriptor as d; d.probe(); print({'torch', 'torch_npu', 'numpy'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert run.stdout.strip() == "set()"

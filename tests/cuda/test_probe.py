"""The probe lists every reason and starts nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytest.importorskip("deepinfer_cuda")

from deepinfer_cuda.probe import Driver, look, read_driver


def test_a_machine_without_a_driver_says_so():
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    driver = read_driver(missing)
    assert driver.capabilities == ()
    assert "libcuda.so.1" in driver.problem
    assert any("libcuda.so.1" in reason for reason in look(driver).reasons)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(13000, ()), "CUDA_VISIBLE_DEVICES"),
        (Driver(13000, ((7, 5),)), "compute capability 7.5"),
        (Driver(11080, ((9, 0),)), "the driver supports CUDA 11.8"),
    ],
)
def test_reasons_name_what_is_wrong(driver, reason):
    assert any(reason in found for found in look(driver).reasons)


def test_all_reasons_are_listed_at_once():
    reasons = look(Driver(11080, ((7, 5),))).reasons
    assert sum("7.5" in reason or "11.8" in reason for reason in reasons) == 2


def test_descriptor_needs_neither_torch_nor_triton():
    code = "import sys, deepinfer_cuda.descriptor; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Options of the contract tests: which backend, sizes, device and seed."""

from __future__ import annotations

import os
import secrets

import pytest

from deepinfer.backend.kernels import all_contracts
from deepinfer.conformance import CHECKS, Suite

SIZES = ("tiny", "odd", "real")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contracts", "contract tests of a backend")
    group.addoption("--backend", default="cpu", help="name of the backend under test (default: cpu)")
    group.addoption("--size", action="append", choices=SIZES, help="sample sizes (default: tiny and odd)")
    group.addoption("--device", type=int, default=0, help="index of the device (default: 0)")
    group.addoption("--contract-seed", type=int, default=None, help="seed of the sample data (default: a new one)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("contract_seed") is None:
        fixed = os.environ.get("DEEPINFER_TEST_CONTRACT_SEED")
        config.option.contract_seed = secrets.randbelow(2**31) if fixed is None else int(fixed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"contracts: backend {config.getoption('backend')}, --contract-seed {config.getoption('contract_seed')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"op", "size", "check"} <= set(metafunc.fixturenames):
        sizes = metafunc.config.getoption("size") or ("tiny", "odd")
        names = [(op, size, check) for op in sorted(all_contracts()) for size in sizes for check in CHECKS]
        metafunc.parametrize(("op", "size", "check"), names)


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> Suite:
    from deepinfer.plugins.selection import select_backend

    backend, _ = select_backend(pytestconfig.getoption("backend"))
    return Suite(backend, pytestconfig.getoption("device"), pytestconfig.getoption("contract_seed"))

"""Settings of the whole test run."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Tiny products gain nothing from threads, and threads that spin on a busy machine cost a factor of ten.
    # Tests of thread counts set their own.
    torch.set_num_threads(1)

"""The tests beside this file run on the simulated device only: see `plugin.py` and `nox -s ascend`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "DEEPINFER_TEST_ASCEND_SIM" in os.environ else ["test_*.py"]

"""Pytest plugin that starts the simulated device before anything else imports torch_npu.

`DEEPINFER_TEST_ASCEND_SIM` names the folder that `build.py` filled. The probe answers for the simulated devices, since
there are no device files.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LIBRARIES = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "hccl")
ENVIRONMENT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "0"}


def start() -> None:
    """Load the simulated libraries, import torch_npu over them and replace its kernels; once a process."""
    if "simulated_operators" in sys.modules:
        return
    folder = Path(os.environ["DEEPINFER_TEST_ASCEND_SIM"])
    os.environ.update(ENVIRONMENT)
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(folder))
    import torch
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)
    import simulated_operators

    simulated_operators.install()
    from ascend_sim import npu_ops  # noqa: F401


def _match_simulated_devices() -> None:
    import deepinfer_ascend.probe
    from deepinfer.api.descriptor import Probe

    deepinfer_ascend.probe.look = lambda: Probe.match("simulated", devices=2)


start()
_match_simulated_devices()

"""The simulated device itself: order, missing waits, early reuse, memory, graphs and failures must show."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import simulated_operators
import torch
import torch_npu

from ascend_sim.npu_ops import Undocumented
from deepinfer.api.errors import CapacityError
from deepinfer_ascend.runtime import NpuRuntime


@pytest.fixture
def runtime():
    runtime = NpuRuntime(0)
    yield runtime
    runtime.synchronize()


def alone(program: str, **environment: str) -> str:
    """Run a program on its own simulated device; returns its last line."""
    import os

    code = "from ascend_sim import plugin\nimport torch, torch_npu, simulated_operators\n" + textwrap.dedent(program)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip().splitlines()[-1]


def test_values_and_dtypes(runtime):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    there = x.to("npu")
    assert torch.equal((there @ there.T).cpu(), x @ x.T)
    assert torch.equal(there.to(torch.float8_e4m3fn).cpu().float(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(there.sort(dim=-1, stable=True).indices.cpu(), x.sort(dim=-1, stable=True).indices)
    there[torch.tensor([1, 3], device="npu")] = 2.0
    assert there.cpu()[1].tolist() == [2.0] * 7


def test_fresh_memory_is_poison(runtime):
    assert torch.empty(8, device="npu").isnan().all().item()
    assert (runtime.alloc(64).cpu() == 255).all()


def test_devices_do_not_mix(runtime):
    with pytest.raises(RuntimeError, match="tensors on npu:0 and cpu"):
        torch.ones(3, device="npu") + torch.ones(3)


SLOW = {"SIM_DELAY_US": "20000"}


def test_a_read_without_a_wait_shows():
    program = """
        x = torch.ones(4, device="npu")
        host = torch.zeros(4, pin_memory=True)
        host.copy_(x + 1, non_blocking=True)
        early = host.clone()
        torch_npu.npu.synchronize()
        print(early.isnan().all().item(), host.tolist())
    """
    assert alone(program, **SLOW) == "True [2.0, 2.0, 2.0, 2.0]"


@pytest.mark.parametrize("waits", [False, True])
def test_streams_are_ordered_by_events_only(waits):
    program = f"""
        side = torch_npu.npu.Stream()
        out = torch.zeros(1024, device="npu")
        torch_npu.npu.synchronize()
        x = torch.zeros(1024, device="npu")
        for _ in range(5):
            x = x + 1
        event = torch_npu.npu.Event()
        event.record()
        with torch_npu.npu.stream(side):
            if {waits}:
                side.wait_event(event)
            out.copy_(x, non_blocking=True)
        side.synchronize()
        print(out.eq(5).all().item())
    """
    assert alone(program, **SLOW) == str(waits)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_too_early_shows(recorded):
    program = f"""
        side = torch_npu.npu.Stream()
        out = torch.zeros(1024, device="npu")
        x = torch.ones(1024, device="npu")
        torch_npu.npu.synchronize()
        with torch_npu.npu.stream(side):
            for _ in range(5):
                out.add_(1)
            out.copy_(x, non_blocking=True)
        if {recorded}:
            x.record_stream(side)
        del x
        y = torch.empty(1024, device="npu")
        side.synchronize()
        print(out.eq(1).all().item())
    """
    assert alone(program, **SLOW) == str(recorded)


def test_memory_is_limited():
    program = """
        from deepinfer.api.errors import CapacityError
        from deepinfer_ascend.runtime import NpuRuntime
        runtime = NpuRuntime(0)
        try:
            runtime.alloc(3 << 30)
        except CapacityError as error:
            print(error)
    """
    text = alone(program, SIM_MEMORY_GB="2")
    assert text.startswith("cannot allocate 3,221,225,472 bytes of device memory, ")


def test_a_lost_device_is_an_error():
    program = """
        x = torch.ones(4, device="npu")
        torch_npu.npu.synchronize()
        simulated_operators.lose_device(0)
        try:
            (x + 1).cpu()
        except RuntimeError as error:
            print("507899" in str(error))
        import os
        os._exit(0)
    """.replace("import os\n", "import os, sys\n        sys.stdout.flush()\n")
    assert alone(program) == "True"


def test_graphs_replay_with_new_inputs(runtime):
    x = torch.zeros(4, 64, device="npu")
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).to("npu")
    runtime.synchronize()
    graph = runtime.capture(lambda: torch.relu(x @ weight).sum(-1))
    for seed in range(3):
        new = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        x.copy_(new)
        runtime.replay(graph)
        assert torch.equal(graph.result.cpu(), torch.relu(new @ weight.cpu()).sum(-1))


def test_a_graph_cannot_wait(runtime):
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="graph capture forbids"):
        runtime.capture(lambda: x.sum().item())


def test_the_guard_refuses_waits(runtime):
    x = torch.ones(3, device="npu")
    with runtime.host_sync_guard():
        y = x + 1
        with pytest.raises(RuntimeError, match="makes the host wait"):
            y.cpu()
    assert y.cpu().tolist() == [2.0] * 3


def test_operators_without_a_kernel_are_refused_in_strict_mode(runtime):
    simulated_operators.strict(True)
    try:
        torch.ones(3, device="npu") + 1
        with pytest.raises(NotImplementedError, match="aten::frexp.* has no kernel in torch_npu"):
            torch.frexp(torch.ones(3, device="npu"))
    finally:
        simulated_operators.strict(False)


def test_undocumented_forms_are_refused(runtime):
    x = torch.ones(2, 64, device="npu", dtype=torch.bfloat16)
    with pytest.raises(Undocumented):
        torch_npu.npu_rms_norm(x, torch.ones(64, device="npu"))
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch_npu.npu_rms_norm(x, x[0], eps=1e-6)


def test_pinned_memory_and_errors(runtime):
    assert runtime.alloc_pinned(100).is_pinned()
    info = runtime.memory_info()
    assert 0 < info.free <= info.total
    with pytest.raises(CapacityError, match="device memory"):
        runtime.alloc(1 << 50)

"""The interface stays small, the CPU implements it honestly, ids and process-wide settings behave."""

from __future__ import annotations

import inspect

import pytest
import torch

from deepinfer.api.backend import COLLECTIVES, Communicator, DeviceRuntime
from deepinfer.backend import process
from deepinfer.backend.capabilities import Capabilities
from deepinfer.backend.identity import numerics_id, numerics_parts
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.backend.numerics import Numerics
from deepinfer.cpu import self_check
from deepinfer.cpu.backend import create_backend
from deepinfer.cpu.runtime import CpuRuntime
from deepinfer.errors import CapabilityError, CapacityError, ConfigError


def test_runtime_and_communicator_have_at_most_25_methods():
    methods = [*DeviceRuntime.__abstractmethods__, *Communicator.__abstractmethods__]
    assert len(methods) <= 25
    assert set(COLLECTIVES) == set(Communicator.__abstractmethods__)
    for cls in (DeviceRuntime, Communicator):
        assert all(inspect.getdoc(getattr(cls, name)) for name in cls.__abstractmethods__)


def test_capabilities_are_careful_by_default():
    capabilities = Capabilities("thing")
    assert not capabilities.graphs
    assert not capabilities.async_loop
    assert not capabilities.row_invariant
    assert capabilities.verified_on == ()
    assert capabilities.describe()["collectives"] == []
    with pytest.raises(AttributeError):
        capabilities.graphs = True


def test_cpu_runtime():
    runtime = CpuRuntime()
    memory = runtime.memory_info()
    assert 0 < memory.free <= memory.total
    block = runtime.alloc(1000)
    assert (block.dtype, block.numel(), block.data_ptr() % 256) == (torch.uint8, 1000, 0)
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    stream = runtime.stream()
    with runtime.use(stream), runtime.host_sync_guard(), runtime.profile_range("copy"):
        runtime.copy_async(target, source, stream)
        event = runtime.event(stream)
        runtime.wait(event, stream)
        runtime.wait(event, host=True)
    runtime.synchronize()
    assert runtime.is_done(event)
    assert torch.equal(target, source)
    assert runtime.host_readable(source) is source
    assert runtime.fingerprint() == CpuRuntime().fingerprint()
    with pytest.raises(CapabilityError, match="graphs=False"):
        runtime.capture(lambda: None)
    with pytest.raises(CapabilityError, match="graphs=False"):
        runtime.replay(None)
    with pytest.raises(CapacityError, match=r"cannot allocate 1,152,921,504,606,846,976 bytes .* are free"):
        runtime.alloc(1 << 60)


def test_profile_range_shows_in_a_profile():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, CpuRuntime().profile_range("a span of ours"):
        torch.ones(3).sum()
    assert "a span of ours" in {event.key for event in profile.key_averages()}


def cpu_table(numerics=Numerics(), **kwargs):
    return KernelTable.bind(all_contracts(), create_backend(), numerics, **kwargs)


def test_cpu_binds_every_contract_in_every_numerics():
    for invariant in (False, True):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            numerics = Numerics(compute_dtype=dtype, activation_quant=False, batch_invariant=invariant)
            table = cpu_table(numerics, fallback="error")
            assert {binding.op for binding in table.bindings()} == set(all_contracts())
            assert "refused" not in {binding.kind for binding in table.bindings()}


def test_numerics_id_follows_what_decides_bits():
    backend = create_backend()
    runtime = backend.runtime()
    table = cpu_table()
    first = numerics_id(backend, runtime, table)
    assert first == numerics_id(create_backend(), CpuRuntime(), cpu_table())
    assert first.startswith("n1-")
    assert len(first) == 19
    others = [
        numerics_id(backend, runtime, cpu_table(Numerics(cache_quant=False))),
        numerics_id(backend, runtime, cpu_table(Numerics(batch_invariant=True))),
        numerics_id(backend, runtime, cpu_table(overrides="linear=reference")),
    ]
    assert len({first, *others}) == 4
    backend.version = "9.9"
    assert numerics_id(backend, runtime, table) != first
    parts = numerics_parts(backend, runtime, table)
    assert parts["torch"] == torch.__version__
    assert parts["ops"]["linear"] == "native cpu"


def test_process_settings_are_applied_once_and_refused_on_disagreement(monkeypatch):
    threads = []
    monkeypatch.setitem(process.PROCESS_SETTINGS, "num_threads", (lambda: 7, threads.append))
    monkeypatch.setattr(process, "_applied", {})
    process.apply_process_settings({"num_threads": 2}, "first engine")
    process.apply_process_settings({"num_threads": 2}, "second engine")
    assert threads == [2]
    assert process.applied_settings() == {"num_threads": (2, "first engine")}
    assert process.current_settings()["num_threads"] == 7
    with pytest.raises(ConfigError) as caught:
        process.apply_process_settings({"num_threads": 4}, "third engine")
    assert "third engine: wants the process-wide setting num_threads=4, but first engine has applied 2" in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="'nope' is no process-wide setting; known: num_threads"):
        process.apply_process_settings({"nope": 1}, "engine")
    assert threads == [2]


def test_cpu_keeps_rows_independent_and_says_so_in_doctor():
    assert self_check.row_variant_products() == ()
    assert create_backend().capabilities().row_invariant
    assert [check.status for check in create_backend().doctor()] == ["ok"]


def test_cpu_withdraws_the_promise_where_the_self_check_fails(monkeypatch):
    monkeypatch.setattr(self_check, "tile_product", lambda x, weight: x @ weight.T + x.shape[0])
    self_check.row_variant_products.cache_clear()
    try:
        backend = create_backend()
        (check,) = backend.doctor()
        assert check.status == "warning"
        assert "float32 [rows, 32] x [32, 24]" in check.detail
        with pytest.raises(CapabilityError, match="backend 'cpu' does not promise that a row's bits are independent"):
            KernelTable.bind(all_contracts(), backend, Numerics(batch_invariant=True))
    finally:
        self_check.row_variant_products.cache_clear()

"""The self-check finds arithmetic that depends on neighbours, and the backend then refuses row-invariant mode."""

from __future__ import annotations

import pytest
import torch

from deepinfer.api.backend import Numerics, Shard, WeightGroup, WeightPart
from deepinfer.api.errors import CapabilityError
from deepinfer.cpu import self_check
from deepinfer.cpu.backend import create_backend
from deepinfer.cpu.weights import product_shapes

GROUPS = [
    WeightGroup(
        "fused",
        "fp8_block32",
        (
            WeightPart("a.weight", (64, 96), "F8_E4M3"),
            WeightPart("a.scale", (2, 3), "F8_E8M0"),
            WeightPart("b.weight", (32, 96), "F8_E4M3"),
            WeightPart("b.scale", (1, 3), "F8_E8M0"),
        ),
    ),
    WeightGroup(
        "experts",
        "fp4_experts",
        tuple(
            WeightPart(f"{expert}.{name}.{part}", shape, dtype)
            for expert in range(2)
            for name, rows, columns in (("w1", 48, 96), ("w3", 48, 96), ("w2", 96, 48))
            for part, shape, dtype in (
                ("weight", (rows, columns // 2), "I8"),
                ("scale", (rows, columns // 32), "F8_E8M0"),
            )
        ),
    ),
]


@pytest.fixture(autouse=True)
def _fresh_findings():
    functions = (self_check.row_variant_products, self_check.row_variant_work, self_check.row_variant_shapes)
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


def test_shapes_of_fused_groups_and_experts():
    assert product_shapes(GROUPS) == ((96, 48), (96, 96))


def test_this_machine_keeps_rows_independent_at_any_thread_count():
    before = torch.get_num_threads()
    assert self_check.row_variant_work() == ()
    assert self_check.row_variant_work(1) == ()
    assert self_check.row_variant_shapes(((129, 640), (24, 1100)), torch.float32) == ()
    assert torch.get_num_threads() == before


def test_the_comparison_sees_a_result_that_depends_on_the_row_count():
    x = torch.randn(48, 37)
    assert not self_check._depends_on_neighbours(torch.exp, (x,))
    assert self_check._depends_on_neighbours(lambda rows: rows + rows.shape[0], (x,))


def test_load_in_row_invariant_mode_names_what_depends(monkeypatch):
    monkeypatch.setattr(self_check, "tile_product", lambda x, weight: x @ weight.T + x.shape[0])
    backend, mode = create_backend(), Numerics(compute_dtype=torch.float32, batch_invariant=True)
    with pytest.raises(CapabilityError, match=r"DEEPINFER_BATCH_INVARIANT=1 cannot be kept here: .*96\] x \[96, 96\]"):
        backend.plan_weights(GROUPS, Shard(), mode)
    assert len(backend.plan_weights(GROUPS, Shard(), Numerics())) == 2


def test_load_in_row_invariant_mode_passes_here():
    assert len(create_backend().plan_weights(GROUPS, Shard(), Numerics(batch_invariant=True))) == 2

"""Binding: sources, overrides, policy, row-invariance, signatures, composition, reachability."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from deepinfer.backend.backend import StepLimits
from deepinfer.backend.kernels import KernelTable
from deepinfer.backend.numerics import Numerics
from deepinfer.backend.overrides import parse_overrides
from deepinfer.errors import CapabilityError, ConfigError, PluginError
from deepinfer.ops.contract import Determinism

INVARIANT = Numerics(batch_invariant=True)


def bind(contracts, backend, numerics=Numerics(), **kwargs):
    return KernelTable.bind(contracts, backend, numerics, **{"fallback": "allow", **kwargs})


def kinds(table):
    return {binding.op: binding.kind for binding in table.bindings()}


def native_scale(x, by=2.0):
    return 10 * x


def native_block(x):
    return -x


def test_everything_composes_from_references(contracts, fake):
    table = bind(contracts, fake())
    assert table.model(3.0) == ((3 * 2 + 1) * 2 + 1)
    assert kinds(table) == {
        "scale": "reference",
        "shift": "reference",
        "block": "composite",
        "model": "composite",
        "pick": "reference",
    }


def test_native_is_bound_as_the_plain_function(contracts, fake, kernel):
    table = bind(contracts, fake(kernels={"scale": kernel(native_scale)}))
    assert vars(table)["scale"] is native_scale
    assert table.shift is contracts["shift"].reference
    assert table.block(1.0) == 11


def test_large_native_replaces_the_composition(contracts, fake, kernel):
    table = bind(contracts, fake(kernels={"block": kernel(native_block)}))
    assert table.model(3.0) == 3.0
    assert kinds(table)["model"] == "composite"
    reachable = {binding.op for binding in table.bindings() if binding.reachable}
    assert reachable == {"model", "block", "pick"}


def test_override_reference_composes_although_native_exists(contracts, fake, kernel):
    backend = fake(kernels={"block": kernel(native_block), "scale": kernel(native_scale)})
    table = bind(contracts, backend, overrides="block=reference")
    assert kinds(table)["block"] == "composite"
    assert table.block(1.0) == 11
    assert [b.reasons for b in table.bindings() if b.op == "block"] == [("override block=reference",)]
    every = bind(contracts, backend, overrides="*=reference")
    assert every.block(1.0) == 3
    assert "native" not in kinds(every).values()


def test_composite_sees_the_override_of_a_finer_op(contracts, fake, kernel):
    backend = fake(kernels={"scale": kernel(native_scale)})
    assert bind(contracts, backend).model(1.0) == 111
    assert bind(contracts, backend, overrides="scale=reference").model(1.0) == 7


def test_named_override_beats_the_star(contracts, fake, kernel):
    backend = fake(kernels={"block": kernel(native_block), "scale": kernel(native_scale)})
    table = bind(contracts, backend, overrides=" *=reference , scale = native ")
    assert kinds(table)["scale"] == "native"
    assert kinds(table)["block"] == "composite"
    star = bind(contracts, backend, overrides="block=composite,*=native")
    assert kinds(star) | {"shift": "reference"} == kinds(star)
    assert kinds(star)["scale"] == "native"
    by_name = bind(contracts, backend, overrides="scale=acme")
    assert kinds(by_name)["scale"] == "native"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scal=native", "there is no operation 'scal'; did you mean 'scale'?"),
        ("scale", "'scale' is not of the form op=source"),
        ("scale=", "'scale=' is not of the form op=source"),
        ("scale=native,scale=reference", "'scale' is given twice, as 'native' and 'reference'"),
        ("shift=native", "shift=native: backend 'acme' has no kernel for 'shift'"),
        ("shift=composite", "shift=composite: 'shift' is not made of finer operations"),
        ("shift=bolt", "'bolt' is neither one of native, reference, composite nor an installed backend"),
    ],
)
def test_overrides_that_cannot_be_followed(contracts, fake, kernel, text, message):
    with pytest.raises(ConfigError) as caught:
        bind(contracts, fake(kernels={"scale": kernel(native_scale)}), overrides=text)
    assert message in str(caught.value)
    assert caught.value.field == "DEEPINFER_OPS"


def test_another_backend_on_the_same_kind_of_device(contracts, fake, kernel):
    bolt = fake("bolt", kernels={"shift": kernel(lambda x: x - 1)})

    def resolve(name):
        return {"bolt": bolt, "far": fake("far", device_type="cuda")}[name]

    table = bind(contracts, fake(), overrides="shift=bolt", resolve=resolve)
    assert table.block(1.0) == 1.0
    binding = next(b for b in table.bindings() if b.op == "shift")
    assert (binding.kind, binding.backend) == ("native", "bolt")
    with pytest.raises(ConfigError, match="kernels of 'far' work on 'cuda' tensors, the model is on 'cpu'"):
        bind(contracts, fake(), overrides="shift=far", resolve=resolve)
    with pytest.raises(ConfigError, match="backend 'bolt' has no kernel for 'scale'"):
        bind(contracts, fake(), overrides="scale=bolt", resolve=resolve)
    star = bind(contracts, fake(kernels={"scale": kernel(native_scale)}), overrides="*=bolt", resolve=resolve)
    assert star.block(1.0) == 9


def test_parse_overrides_of_nothing():
    assert parse_overrides("", ()).named == {}
    assert parse_overrides(" , ", ()).every is None


def test_fallback_policy(contracts, fake, kernel, caplog):
    backend = fake(kernels={"scale": kernel(native_scale)})
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        bind(contracts, backend, fallback="allow")
        assert not caplog.records
        bind(contracts, backend, fallback="warn")
    assert "backend 'acme' has no kernel for shift, pick; their plain PyTorch reference runs" in caplog.text
    with pytest.raises(
        CapabilityError, match=r"'acme' has no kernel for shift, pick; DEEPINFER_FALLBACK=error forbids"
    ):
        bind(contracts, backend, fallback="error")
    asked = "shift=reference,pick=reference"
    assert bind(contracts, backend, fallback="error", overrides=asked).block(1.0) == 11


def test_fallback_counts_only_what_the_graph_reaches(contracts, fake, kernel):
    backend = fake(kernels={"block": kernel(native_block), "pick": kernel(lambda x: x)})
    assert bind(contracts, backend, fallback="error").model(1.0) == 1.0


def test_intended_references_are_no_fallback(contracts, fake):
    assert bind(contracts, fake(references_intended=True), fallback="error").shift(1) == 2


def test_row_invariant_mode_refuses_weaker_kernels_and_names_all_ops(contracts, fake, kernel):
    weak = kernel(native_scale, Determinism.RUN_TO_RUN)
    with pytest.raises(CapabilityError) as caught:
        bind(contracts, fake(kernels={"scale": weak}), INVARIANT)
    text = str(caught.value)
    assert "DEEPINFER_BATCH_INVARIANT=1" in text
    assert (
        "scale: the kernel of 'acme' promises run-to-run only; its reference is not known to be row-invariant" in text
    )
    assert "block: " in text
    assert "its finer operations are refused: scale" in text


def test_row_invariant_mode_takes_the_reference_instead_of_a_weak_kernel(contracts, fake, kernel):
    backend = fake(kernels={"shift": kernel(lambda x: 0, Determinism.NONE), "scale": kernel(native_scale)})
    table = bind(contracts, backend, INVARIANT)
    assert kinds(table)["shift"] == "reference"
    assert kinds(bind(contracts, backend))["shift"] == "native"
    assert all(b.determinism in (Determinism.EXACT, Determinism.ROW_INVARIANT) for b in table.bindings())


def test_row_invariant_mode_needs_known_references(contracts, fake, kernel):
    kernels = {"scale": kernel(native_scale)}
    nothing = fake(kernels=kernels, row_invariant_references=frozenset())
    with pytest.raises(CapabilityError, match=r"shift: .*its reference is not known to be row-invariant"):
        bind(contracts, nothing, INVARIANT)
    by_name = fake(row_invariant_references=frozenset({"scale", "shift", "block", "model"}))
    assert bind(contracts, by_name, INVARIANT).block(1.0) == 3


def test_refused_op_that_nobody_reaches_is_no_error_but_never_silent(contracts, fake, kernel):
    backend = fake(kernels={"block": kernel(native_block)})
    table = bind(contracts, backend, INVARIANT)
    assert kinds(table)["scale"] == "refused"
    with pytest.raises(CapabilityError, match="operation 'scale' is refused in row-invariant mode"):
        table.scale(1.0)
    with pytest.raises(CapabilityError, match="1 operations"):
        bind(contracts, backend, INVARIANT, roots=["model", "scale"])


def test_named_override_to_a_weak_kernel_is_not_replaced_silently(contracts, fake, kernel):
    backend = fake(kernels={"shift": kernel(lambda x: 0, Determinism.NONE), "scale": kernel(native_scale)})
    with pytest.raises(CapabilityError, match="shift: override shift=native; the kernel of 'acme' promises none only"):
        bind(contracts, backend, INVARIANT, overrides="shift=native")


def test_composite_promises_what_its_weakest_part_does(contracts, fake, kernel):
    table = bind(contracts, fake(kernels={"shift": kernel(lambda x: x, Determinism.NONE)}))
    promises = {binding.op: binding.determinism for binding in table.bindings()}
    assert promises["block"] is Determinism.NONE
    assert promises["model"] is Determinism.NONE
    assert promises["scale"] is Determinism.RUN_TO_RUN


def test_numerics_that_the_device_cannot_honour(contracts, fake):
    with pytest.raises(
        CapabilityError, match=r"'acme' cannot compute in float32; DEEPINFER_COMPUTE_DTYPE may be bfloat16"
    ):
        bind(contracts, fake(), Numerics(compute_dtype=torch.float32))
    with pytest.raises(CapabilityError, match=r"'acme' does not promise .* unset DEEPINFER_BATCH_INVARIANT"):
        bind(contracts, fake(row_invariant=False), INVARIANT)


def test_unknown_op_of_a_backend(contracts, fake, kernel):
    with pytest.raises(
        PluginError, match=r"'acme' registers a kernel for 'shft', which is no operation; did you mean 'shift'"
    ):
        bind(contracts, fake(kernels={"shft": kernel(native_scale)}))
    with pytest.raises(PluginError, match="'shift' must be a Kernel, found function"):
        bind(contracts, fake(kernels={"shift": native_scale}))


def test_kernels_that_cannot_be_listed(contracts, fake):
    def fail():
        raise OSError("no compiler")

    with pytest.raises(PluginError, match=r"backend 'acme': kernels\(\) raised OSError: no compiler"):
        bind(contracts, fake(kernels=fail))


@pytest.mark.parametrize(
    ("op", "function", "found"),
    [
        ("scale", lambda x: x, "it takes (x), the contract has (x, by=2.0)"),
        ("scale", lambda x, by: x, "it takes (x, by), the contract has (x, by=2.0)"),
        ("scale", lambda by, x=1: x, "it takes (by, x=1)"),
        ("shift", lambda *args, **kwargs: 0, "it takes (*args, **kwargs), the contract has (x)"),
        ("block", lambda y: y, "it takes (y), the contract has (x)"),
        ("shift", dict.get, "it takes"),
        ("shift", min, "its parameters cannot be read; wrap it into a Python function"),
    ],
)
def test_signature_must_equal_the_contract(contracts, fake, kernel, op, function, found):
    with pytest.raises(PluginError) as caught:
        bind(contracts, fake(kernels={op: kernel(function)}))
    assert f"kernel '{op}' of backend 'acme' does not match its contract: " in str(caught.value)
    assert found in str(caught.value)


def test_signature_is_checked_even_where_the_kernel_is_not_bound(contracts, fake, kernel):
    with pytest.raises(PluginError, match="kernel 'shift'"):
        bind(contracts, fake(kernels={"shift": kernel(lambda: 0)}), overrides="shift=reference")


def test_circle_is_named(contracts, fake):
    contracts["scale"] = dataclasses.replace(contracts["block"], name="scale", uses=("model",))
    with pytest.raises(PluginError, match="in a circle: model -> block -> scale -> model"):
        bind(contracts, fake())


def test_unknown_and_undeclared_finer_ops(contracts, fake):
    contracts["block"] = dataclasses.replace(contracts["block"], uses=("scale", "shfit"))
    with pytest.raises(
        PluginError, match="operation 'block' uses 'shfit', which is no operation; did you mean 'shift'"
    ):
        bind(contracts, fake())
    contracts["block"] = dataclasses.replace(contracts["block"], uses=("scale",))
    with pytest.raises(PluginError, match="operation 'block' reads 'shift', which its `uses` does not declare"):
        bind(contracts, fake())


def test_table_is_immutable(contracts, fake):
    table = bind(contracts, fake())
    with pytest.raises(AttributeError, match="immutable"):
        table.scale = native_scale
    with pytest.raises(AttributeError, match="immutable"):
        del table.scale
    with pytest.raises(AttributeError, match=r"there is no operation 'scal'; did you mean 'scale'"):
        table.scal(1)


def test_op_must_not_hide_a_member(contracts, fake):
    contracts["bindings"] = dataclasses.replace(contracts["pick"], name="bindings")
    with pytest.raises(ValueError, match="'bindings' is named like a member of the kernel table"):
        bind(contracts, fake())


def test_registered_but_unreachable_is_found(contracts, fake, kernel):
    backend = fake(kernels={"pick": kernel(lambda x: x), "scale": kernel(native_scale), "block": kernel(native_block)})
    assert bind(contracts, backend).unreachable() == []
    table = bind(contracts, backend, roots=["model"])
    # `scale` could be reached by composing `block`; nothing leads from `model` to `pick`.
    assert table.unreachable() == ["pick"]
    with pytest.raises(PluginError, match="the model asks for 'modl', which is no operation; did you mean 'model'"):
        bind(contracts, backend, roots=["modl"])


def test_workspace_is_the_largest_request(contracts, fake, kernel):
    limits = StepLimits(rows=8, sequences=2, context=100)
    kernels = {
        "scale": kernel(native_scale, workspace=lambda limits: 4 * limits.rows),
        "shift": kernel(lambda x: x, workspace=lambda limits: limits.context),
    }
    assert bind(contracts, fake(kernels=kernels)).workspace_bytes(limits) == 100
    assert bind(contracts, fake(kernels=kernels), overrides="shift=reference").workspace_bytes(limits) == 32
    assert bind(contracts, fake()).workspace_bytes(limits) == 0


def test_override_that_nothing_reaches_is_said(contracts, fake, kernel, caplog):
    backend = fake(kernels={"block": kernel(native_block)})
    bind(contracts, backend, overrides="scale=reference")
    assert "DEEPINFER_OPS: nothing calls scale, for the large operations around it are native" in caplog.text
    caplog.clear()
    bind(contracts, backend, overrides="scale=reference,block=composite")
    assert not caplog.records

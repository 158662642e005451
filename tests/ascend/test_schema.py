"""Every call of a torch_npu operator in the package, against the operators' schemas; needs no torch_npu."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "deepinfer-backend-ascend" / "src" / "deepinfer_ascend"
OPERATORS = json.loads((Path(__file__).parent / "operators.json").read_text())["operators"]
DTYPES = {"float8_e8m0fnu", "float4_e2m1fn_x2", "hifloat8"}
OTHER = {"npu", "__version__"}
"""Attributes of torch_npu that are no operators: the device module and the version."""

LITERALS = {
    "int": int,
    "bool": bool,
    "float": float,
    "str": str,
    "int[]": list,
    "SymInt[]": list,
    "Tensor[]": list,
}


def problems(tree: ast.AST, operators: dict) -> Iterator[str]:
    """What is wrong with the uses of `torch_npu.*` in a module."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != "torch_npu":
            continue
        if node.attr in OTHER | DTYPES:
            continue
        if node.attr not in operators:
            yield f"line {node.lineno}: torch_npu has no operator {node.attr}"
        elif id(node) in called:
            yield from (f"line {node.lineno}: {node.attr}{text}" for text in _arguments(called[id(node)], operators))


def _arguments(call: ast.Call, operators: dict) -> Iterator[str]:
    schema = operators[call.func.attr]
    positional, keyword = schema["positional"], schema["keyword"]
    if len(call.args) > len(positional):
        yield f" takes {len(positional)} positional arguments"
    given = dict(zip(positional, call.args, strict=False))
    for argument in call.keywords:
        if argument.arg in given or argument.arg not in positional | keyword:
            yield f": unknown or repeated argument {argument.arg}"
        given[argument.arg] = argument.value
    for name, declared in (positional | keyword).items():
        type_name, _, default = declared.partition(" = ")
        if name in given:
            yield from _literal(name, type_name, given[name])
        elif not default and not type_name.endswith("?"):
            yield f": argument {name} is missing"


def _literal(name: str, type_name: str, value: ast.expr) -> Iterator[str]:
    """A literal must be of the declared kind; what is computed is left to torch_npu's own parser."""
    wanted = LITERALS.get(type_name.removesuffix("?"))
    if isinstance(value, ast.List):
        found: type | None = list
    elif isinstance(value, ast.Constant) and value.value is not None:
        found = type(value.value)
    else:
        return
    is_tensor = type_name.removesuffix("?") == "Tensor"
    if is_tensor or (wanted is not None and found is not wanted and (wanted, found) != (float, int)):
        yield f": argument {name} is a {found.__name__}, the schema says {type_name}"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_calls_follow_the_schemas(file):
    assert list(problems(ast.parse(file.read_text()), OPERATORS)) == []


def test_the_package_calls_operators():
    used = {name for file in PACKAGE.rglob("*.py") for name in OPERATORS if f"torch_npu.{name}(" in file.read_text()}
    assert used == {"npu_rms_norm", "npu_rotary_mul", "npu_quant_matmul", "npu_grouped_matmul"}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("torch_npu.npu_no_such(x)", "no operator npu_no_such"),
        ("torch_npu.npu_rms_norm(x)", "argument gamma is missing"),
        ("torch_npu.npu_rms_norm(x, g, eps=1e-6)", "unknown or repeated argument eps"),
        ("torch_npu.npu_rms_norm(x, g, 1e-6, 3)", "takes 3 positional arguments"),
        ("torch_npu.npu_rms_norm(x, g, epsilon='a')", "epsilon is a str"),
        ("torch_npu.npu_rotary_mul(x, c, s, rotary_mode=1)", "rotary_mode is a int"),
        ("torch_npu.npu_rms_norm(x, [1])", "gamma is a list"),
    ],
)
def test_a_wrong_call_is_named(call, text):
    (found,) = problems(ast.parse(call), OPERATORS)
    assert text in found

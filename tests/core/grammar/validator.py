"""The part of JSON Schema that the tests use, checked the slow and obvious way."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float),
    "integer": int,
}  # fmt: skip


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return is_valid(value, target, root)
    if "anyOf" in schema:
        return any(is_valid(value, option, root) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if not schema:
        return True
    kinds = schema.get("type", list(TYPES))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not any(_is_type(value, kind) for kind in kinds):
        return False
    checks = {dict: _object, list: _array, str: _string}
    check = checks.get(type(value), _number)
    return check(value, schema, root)


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])


def _object(value: dict[str, Any], schema: dict[str, Any], root: Any) -> bool:
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= set(value):
        return False
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 10**9):
        return False
    for name, item in value.items():
        # the compiled schema is strict: nothing but what it names
        if not is_valid(item, properties.get(name, schema.get("additionalProperties", False)), root):
            return False
    return True


def _array(value: list[Any], schema: dict[str, Any], root: Any) -> bool:
    first = schema.get("prefixItems", [])
    rest = schema.get("items", False)
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9):
        return False
    return all(is_valid(item, first[i] if i < len(first) else rest, root) for i, item in enumerate(value))


def _string(value: str, schema: dict[str, Any], root: Any) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9):
        return False
    return "pattern" not in schema or re.fullmatch(schema["pattern"], value) is not None


def _number(value: Any, schema: dict[str, Any], root: Any) -> bool:
    if value is None or isinstance(value, bool):
        return True
    return (
        schema.get("minimum", -1e308) <= value <= schema.get("maximum", 1e308)
        and value > schema.get("exclusiveMinimum", -1e309)
        and value < schema.get("exclusiveMaximum", 1e309)
        and value % schema.get("multipleOf", 1) == (0 if "multipleOf" in schema else value % 1)
    )

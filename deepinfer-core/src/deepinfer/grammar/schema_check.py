"""Refusing what a compiled JSON schema would silently not enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer.errors import GrammarError

__all__ = ["check_schema"]

_NEVER_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Each of these decides the value alone: the compiler reads no other constraint beside it."""

_OF_TYPE = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_CONSTRAINTS = ("type", *(name for names in _OF_TYPE.values() for name in names))
_IMPLY_TYPE = ("properties", "patternProperties", "items", "prefixItems")
_NEGATED_CLASS = re.compile(r"\[\^(?:\\.|[^\]\\])*\]", re.DOTALL)
_PATTERN_ITEM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c.|.)|.", re.DOTALL)
_CONTROL_ESCAPE = re.compile(r"\\(?:[nrtfv0]|c.|x[01][0-9a-fA-F]|u00[01][0-9a-fA-F]|x22|u0022|x5[cC]|u005[cC])")
_CHILD = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_CHILD_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_CHILD_MAP = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(text: str) -> None:
    """Walk a JSON schema and refuse every keyword that would be read and then ignored.

    Raises:
        GrammarError: names the place as a JSON pointer, the keyword and what to write instead.
    """
    todo: list[tuple[str, Any]] = [("#", json.loads(text))]
    while todo:
        where, schema = todo.pop()
        if not isinstance(schema, Mapping):
            continue
        problem = next(_problems(schema), None)
        if problem is not None:
            raise GrammarError(f"structured_output.json_schema: at {where}: {problem}")
        todo.extend(_children(where, schema))


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    for name in _NEVER_ENFORCED:
        if name in schema:
            yield f"{name!r} is not supported; express it with properties, items, enum or anyOf"
    if schema.get("uniqueItems"):
        yield "'uniqueItems' is not supported; leave it out and check the result"
    deciding = [name for name in _ALTERNATIVES if name in schema]
    beside = [name for name in (*deciding[1:], *_CONSTRAINTS) if name in schema and name != "type"]
    if deciding and beside:
        yield f"{beside[0]!r} has no effect beside {deciding[0]!r}; move it into the alternatives"
    if deciding and "type" in schema:
        yield from _type_beside(deciding[0], schema)
    elif not deciding and "type" not in schema and not any(name in schema for name in _IMPLY_TYPE):
        for kind, names in _OF_TYPE.items():
            for name in names:
                if name in schema:
                    yield f'{name!r} has no effect without a type; add "type": "{kind}"'
    yield from _object_problems(schema)
    if "multipleOf" in schema and any(name in schema for name in _OF_TYPE["number"][:4]):
        yield "'multipleOf' has no effect beside a range; use one of them"
    if isinstance(schema.get("pattern"), str) and (wrong := _needs_escape(schema["pattern"])) is not None:
        yield f"the pattern may match {wrong}, which a JSON string cannot hold as it is; exclude it"


def _needs_escape(pattern: str) -> str | None:
    """What a pattern asks for that JSON would write as an escape: the compiler matches the raw text."""
    for item in _PATTERN_ITEM.finditer(_NEGATED_CLASS.sub("", pattern)):
        text = item.group()
        if text in ('"', '\\"', "\\\\") or ord(text[0]) < 0x20 or _CONTROL_ESCAPE.fullmatch(text):
            return repr(text)
    return None


def _type_beside(deciding: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A type beside enum or const is fine if all values have it."""
    if deciding not in ("enum", "const"):
        yield f"'type' has no effect beside {deciding!r}; move it into the alternatives"
        return
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    values = schema["enum"] if deciding == "enum" else [schema["const"]]
    for value in values if isinstance(values, list) else ():
        if not any(_has_type(value, kind) for kind in allowed):
            yield f"the {deciding} value {value!r} is not of type {schema['type']!r}"


def _has_type(value: Any, kind: Any) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, Mapping)
    return False


def _object_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    for name in required if isinstance(required, list) else ():
        if name not in known:
            yield f"'required' names {name!r}, which 'properties' does not list"
    if known and "propertyNames" in schema:
        yield "'propertyNames' has no effect beside 'properties'; name the properties as they must be"


def _children(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _CHILD:
        yield f"{where}/{name}", schema.get(name)
    for name in _CHILD_LIST:
        if isinstance(schema.get(name), list):
            yield from ((f"{where}/{name}/{index}", child) for index, child in enumerate(schema[name]))
    for name in _CHILD_MAP:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{where}/{name}/{_escaped(key)}", child) for key, child in schema[name].items())


def _escaped(key: str) -> str:
    """A key as a JSON pointer spells it."""
    return key.replace("~", "~0").replace("/", "~1")

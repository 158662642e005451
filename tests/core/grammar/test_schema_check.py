from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.errors import GrammarError
from deepinfer.grammar.schema_check import check_schema


@pytest.mark.parametrize(
    ("schema", "where", "problem"),
    [
        ({"not": {"type": "string"}}, "#", "'not' is not supported"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "#/properties/a", "'if' is not supported"),
        ({"type": "object", "properties": {"a/b~c": {"contains": {}}}}, "#/properties/a~1b~0c", "'contains'"),
        ({"type": "array", "prefixItems": [{}, {"dependentRequired": {}}]}, "#/prefixItems/1", "'dependentRequired'"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items", "'uniqueItems'"),
        ({"anyOf": [{"type": "string"}], "minLength": 3}, "#", "'minLength' has no effect beside 'anyOf'"),
        ({"anyOf": [{"type": "string"}], "type": "string"}, "#", "'type' has no effect beside 'anyOf'"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "#", "'minimum' has no effect beside '$ref'"),
        ({"enum": [1], "const": 1}, "#", "'const' has no effect beside 'enum'"),
        ({"type": "integer", "enum": [1, "a"]}, "#", "the enum value 'a' is not of type 'integer'"),
        ({"type": ["string", "null"], "const": True}, "#", "the const value True is not of type"),
        (
            {"$defs": {"x": {"minimum": 3}}},
            "#/$defs/x",
            '\'minimum\' has no effect without a type; add "type": "number"',
        ),
        ({"required": ["a"]}, "#", "'required' has no effect without a type"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "#", "'required' names 'b'"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {}}, "#", "'propertyNames' has no effect"),
        ({"anyOf": [{}, {"allOf": [{"else": {}}]}]}, "#/anyOf/1/allOf/0", "'else' is not supported"),
        ({"type": "integer", "multipleOf": 7, "minimum": 0}, "#", "'multipleOf' has no effect beside a range"),
        ({"type": "string", "pattern": 'a"b'}, "#", "the pattern may match '\"'"),
        ({"type": "string", "pattern": r"a\\\\b"}, "#", "which a JSON string cannot hold as it is"),
        ({"type": "string", "pattern": r"[a\\n]"}, "#", "which a JSON string cannot hold as it is"),
        ({"type": "string", "pattern": "\t"}, "#", "which a JSON string cannot hold as it is"),
        ({"type": "object", "additionalProperties": {"then": {}}}, "#/additionalProperties", "'then'"),
    ],
)
def test_refused(schema: dict[str, Any], where: str, problem: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_schema(json.dumps(schema))
    assert str(caught.value).startswith(f"structured_output.json_schema: at {where}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"title": "x", "description": "y", "default": 3},
        {"type": "array", "uniqueItems": False, "items": True},
        {"properties": {"not": {"type": "string"}}, "required": ["not"]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "number", "enum": [1, 2.5]},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": "string", "pattern": r"[^\"\n\\]*\.\d+\s"},
        {"type": "object", "const": {"a": 1}},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": {"type": "null"}}},
        {"type": "object", "patternProperties": {"^a$": {}}, "propertyNames": {"maxLength": 3, "type": "string"}},
    ],
)
def test_accepted(schema: Any) -> None:
    check_schema(json.dumps(schema))


def test_deep_schemas_do_not_recurse() -> None:
    check_schema('{"type":"array","items":' * 500 + "{}" + "}" * 500)

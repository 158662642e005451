from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer.sampling.structured import StructuredOutput


class Person(BaseModel):
    name: str
    age: int


def test_each_kind_becomes_plain_text() -> None:
    assert (StructuredOutput(regex="a+").kind, StructuredOutput(regex="a+").text) == ("regex", "a+")
    assert StructuredOutput(ebnf='root ::= "a"').kind == "ebnf"
    assert StructuredOutput(json_object=True).kind == "json_object"
    assert StructuredOutput(choices=["b", "a", "b"]).choices == ("b", "a")
    assert json.loads(StructuredOutput(choices=["é", "a"]).text) == ["é", "a"]
    assert StructuredOutput(json_schema=Person).text == json.dumps(Person.model_json_schema())
    assert StructuredOutput(json_schema={"type": "object"}) == StructuredOutput(json_schema='{"type":"object"}')
    assert StructuredOutput(json_schema=False).text == "False".lower()
    assert StructuredOutput(json_schema=True).text == "true"


def test_order_of_properties_is_kept() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert list(json.loads(StructuredOutput(json_schema=schema).text)["properties"]) == ["z", "a"]


def test_equal_requests_are_equal_and_hashable() -> None:
    first, second = (StructuredOutput(regex="a", trigger=[5, 6], bound_token_id=5) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.trigger == (5, 6)


@pytest.mark.parametrize(
    ("fields", "name", "part"),
    [
        ({}, "structured_output", "none given, expected exactly one of regex"),
        ({"regex": "a", "ebnf": "b"}, "structured_output", "regex and ebnf given"),
        ({"json_object": 1}, "structured_output.json_object", "1 is not True or False"),
        ({"regex": 3}, "structured_output.regex", "3 is not a string"),
        ({"ebnf": b"a"}, "structured_output.ebnf", "is not a string"),
        ({"regex": "\ud800"}, "structured_output.regex", "valid Unicode"),
        ({"choices": "ab"}, "structured_output.choices", "at least one string"),
        ({"choices": []}, "structured_output.choices", "at least one string"),
        ({"choices": ["a", 1]}, "structured_output.choices", "at least one string"),
        ({"json_schema": 3}, "structured_output.json_schema", "3 is not a dict"),
        ({"regex": "a", "trigger": []}, "structured_output.trigger", "not empty"),
        ({"regex": "a", "trigger": ""}, "structured_output.trigger", "not empty"),
        ({"regex": "a", "trigger": 5}, "structured_output.trigger", "5 is not text or a list"),
        ({"regex": "a", "trigger": [-1]}, "structured_output.trigger", "-1 is not a token id"),
        ({"regex": "a", "trigger": [True]}, "structured_output.trigger", "True is not a token id"),
        ({"regex": "a", "trigger": [1.0]}, "structured_output.trigger", "1.0 is not a token id"),
        ({"regex": "a", "bound_token_id": 5}, "structured_output.bound_token_id", "without a trigger"),
        ({"regex": "a", "trigger": "x", "bound_token_id": 5}, "structured_output.bound_token_id", "without a trigger"),
        ({"regex": "a", "trigger": [5], "bound_token_id": -2}, "structured_output.bound_token_id", "token id >= 0"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], name: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutput(**fields)  # type: ignore[arg-type]
    assert caught.value.field == name
    assert part in str(caught.value)
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize(
    ("schema", "part"),
    [("{", "not JSON"), ("[]", "an object or a boolean, found []"), ("3", "found 3"), ({"a": {1, 2}}, "not JSON"),
     ({"minimum": float("nan")}, "not JSON"), ("[" * 100_000, "not JSON")],
)  # fmt: skip
def test_what_is_no_schema(schema: object, part: str) -> None:
    with pytest.raises(GrammarError, match="structured_output.json_schema") as caught:
        StructuredOutput(json_schema=schema)  # type: ignore[arg-type]
    assert part in str(caught.value)


def test_official_arguments() -> None:
    made = StructuredOutput.from_so_args({"schema_type": "json", "schema": '{"type": "object"}'})
    assert made == StructuredOutput(json_schema={"type": "object"})
    made = StructuredOutput.from_so_args(
        {"schema_type": "regex", "schema": "a", "trigger_token_ids": [7, 8], "bound_token_id": 7}
    )
    assert made == StructuredOutput(regex="a", trigger=(7, 8), bound_token_id=7)
    made = StructuredOutput.from_so_args({"schema_type": "ebnf", "schema": "x", "trigger_token_ids": None})
    assert made == StructuredOutput(ebnf="x")


@pytest.mark.parametrize(
    ("so_args", "field", "part"),
    [
        ([], "so_args", "is not a mapping"),
        ({"schema": "a"}, "so_args.schema_type", "is missing"),
        ({"schema_type": "regex"}, "so_args.schema", "is missing"),
        ({"schema_type": "regex", "schema": None}, "so_args.schema", "is missing"),
        ({"schema_type": "xml", "schema": "a"}, "so_args.schema_type", "'xml' is not one of 'json', 'regex', 'ebnf'"),
        ({"schema_type": ["json"], "schema": "a"}, "so_args.schema_type", "is not one of"),
        ({"schema_type": "regex", "schema": "a", "serialized": "x"}, "so_args.serialized", "is not one of"),
        ({"schema_type": "regex", "schema": "a", "bound_token_ids": [1]}, "so_args.bound_token_ids", "is not one of"),
        ({"schema_type": "regex", "schema": 4}, "so_args.schema", "4 is not a string"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": "x"}, "so_args.trigger_token_ids", "token ids"),
        ({"schema_type": "regex", "schema": "a", "bound_token_id": 1}, "so_args.bound_token_id", "trigger"),
    ],
)
def test_wrong_official_arguments(so_args: dict[str, object], field: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutput.from_so_args(so_args)
    assert caught.value.field == field
    assert str(caught.value).count(field) == 1
    assert part in str(caught.value)

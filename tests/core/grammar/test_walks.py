"""Random walks: whatever is drawn from what masks allow, the text is what was asked for."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.grammar import Vocabulary

EOS = 1
Compile = Callable[..., Any]
WALKS = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CLOSING = (b'"', b"}", b"]", b")", b"!", b"@", b".", b"com", b"org", b"m", b"o", b"r", b"c", b"g", b"")
SEEDS = st.integers(0, 2**32 - 1)

_spec = importlib.util.spec_from_file_location("validator", Path(__file__).with_name("validator.py"))
assert _spec is not None
assert _spec.loader is not None
validator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(validator)


def walk(matcher: Any, vocabulary: Vocabulary, seed: int, patience: int = 25, limit: int = 600) -> str:
    """Draw tokens uniformly; after `patience` of them, tokens that close something first. Checks every mask."""
    generator = random.Random(seed)
    row = np.full(vocabulary.words, -1, np.int32)
    text = b""
    for count in range(limit):
        assert matcher.fill_mask(row)
        mask = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert mask
        assert mask[-1] < vocabulary.size
        closing = [token for token in mask if vocabulary.tokens[token] in CLOSING]
        token = generator.choice(closing if count > patience and closing else mask)
        if count > patience and EOS in mask:
            token = EOS
        if generator.random() < 0.2:
            assert matcher.accept(token)
            matcher.rollback(1)
        assert matcher.accept(token)
        if token == EOS:
            assert matcher.is_terminated
            # the library counts encoded surrogates (bytes ED A0..BF xx) as characters; a reader sees U+FFFD for them
            return text.decode(errors="surrogatepass")
        text += vocabulary.tokens[token]
    raise AssertionError(f"no end after {limit} tokens: {text!r}")


REGEXES = [
    r"[a-z]{3,10}\.[0-9]+(foo|bar)*",
    r"(\+49|0)[1-9][0-9]{2,4}-\d{3,7}",
    r"\s*[A-Z][^\n\"]*!",
    r"(yes|no|maybe)( (yes|no|maybe)){0,4}",
    r"[à-ü]{2}世?",
    r"\w+@\w+\.(com|org)",
    r"^[^a-zA-Z]{4}$",
    r"(a|b)*a(a|b){4}",
    r"",
    r"\{\"x\":\d\}",
    r".{0,12}",
    r"a\..[.]\[.\].",
]


@pytest.mark.parametrize("pattern", REGEXES)
@WALKS
@given(seed=SEEDS)
def test_regex(pattern: str, seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    text = walk(compile_grammar(regex=pattern).matcher(), vocabulary, seed)
    # \s is that of ECMAScript, which counts the byte order mark as space
    assert re.fullmatch(pattern, text.replace("\ufeff", " ")), repr(text)


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
     "required": ["name"]},
    {"type": "array", "items": {"enum": ["red", "green", 3, None, 2.5]}, "minItems": 2, "maxItems": 5},
    {"type": "integer", "minimum": -5, "maximum": 117},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "[ab]{2,5}"}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                                                         "v": {"type": "boolean"}}, "required": ["next"]}},
     "$ref": "#/$defs/node"},
    {"type": "array", "prefixItems": [{"type": "string", "minLength": 1, "maxLength": 3}, {"const": {"a": ["é\n"]}}],
     "items": {"type": "null"}, "minItems": 2},
    {"type": ["string", "integer"], "minLength": 2, "maxLength": 4},
    {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}, "maxItems": 3},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@WALKS
@given(seed=SEEDS)
def test_json_schema(schema: Any, seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    text = walk(compile_grammar(json_schema=schema).matcher(), vocabulary, seed)
    assert validator.is_valid(json.loads(text, strict=True), schema, schema), repr(text)


@WALKS
@given(seed=SEEDS)
def test_json_object(seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    assert isinstance(json.loads(walk(compile_grammar(json_object=True).matcher(), vocabulary, seed)), dict)


@WALKS
@given(seed=SEEDS)
def test_choices(seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    choices = ["left", "left turn", "right", "", 'q"\\', "später\n"]
    assert walk(compile_grammar(choices=choices).matcher(), vocabulary, seed) in choices


@WALKS
@given(seed=SEEDS)
def test_ebnf(seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    rules = 'root ::= "(" root ")" | pair+\npair ::= [a-c] "=" [0-9]{1,2} ";"?'
    text = walk(compile_grammar(ebnf=rules).matcher(), vocabulary, seed)
    depth = len(text) - len(text.lstrip("("))
    assert text[len(text) - depth :] == ")" * depth
    assert re.fullmatch(r"([a-c]=[0-9]{1,2};?)+", text[depth : len(text) - depth])


@WALKS
@given(choices=st.lists(st.text(max_size=12), min_size=1, max_size=6), seed=SEEDS)
def test_any_choices(choices: list[str], seed: int, compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    assert walk(compile_grammar(choices=choices).matcher(), vocabulary, seed) in choices


@WALKS
@given(seed=SEEDS, tokens=st.lists(st.integers(0, 511), max_size=12))
def test_free_text_before_a_marker(
    seed: int, tokens: list[int], compile_grammar: Compile, vocabulary: Vocabulary
) -> None:
    matcher = compile_grammar(choices=["up", "down"], trigger=[509, 7]).matcher()
    for token in tokens:
        assert matcher.accept(token) or matcher.is_constrained
        if matcher.is_constrained:
            break
    if not matcher.is_constrained:
        matcher.commit([509, 7])
    assert walk(matcher, vocabulary, seed) in ("up", "down")

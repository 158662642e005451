"""What text a request may produce: one grammar, and optionally the marker after which it starts."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import BaseModel

from deepinfer.errors import GrammarError, InvalidRequest

__all__ = ["GrammarKind", "StructuredOutput"]

GrammarKind = Literal["regex", "json_schema", "ebnf", "choices", "json_object"]

_KINDS: tuple[GrammarKind, ...] = ("regex", "json_schema", "ebnf", "choices", "json_object")
_OFFICIAL_KINDS: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "ebnf": "ebnf"}
_OFFICIAL_NAMES = {"trigger": "trigger_token_ids", "bound_token_id": "bound_token_id"}
_OFFICIAL_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclass(frozen=True)
class StructuredOutput:
    """Grammar of one request's output; exactly one of the first five fields is given.

    Values are normalised on construction to plain strings and tuples, so that equal grammars compare equal and cross a
    process boundary as they are.

    Attributes:
        regex: the whole output matches this expression. No look-around, word boundaries, back-references or inline
            flags; `.` is anything but a line feed, `\\d` and `\\w` are ASCII, `\\s` also matches U+FEFF.
        json_schema: a schema as dict, JSON text or pydantic model class; kept as JSON text. Properties come in the
            order of the schema, and only those that it names.
        ebnf: rules `name ::= ...`, starting at `root`.
        choices: the output is one of these strings.
        json_object: any JSON object.
        trigger: marker after which the grammar starts, as token ids or as text; before it, everything is allowed.
        bound_token_id: once this token appears before the marker is complete, the rest of the marker is forced. Needs
            a trigger of token ids.

    Raises:
        InvalidRequest: a field has the wrong type, or not exactly one grammar is given; names the field.
        GrammarError: `json_schema` is not a JSON schema.
    """

    regex: str | None = None
    json_schema: Mapping[str, Any] | str | bool | type[BaseModel] | None = None
    ebnf: str | None = None
    choices: Iterable[str] | None = None
    json_object: bool = False
    trigger: str | Iterable[int] | None = None
    bound_token_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            _refuse("json_object", self.json_object, "True or False")
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False) or self._is_false_schema(kind)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"{found} given, expected exactly one of {', '.join(_KINDS)}", field="structured_output"
            )
        for name in ("regex", "ebnf"):
            if getattr(self, name) is not None and not _is_text(getattr(self, name)):
                _refuse(name, getattr(self, name), "a string of valid Unicode")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choices is not None:
            object.__setattr__(self, "choices", _choices(self.choices))
        object.__setattr__(self, "trigger", _trigger(self.trigger))
        if self.bound_token_id is not None:
            bound = _token_id("bound_token_id", self.bound_token_id)
            if not isinstance(self.trigger, tuple):
                _refuse("bound_token_id", bound, "allowed without a trigger of token ids")
            object.__setattr__(self, "bound_token_id", bound)

    def _is_false_schema(self, kind: GrammarKind) -> bool:
        """Whether this is the schema `false`, which is given although it looks like nothing."""
        return kind == "json_schema" and self.json_schema is False

    @property
    def kind(self) -> GrammarKind:
        """Which of the five grammars is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """The grammar as text; with `kind`, all that compilation depends on."""
        match self.kind:
            case "choices":
                return json.dumps(list(self.choices or ()), ensure_ascii=False)
            case "json_object":
                return ""
            case kind:
                return str(getattr(self, kind))

    @classmethod
    def from_so_args(cls, so_args: Mapping[str, Any]) -> StructuredOutput:
        """Read the official engine's `so_args` (spec/engine 9).

        Args:
            so_args: "schema_type" ("json", "regex" or "ebnf") and "schema", optionally "trigger_token_ids" and
                "bound_token_id"; None stands for an absent key.

        Raises:
            InvalidRequest: a key is missing, unknown or holds a wrong value; names the key.
            GrammarError: the schema is not a JSON schema.
        """
        if not isinstance(so_args, Mapping):
            raise InvalidRequest(f"{so_args!r} is not a mapping with schema_type and schema", field="so_args")
        given = {str(key): value for key, value in so_args.items() if value is not None}
        for key in given:
            if key not in _OFFICIAL_KEYS:
                raise InvalidRequest(f"is not one of {', '.join(_OFFICIAL_KEYS)}", field=f"so_args.{key}")
        for key in ("schema_type", "schema"):
            if key not in given:
                raise InvalidRequest(
                    f"is missing; give schema_type and schema, found {sorted(given)}", field=f"so_args.{key}"
                )
        kind = _OFFICIAL_KINDS.get(given["schema_type"]) if isinstance(given["schema_type"], str) else None
        if kind is None:
            allowed = ", ".join(map(repr, _OFFICIAL_KINDS))
            raise InvalidRequest(f"{given['schema_type']!r} is not one of {allowed}", field="so_args.schema_type")
        trigger = given.get("trigger_token_ids")
        if isinstance(trigger, str):
            raise InvalidRequest(f"{trigger!r} is not a list of token ids", field="so_args.trigger_token_ids")
        try:
            return cls(**{kind: given["schema"]}, trigger=trigger, bound_token_id=given.get("bound_token_id"))
        except InvalidRequest as error:
            name = str(error.field).removeprefix("structured_output.")
            message = str(error).removeprefix(f"{error.field}: ")
            raise InvalidRequest(message, field=f"so_args.{_OFFICIAL_NAMES.get(name, 'schema')}") from error


def _schema_text(schema: Any) -> str:
    """The schema as compact JSON text, keys in their own order."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"structured_output.json_schema: not JSON: {error}") from error
    elif not isinstance(schema, Mapping | bool):
        _refuse("json_schema", schema, "a dict, JSON text or a pydantic model class")
    if not isinstance(schema, Mapping | bool):
        raise GrammarError(f"structured_output.json_schema: a schema is an object or a boolean, found {schema!r}")
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"structured_output.json_schema: not JSON: {error}") from error


def _choices(value: Any) -> tuple[str, ...]:
    expected = "a list of at least one string of valid Unicode"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse("choices", value, expected)
    choices = tuple(value)
    if not choices or not all(map(_is_text, choices)):
        _refuse("choices", list(choices), expected)
    return tuple(dict.fromkeys(choices))


def _trigger(value: Any) -> str | tuple[int, ...] | None:
    expected = "text or a list of token ids, not empty"
    if value is None:
        return None
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        _refuse("trigger", value, expected)
    trigger = value if isinstance(value, str) else tuple(_token_id("trigger", item) for item in value)
    if not trigger or not (_is_text(trigger) or isinstance(trigger, tuple)):
        _refuse("trigger", value, expected)
    return trigger


def _is_text(value: Any) -> bool:
    """Whether this is a string that can be encoded: a lone surrogate has no bytes to match."""
    return isinstance(value, str) and not any(0xD800 <= ord(character) < 0xE000 for character in value)


def _token_id(field: str, value: Any) -> int:
    try:
        token = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        token = -1
    if not 0 <= token < 2**31:
        _refuse(field, value, "a token id >= 0")
    return token


def _refuse(field: str, value: Any, expected: str) -> NoReturn:
    raise InvalidRequest(f"{value!r} is not {expected}", field=f"structured_output.{field}")

"""The text of `DEEPINFER_OPS`: which source single operations are taken from."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from deepinfer.errors import ConfigError

__all__ = ["EVERY_OP", "SOURCES", "OpOverrides", "nearest", "parse_overrides"]

EVERY_OP = "*"
SOURCES = ("native", "reference", "composite")
FIELD = "DEEPINFER_OPS"


def nearest(name: str, known: Collection[str]) -> str:
    """A hint to the most similar known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class OpOverrides:
    """Parsed overrides.

    Attributes:
        named: source per op that is named; binding, so it is an error if the source has no such op.
        every: preferred source for all other ops; those that it lacks are bound as usual. None for no preference.
    """

    named: dict[str, str]
    every: str | None = None

    def source_of(self, op: str) -> str | None:
        """The source asked for an op, named or by preference."""
        return self.named.get(op, self.every)


def parse_overrides(text: str, ops: Collection[str]) -> OpOverrides:
    """Read `op=source,...`; a source is `native`, `reference`, `composite` or the name of a backend.

    Raises:
        ConfigError: malformed item, unknown op (with the nearest name), or an op that is given twice.
    """
    named: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, separator, source = (part.strip() for part in item.partition("="))
        if not separator or not op or not source:
            raise ConfigError(
                f"{item!r} is not of the form op=source (source: {', '.join(SOURCES)} or a backend)", field=FIELD
            )
        if op != EVERY_OP and op not in ops:
            raise ConfigError(f"there is no operation {op!r}{nearest(op, ops)}", field=FIELD)
        if op in named:
            raise ConfigError(f"{op!r} is given twice, as {named[op]!r} and {source!r}", field=FIELD)
        named[op] = source.lower()
    every = named.pop(EVERY_OP, None)
    return OpOverrides(named, every)

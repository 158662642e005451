"""The grammar library behind one door: xgrammar bound to a vocabulary."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import numpy as np

from deepinfer.errors import CapabilityError, GrammarError
from deepinfer.grammar.schema_check import check_schema
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.sampling.structured import GrammarKind

__all__ = ["JSON_KINDS", "GrammarLibrary", "clean_message", "grammar_tokens", "has_control", "require_library"]

_SOURCE_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: (?:Check failed: \(.*?\) is false: )?(?:Warning: )?")
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_PATTERN_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
JSON_KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object")


def require_library() -> None:
    """Refuse early where the grammar library is not installed.

    Raises:
        CapabilityError: says how to install it.
    """
    if importlib.util.find_spec("xgrammar") is None:
        raise CapabilityError(
            "structured output needs xgrammar, which is not installed: pip install 'deepinfer-core[structured]'"
        )


def clean_message(text: str) -> str:
    """A library message without clock and source file, on one line."""
    return " ".join(_SOURCE_PREFIX.sub("", text).split())


def grammar_tokens(vocabulary: Vocabulary, kind: GrammarKind) -> tuple[bytes, ...]:
    """Text of each token as a kind of grammar may use it; empty for what it may not.

    JSON has no control characters but line breaks, which only separate, never within a string. The library allows
    others in strings of limited length, so that tokens with them are taken away.
    """
    if kind not in JSON_KINDS:
        return vocabulary.tokens
    return tuple(b"" if has_control(text) else text for text in vocabulary.tokens)


def has_control(text: bytes) -> bool:
    """Whether there is a control character other than a line break."""
    return _CONTROL.search(text) is not None


class GrammarLibrary:
    """Compiles grammars for one vocabulary and carries compiled ones between processes.

    Raises:
        CapabilityError: on construction, if the library is not installed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        require_library()
        # Imports torch and a tokenizer library: seconds, so only where a grammar is used.
        import xgrammar

        self._library = xgrammar
        self._vocabulary = vocabulary
        self._bound: dict[bool, tuple[Any, Any]] = {}

    def _bind(self, kind: GrammarKind) -> tuple[Any, Any]:
        """Token table and compiler for a kind of grammar."""
        is_json = kind in JSON_KINDS
        if is_json not in self._bound:
            tokens = self._library.TokenizerInfo(
                list(grammar_tokens(self._vocabulary, kind)),
                self._library.VocabType.RAW,
                vocab_size=self._vocabulary.size,
                stop_token_ids=list(self._vocabulary.eos_token_ids),
            )
            self._bound[is_json] = (tokens, self._library.GrammarCompiler(tokens, max_threads=1, cache_enabled=False))
        return self._bound[is_json]

    def compile(self, kind: GrammarKind, text: str) -> Any:
        """Compile a grammar; may be slow, and with a hostile grammar endless or fatal to the process.

        Args:
            kind, text: as in `StructuredOutput`.

        Raises:
            GrammarError: says what is wrong with the grammar.
        """
        try:
            compiled = self._compile(kind, text)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            if isinstance(error, GrammarError):
                raise
            raise GrammarError(f"structured_output.{kind}: {clean_message(str(error))}") from error
        row = np.zeros((1, self._vocabulary.words), np.int32)
        self._library.GrammarMatcher(compiled).fill_next_token_bitmask(row, 0)
        if not row.any():
            raise GrammarError(f"structured_output.{kind}: no text of this vocabulary matches the grammar")
        return compiled

    def _compile(self, kind: GrammarKind, text: str) -> Any:
        compiler = self._bind(kind)[1]
        match kind:
            case "regex":
                self._library.Grammar.from_regex(text)  # so that an error speaks of the user's positions
                return compiler.compile_regex(_PATTERN_PART.sub(_plain_dot, text))
            case "ebnf":
                return compiler.compile_grammar(text)
            case "choices":
                alternatives = " | ".join(map(_literal, json.loads(text)))
                return compiler.compile_grammar(f"root ::= {alternatives}\n")
            case "json_object":
                return compiler.compile_json_schema('{"type": "object"}', strict_mode=False)
            case "json_schema":
                check_schema(text)
                return compiler.compile_json_schema(text)

    def pack(self, compiled: Any) -> bytes:
        """A compiled grammar as bytes."""
        return str(compiled.serialize_json()).encode()

    def unpack(self, kind: GrammarKind, packed: bytes) -> Any:
        """The compiled grammar of `pack`, made by a library of the same version and vocabulary."""
        return self._library.CompiledGrammar.deserialize_json(packed.decode(), self._bind(kind)[0])

    def matcher(self, compiled: Any, stop_token_ids: tuple[int, ...]) -> Any:
        """A fresh matcher that ends at any of these ids once the text is complete."""
        return self._library.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))

    def batch(self, threads: int) -> Any:
        """Fills the masks of many matchers at once on this many threads."""
        return self._library.BatchGrammarMatcher(max_threads=threads)


def _plain_dot(part: re.Match[str]) -> str:
    """A dot is any character but a line feed; to the library it is any character."""
    return r"[^\n]" if part.group() == "." else part.group()


def _literal(text: str) -> str:
    """A string literal of the rule language; everything but plain letters by code point."""
    return '"' + "".join(c if c.isascii() and (c.isalnum() or c == " ") else f"\\U{ord(c):08x}" for c in text) + '"'

"""Structured outputs: compile service, matcher of one sequence, mask filling (design 6, 8, 9)."""

from __future__ import annotations

from deepinfer.grammar.compiler import CompiledGrammar, CompilerStats, GrammarCompiler
from deepinfer.grammar.filler import MaskFiller, MaskReport, MaskRequest
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.vocabulary import Vocabulary

__all__ = [
    "CompiledGrammar",
    "CompilerStats",
    "GrammarCompiler",
    "MaskFiller",
    "MaskReport",
    "MaskRequest",
    "Matcher",
    "Vocabulary",
]

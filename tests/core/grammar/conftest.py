from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.checkpoint.tokenizer_file import SpecialIds, tokenizer_json
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.sampling.structured import StructuredOutput

# The library is an optional extra; where it must be there, a missing one has to fail.
if importlib.util.find_spec("xgrammar") is None and not os.environ.get("DEEPINFER_TEST_STRUCTURED"):
    collect_ignore = ["test_compiler.py", "test_filler.py", "test_matcher.py", "test_walks.py", "test_worker.py"]

IDS = SpecialIds(bos=0, eos=1, pad=2, system=507, image=508)


def build_vocabulary(vocab_size: int = 512) -> Vocabulary:
    return Vocabulary.from_tokenizer_json(tokenizer_json(vocab_size, IDS), vocab_size, (IDS.eos,))


@pytest.fixture(scope="session")
def tiny_vocabulary() -> Vocabulary:
    return build_vocabulary()


@pytest.fixture(scope="session")
def golden_vocabulary(golden: Path) -> Vocabulary:
    folder = golden / "v41-tiny-a"
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    return Vocabulary.from_file(folder / "tokenizer.json", text["vocab_size"], (1,))


class InlineWorker:
    """Compiles in the calling thread: no process to start, for grammars that are known to be harmless."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from deepinfer.grammar.library import GrammarLibrary

        self._library = GrammarLibrary(vocabulary)

    def compile(self, kind: Any, text: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None) -> bytes:
        return self._library.pack(self._library.compile(kind, text))

    def close(self) -> None:
        pass


Compile = Callable[..., Any]


@pytest.fixture(scope="session", params=["tiny", "golden"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.getfixturevalue(f"{request.param}_vocabulary")


@pytest.fixture(scope="session")
def compile_grammar(vocabulary: Vocabulary) -> Iterator[Compile]:
    from deepinfer.grammar import GrammarCompiler

    with GrammarCompiler(vocabulary, make_worker=InlineWorker, workers=1) as compiler:

        def run(request: StructuredOutput | None = None, **grammar: Any) -> Any:
            future: Future[Any] = compiler.submit(request or StructuredOutput(**grammar))
            return future.result(60)

        yield run


@pytest.fixture(scope="session")
def allowed(vocabulary: Vocabulary) -> Callable[[Any], list[int]]:
    """Ids that the next mask of a matcher allows, the row filled with noise before."""

    def run(matcher: Any) -> list[int]:
        row = np.full(vocabulary.words, 0x55555555, np.int32)
        matcher.fill_mask(row)
        return ids_of(row)

    return run


@pytest.fixture(scope="session")
def encode(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Tokens that spell a text, one for each byte."""
    by_bytes = {text: token for token, text in enumerate(vocabulary.tokens) if text}
    return lambda text: [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.fixture(scope="session")
def bits_of() -> Callable[[np.ndarray], list[int]]:
    """Ids whose bit is set in a mask row."""
    return ids_of


def ids_of(row: np.ndarray) -> list[int]:
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()

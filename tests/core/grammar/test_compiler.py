from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from deepinfer.errors import CapabilityError, EngineDead, GrammarError
from deepinfer.grammar import CompilerStats, GrammarCompiler, Vocabulary
from deepinfer.grammar.library import GrammarLibrary, clean_message
from deepinfer.grammar.worker_process import Cancelled
from deepinfer.sampling.structured import StructuredOutput

WAIT_S = 30.0


class ScriptedWorker:
    """Compiles when told to, and counts."""

    def __init__(self, library: GrammarLibrary) -> None:
        self.library = library
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Semaphore(0)
        self.texts: list[str] = []
        self.is_closed = False
        self.error: Exception | None = None

    def compile(self, kind: Any, text: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None) -> bytes:
        self.texts.append(text)
        self.started.release()
        while not self.go.wait(0.01):
            if is_cancelled is not None and is_cancelled():
                raise Cancelled
        if self.error is not None:
            raise self.error
        return self.library.pack(self.library.compile(kind, text))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def library(tiny_vocabulary: Vocabulary) -> GrammarLibrary:
    return GrammarLibrary(tiny_vocabulary)


@pytest.fixture
def worker(library: GrammarLibrary) -> ScriptedWorker:
    return ScriptedWorker(library)


Make = Callable[..., GrammarCompiler]


@pytest.fixture
def make(tiny_vocabulary: Vocabulary, worker: ScriptedWorker) -> Iterator[Make]:
    made: list[GrammarCompiler] = []

    def run(**arguments: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(tiny_vocabulary, make_worker=lambda _: worker, workers=1, **arguments))
        return made[-1]

    yield run
    worker.go.set()
    for compiler in made:
        compiler.close()


def test_equal_grammars_are_compiled_once(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    worker.go.clear()
    futures = [compiler.submit(StructuredOutput(regex="a+")) for _ in range(5)]
    futures.append(compiler.submit(StructuredOutput(regex="a+", trigger=[5])))
    worker.go.set()
    grammars = [future.result(WAIT_S) for future in futures]
    assert worker.texts == ["a+"]
    assert len({id(grammar.native) for grammar in grammars}) == 1
    assert [grammar.trigger is None for grammar in grammars] == [True] * 5 + [False]
    assert compiler.submit(StructuredOutput(regex="a+")).done()
    assert compiler.submit(StructuredOutput(regex="a+", trigger="x")).result(WAIT_S).trigger is not None
    compiler.submit(StructuredOutput(ebnf="root ::= [a]+")).result(WAIT_S)
    assert worker.texts == ["a+", "root ::= [a]+"]
    stats = compiler.stats
    assert (stats.hits, stats.misses, stats.failures, stats.cancelled, stats.cached) == (2, 2, 0, 0, 2)


def test_cache_keeps_the_latest_used(make: Make, worker: ScriptedWorker) -> None:
    one = make()
    sizes = {}
    for text in ("aaa", "bbb", "ccc"):
        before = one.stats.cached_bytes
        one.submit(StructuredOutput(regex=text)).result(WAIT_S)
        sizes[text] = one.stats.cached_bytes - before
    worker.texts.clear()
    compiler = make(cache_bytes=sizes["aaa"] + sizes["bbb"])
    for text in ("aaa", "bbb", "aaa", "ccc", "aaa", "bbb"):
        compiler.submit(StructuredOutput(regex=text)).result(WAIT_S)
        assert compiler.stats.cached_bytes <= sizes["aaa"] + sizes["bbb"]
    assert worker.texts == ["aaa", "bbb", "ccc", "bbb"]
    none = make(cache_bytes=0)
    none.submit(StructuredOutput(regex="aaa")).result(WAIT_S)
    assert none.stats.cached == 0


def test_errors_are_not_cached(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    for _ in range(2):
        with pytest.raises(GrammarError, match="structured_output.regex: Regex parsing error at position 2"):
            compiler.submit(StructuredOutput(regex="(")).result(WAIT_S)
    assert worker.texts == ["(", "("]
    assert compiler.stats == CompilerStats(misses=2, failures=2)


def test_any_failure_is_typed_and_the_thread_lives(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    worker.error = KeyError("odd")
    with pytest.raises(GrammarError, match="structured_output.regex: KeyError: 'odd'"):
        compiler.submit(StructuredOutput(regex="a")).result(WAIT_S)
    worker.error = None
    assert compiler.submit(StructuredOutput(regex="a")).result(WAIT_S).kind == "regex"


def test_a_cancelled_grammar_leaves_the_queue_or_its_worker(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    worker.go.clear()
    running, queued = compiler.submit(StructuredOutput(regex="a")), compiler.submit(StructuredOutput(regex="b"))
    other = compiler.submit(StructuredOutput(regex="c"))
    assert worker.started.acquire(timeout=WAIT_S)
    assert queued.cancel()
    assert running.cancel()
    assert worker.started.acquire(timeout=WAIT_S)
    worker.go.set()
    assert other.result(WAIT_S).kind == "regex"
    assert worker.texts == ["a", "c"]
    with pytest.raises(CancelledError):
        running.result(WAIT_S)
    assert compiler.stats.cancelled == 2


def test_who_still_waits_keeps_a_grammar_alive(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    worker.go.clear()
    first, second = (compiler.submit(StructuredOutput(regex="a")) for _ in range(2))
    assert worker.started.acquire(timeout=WAIT_S)
    first.cancel()
    worker.go.set()
    assert second.result(WAIT_S).kind == "regex"
    assert worker.texts == ["a"]


def test_close_fails_who_waits(make: Make, worker: ScriptedWorker) -> None:
    compiler = make()
    worker.go.clear()
    futures = [compiler.submit(StructuredOutput(regex=text)) for text in "abc"]
    assert worker.started.acquire(timeout=WAIT_S)
    compiler.close()
    for future in futures:
        with pytest.raises(EngineDead, match="closed before this grammar was compiled"):
            future.result(0)
    assert worker.is_closed
    with pytest.raises(EngineDead, match="the grammar compiler is closed"):
        compiler.submit(StructuredOutput(regex="a"))
    compiler.close()


def test_library_must_be_installed(tiny_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=r"pip install 'deepinfer-core\[structured\]'"):
        GrammarCompiler(tiny_vocabulary)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"regex": "("}, "regex: Regex parsing error at position 2: The parenthesis is not closed."),
        ({"regex": "....("}, "regex: Regex parsing error at position 6: The parenthesis is not closed."),
        ({"regex": "(?=a)b"}, "regex: .*Lookahead is not supported"),
        ({"regex": r"(a)\1"}, "regex: .*Backreference is not supported"),
        ({"regex": "[z-a]"}, "regex: .*lower bound is larger than upper bound"),
        ({"regex": "a\x00"}, "regex: .*null characters"),
        ({"ebnf": 'a ::= "a"'}, 'ebnf: .*root rule with name "root" is not found'),
        ({"ebnf": "root ::= other"}, 'ebnf: .*Rule "other" is not defined'),
        ({"ebnf": 'root ::= "a'}, "ebnf: .*string literal"),
        ({"ebnf": "root ::= root"}, "ebnf: no text of this vocabulary matches the grammar"),
        ({"json_schema": {"type": "text"}}, 'json_schema: Unsupported type "text"'),
        ({"json_schema": False}, "json_schema: .*cannot accept any value"),
        ({"json_schema": {"$ref": "#/$defs/no"}}, "json_schema: .*Cannot find field"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema: .*parenthesis is not closed"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema: .*minimum greater"),
    ],
)
def test_wrong_grammars(make: Make, grammar: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=f"^structured_output.{message}") as caught:
        make().submit(StructuredOutput(**grammar)).result(WAIT_S)
    assert ".cc" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_lose_clock_and_source_file() -> None:
    text = "[23:30:11] /project/cpp/a.cc:5077: Check failed: (error.empty()) is false: Bad\n near x\n"
    assert clean_message(text) == "Bad near x"
    assert clean_message("plain") == "plain"


@pytest.mark.parametrize(
    "choices", [["a"], ["", "x"], ['"', "\\", "\n\t\r", "\x7f", "}"], ["é世😀", "\u2028"], ["a b", "a b c", "-[x]*"]]
)
def test_choices_are_taken_as_they_are(make: Make, choices: list[str], tiny_vocabulary: Vocabulary) -> None:
    grammar = make().submit(StructuredOutput(choices=choices)).result(WAIT_S)
    by_bytes = {text: token for token, text in enumerate(tiny_vocabulary.tokens) if text}
    for choice in choices:
        matcher = grammar.matcher()
        matcher.commit([*(by_bytes[bytes([byte])] for byte in choice.encode()), 1])
        assert matcher.is_terminated
    for wrong in ("b", "aa", "xx", "-[xx]*"):
        matcher = grammar.matcher()
        with pytest.raises(GrammarError):
            matcher.commit([*(by_bytes[bytes([byte])] for byte in wrong.encode()), 1])

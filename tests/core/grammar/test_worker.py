"""Real worker processes: hostile grammars against the clock, crashes and memory."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from support.grammars import ENDLESS_SCHEMA

from deepinfer.errors import GrammarError
from deepinfer.grammar import GrammarCompiler, Vocabulary
from deepinfer.grammar.worker import time_limit
from deepinfer.grammar.worker_process import Cancelled, WorkerProcess
from deepinfer.sampling.structured import StructuredOutput

CRASHING = """
import os, socket, sys
from deepinfer.grammar.frames import Job, Reply, Setup, receive, send
channel = socket.socket(fileno=int(sys.argv[1]))
receive(channel, Setup)
send(channel, Reply())
receive(channel, Job)
print("about to fall", flush=True)
os.abort() if "{how}" == "signal" else os._exit(7)
"""


@pytest.fixture(scope="module")
def worker(tiny_vocabulary: Vocabulary) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tiny_vocabulary)
    process.start()
    yield process
    process.close()


def test_service_compiles_in_a_process_of_its_own(tiny_vocabulary: Vocabulary) -> None:
    with GrammarCompiler(tiny_vocabulary, workers=1, grammar_timeout=60) as compiler:
        future = compiler.submit(StructuredOutput(regex="a+"))
        matcher = future.result(120).matcher()
        assert matcher.accept(tiny_vocabulary.tokens.index(b"a"))
        with pytest.raises(GrammarError, match="parenthesis is not closed"):
            compiler.submit(StructuredOutput(regex="(")).result(60)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a^b", "regex: Regex parsing warning at position 2: '\\^' should be at the start"),
        ("regex", r"\q", r"regex: .*Escape sequence '\\q' is not recognized"),
        ("json_schema", '{"type": "number", "multipleOf": 0.5}', "json_schema: multipleOf is not supported"),
        ("json_schema", '{"type": "string", "pattern": "a", "minLength": 3}', "json_schema: pattern combined with"),
        ("json_schema", '{"allOf": [{"type": "integer"}, {"type": "number"}]}', "json_schema: Support for allOf"),
        ("json_schema", '{"$ref": "http://example.com/a"}', "json_schema: URI should"),
    ],
)
def test_what_the_library_would_drop_is_refused(worker: WorkerProcess, kind: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=f"^structured_output.{message}"):
        worker.compile(kind, text, 60)  # type: ignore[arg-type]
    assert worker.compile("regex", "abc", 60)


def test_timeout_kills_and_the_next_grammar_compiles(worker: WorkerProcess) -> None:
    start = time.monotonic()
    with pytest.raises(GrammarError, match=r"json_schema: not compiled within 0.3 s \(grammar_timeout\); simplify it"):
        worker.compile("json_schema", ENDLESS_SCHEMA, 0.3)
    assert time.monotonic() - start < 10
    assert worker.compile("regex", "abc", 60)


def test_cancellation_kills(worker: WorkerProcess) -> None:
    worker.start()
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        worker.compile("json_schema", ENDLESS_SCHEMA, 60, lambda: next(asked))


def test_memory_is_limited(tiny_vocabulary: Vocabulary) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("address space is limited on Linux only")
    worker = WorkerProcess(tiny_vocabulary, memory_limit_bytes=48 << 20)
    try:
        text = json.dumps({"enum": [f"{index:07d}" for index in range(60_000)]})
        with pytest.raises(GrammarError, match="memory|crashed its compiler|bad_alloc"):
            worker.compile("json_schema", text, 60)
        assert worker.compile("regex", "abc", 60)
    finally:
        worker.close()


@pytest.mark.parametrize(("how", "cause"), [("signal", "SIGABRT"), ("exit", "exit code 7: about to fall")])
def test_a_crash_is_an_error_of_its_grammar(tiny_vocabulary: Vocabulary, how: str, cause: str) -> None:
    worker = WorkerProcess(tiny_vocabulary, command=(sys.executable, "-c", CRASHING.replace("{how}", how)))
    try:
        for _ in range(2):
            with pytest.raises(GrammarError, match=f"regex: this grammar crashed its compiler .{cause}."):
                worker.compile("regex", "a", 60)
    finally:
        worker.close()


@pytest.mark.skipif(not hasattr(signal, "getitimer"), reason="this system has no interval timers")
def test_the_clock_of_a_grammar_stops_with_it() -> None:
    """A worker that idles longer than a grammar may take is there for the next one."""
    with time_limit(30.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 30
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_worker_that_was_killed_while_idle_starts_again(tiny_vocabulary: Vocabulary) -> None:
    worker = WorkerProcess(tiny_vocabulary)
    try:
        worker.start()
        process = worker._process
        assert process is not None
        process.kill()
        process.wait(30)
        assert worker.compile("regex", "abc", 60)
    finally:
        worker.close()


def test_a_worker_that_does_not_start(tiny_vocabulary: Vocabulary) -> None:
    worker = WorkerProcess(tiny_vocabulary, command=(sys.executable, "-c", "raise SystemExit('no such thing')"))
    try:
        with pytest.raises(GrammarError, match="compiler did not start: exit code 1: no such thing"):
            worker.compile("regex", "a", 60)
    finally:
        worker.close()

"""Compiling grammars beside the loop: workers, time-out, cancellation and a cache of results."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer.errors import DeepInferError, EngineDead, GrammarError
from deepinfer.grammar.library import JSON_KINDS, GrammarLibrary, grammar_tokens, has_control, require_library
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.trigger import Trigger, build_trigger
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.grammar.worker_process import Cancelled, WorkerProcess
from deepinfer.sampling.structured import GrammarKind, StructuredOutput

__all__ = ["CompiledGrammar", "CompilerStats", "GrammarCompiler", "Worker"]

Key = tuple[str, GrammarKind, str]


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar ready to make matchers; immutable, may be shared by threads and sequences.

    Attributes:
        kind: which grammar of `StructuredOutput`.
        vocabulary: of the model.
        tokens: text of each token as this kind of grammar sees it.
        library, native: the grammar library and its compiled object.
        trigger: automaton of the marker, None if the grammar starts at once.
    """

    kind: GrammarKind
    vocabulary: Vocabulary
    tokens: tuple[bytes, ...]
    library: GrammarLibrary
    native: Any
    trigger: Trigger | None = None

    def matcher(self, *, stop_token_ids: Iterable[int] = (), free_after_end: bool = False) -> Matcher:
        """A matcher at the start of the text; see `Matcher`."""
        return Matcher(self, stop_token_ids=stop_token_ids, free_after_end=free_after_end)


class Worker(Protocol):
    """Compiles for one thread; `WorkerProcess` in production."""

    def compile(
        self, kind: GrammarKind, text: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> bytes:
        """Packed grammar; raises `GrammarError` or `Cancelled`."""

    def close(self) -> None:
        """Free what the worker holds."""


@dataclass(frozen=True)
class CompilerStats:
    """Counts since the start, and what the cache holds now."""

    hits: int = 0
    misses: int = 0
    failures: int = 0
    cancelled: int = 0
    cached: int = 0
    cached_bytes: int = 0


@dataclass(eq=False)
class _Job:
    """One grammar being compiled, and who waits for it."""

    key: Key
    waiting: list[tuple[StructuredOutput, Future[CompiledGrammar]]] = field(default_factory=list)

    def is_abandoned(self) -> bool:
        return all(future.cancelled() for _, future in self.waiting)


class GrammarCompiler:
    """Turns requests into compiled grammars without ever blocking the caller.

    Equal grammars are compiled once, also while in flight. Each thread owns a worker process, so that a grammar that
    hangs or crashes the compiler costs its owner an error and the others nothing. A future may be cancelled at any
    time; the work ends when nobody waits for it.

    Args:
        vocabulary: of the model.
        grammar_timeout: seconds one compilation may take, counted from the moment a worker takes it up.
        cache_bytes: memory for compiled grammars, least recently used leave first; 0 keeps none.
        workers: compilations at a time.
        make_worker: for tests.

    Raises:
        CapabilityError: the grammar library is not installed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        grammar_timeout: float = 20.0,
        cache_bytes: int = 1 << 30,
        workers: int = 2,
        make_worker: Callable[[Vocabulary], Worker] = WorkerProcess,
    ) -> None:
        require_library()
        self._vocabulary, self._digest = vocabulary, vocabulary.digest
        self._tokens: dict[bool, tuple[bytes, ...]] = {}
        self._timeout = grammar_timeout
        self._cache = _Cache(cache_bytes)
        self._make_worker = make_worker
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[Key, _Job] = {}
        self._counts = dict.fromkeys(("hits", "misses", "failures", "cancelled"), 0)
        self._is_closed = False
        self._library: GrammarLibrary | None = None
        self._library_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"grammar-compiler-{index}", daemon=True)
            for index in range(max(1, workers))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: StructuredOutput) -> Future[CompiledGrammar]:
        """Start compiling; the future brings the grammar or a typed error.

        The result fails with `GrammarError` (wrong, too slow or fatal grammar), `InvalidRequest` (ids of the trigger)
        or `EngineDead` (closed meanwhile).

        Raises:
            EngineDead: the compiler is closed.
        """
        future: Future[CompiledGrammar] = Future()
        key = (self._digest, request.kind, request.text)
        with self._changed:
            if self._is_closed:
                raise EngineDead("the grammar compiler is closed")
            # A marker of text takes work to build, so that such a request goes to a thread even on a hit.
            native = None if isinstance(request.trigger, str) else self._cache.get(key)
            self._counts["hits"] += native is not None
        if native is not None:
            self._deliver(request, future, native)
            return future
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(key)
                self._queue.append(job)
            job.waiting.append((request, future))
            self._changed.notify()
        return future

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the model."""
        return self._vocabulary

    @property
    def stats(self) -> CompilerStats:
        """A snapshot of the counts."""
        with self._changed:
            return CompilerStats(**self._counts, cached=len(self._cache), cached_bytes=self._cache.used)

    def close(self) -> None:
        """Stop the workers; futures that are not done fail with `EngineDead`. May be called twice."""
        with self._changed:
            self._is_closed = True
            waiting = [future for job in self._jobs.values() for _, future in job.waiting]
            self._queue.clear()
            self._changed.notify_all()
        for future in waiting:
            _fail(future, EngineDead("the grammar compiler was closed before this grammar was compiled"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> GrammarCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        worker = self._make_worker(self._vocabulary)
        try:
            while (job := self._next()) is not None:
                self._finish(job, *self._work(worker, job))
        finally:
            worker.close()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            return None if self._is_closed else self._queue.popleft()

    def _work(self, worker: Worker, job: _Job) -> tuple[Any, Exception | None]:
        """The native grammar, from the cache or compiled, or why there is none."""
        if self._is_unwanted(job):
            return None, Cancelled()
        with self._changed:
            native = self._cache.get(job.key)
            self._counts["misses" if native is None else "hits"] += 1
        if native is not None:
            return native, None
        try:
            packed = worker.compile(job.key[1], job.key[2], self._timeout, lambda: self._is_unwanted(job))
            native = self._loaded_library().unpack(job.key[1], packed)
        except (DeepInferError, Cancelled) as error:
            return None, error
        except Exception as error:
            # Nothing that a grammar provokes may end this thread, or later requests would wait for ever.
            cause = GrammarError(f"structured_output.{job.key[1]}: {type(error).__name__}: {error}")
            cause.__cause__ = error
            return None, cause
        with self._changed:
            self._cache.put(job.key, native, native.memory_size_bytes)
        return native, None

    def _is_unwanted(self, job: _Job) -> bool:
        with self._changed:
            return self._is_closed or job.is_abandoned()

    def _finish(self, job: _Job, native: Any, error: Exception | None) -> None:
        with self._changed:
            if isinstance(error, Cancelled) and not self._is_closed and not job.is_abandoned():
                # somebody asked for the same grammar after the last one who waited for it had left
                self._queue.append(job)
                return
            del self._jobs[job.key]
            if isinstance(error, Cancelled):
                self._counts["cancelled"] += 1
            elif error is not None:
                self._counts["failures"] += 1
        for request, future in job.waiting:
            if error is not None:
                _fail(future, error)
            elif not future.cancelled():
                self._deliver(request, future, native)

    def _deliver(self, request: StructuredOutput, future: Future[CompiledGrammar], native: Any) -> None:
        library = self._loaded_library()

        def accepts_start(text: bytes) -> bool:
            if request.kind in JSON_KINDS and has_control(text):
                return False
            return bool(library.matcher(native, self._vocabulary.eos_token_ids).accept_string(text))

        try:
            trigger = build_trigger(request, self._vocabulary, accepts_start)
            grammar = CompiledGrammar(
                request.kind, self._vocabulary, self._tokens_of(request.kind), library, native, trigger
            )
        except Exception as error:
            _fail(future, error)
            return
        _resolve(future, grammar)

    def _tokens_of(self, kind: GrammarKind) -> tuple[bytes, ...]:
        """Made once for the kinds that share it."""
        is_json = kind in JSON_KINDS
        if is_json not in self._tokens:
            self._tokens[is_json] = grammar_tokens(self._vocabulary, kind)
        return self._tokens[is_json]

    def _loaded_library(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None:
                self._library = GrammarLibrary(self._vocabulary)
            return self._library


class _Cache:
    """Native grammars by key, least recently used first out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self.used = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, native: Any, size: int) -> None:
        if size > self._limit or key in self._entries:
            return
        while self.used + size > self._limit:
            self.used -= self._entries.popitem(last=False)[1][1]
        self._entries[key] = (native, size)
        self.used += size


def _resolve(future: Future[CompiledGrammar], grammar: CompiledGrammar) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled, or failed by close(), in this very moment
        future.set_result(grammar)


def _fail(future: Future[CompiledGrammar], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)

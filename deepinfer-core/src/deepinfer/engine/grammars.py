"""Grammars in the loop: compiling beside it, one matcher a request, masks that a running step waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import EngineDead, InvalidRequest
from deepinfer.grammar.compiler import CompiledGrammar, GrammarCompiler
from deepinfer.grammar.filler import MaskFiller, MaskReport, MaskRequest
from deepinfer.grammar.library import require_library
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.models.traits import ModelTraits
from deepinfer.sampling.structured import StructuredOutput

if TYPE_CHECKING:
    from deepinfer.settings import Settings

__all__ = ["CUT", "Grammars", "MaskGate", "Masks", "check_grammars"]

CUT = -2
Masks = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Mask rows int32 [M, ceil(V / 32)], and the mask row of each sampled row [R]: -1 for none, `CUT` for a row that is
not accepted because its draft may not come there or is not known."""


class MaskGate:
    """Where a launched step waits, between its forward pass and sampling, for the masks of its rows.

    What a sequence may say next depends on the token of the step before, which the host reads while this step's forward
    pass runs. Somebody must open or cancel every gate, or the step never ends.
    """

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._masks: Masks | None = None
        self._is_cancelled = False

    @property
    def is_open(self) -> bool:
        """Whether nobody waits any more."""
        return self._is_open.is_set()

    def open(self, masks: Masks | None) -> None:
        """Let the step go on; see `take`."""
        self._masks = masks
        self._is_open.set()

    def cancel(self) -> None:
        """Let the step fail."""
        self._is_cancelled = not self.is_open
        self._is_open.set()

    def take(self) -> Masks | None:
        """Wait for the masks; None: no row of this step is masked.

        Raises:
            EngineDead: the gate was cancelled.
        """
        self._is_open.wait()
        if self._is_cancelled:
            raise EngineDead("the engine was closed while a step waited for its grammar masks")
        return self._masks


def check_grammars(path: Path | None) -> None:
    """Verify that structured outputs can be served for the model in a directory (None: it has none).

    Raises:
        CapabilityError: the grammar library is not installed; says how to install it.
        InvalidRequest: the model has no tokenizer.
    """
    require_library()
    if path is None or not (path / "tokenizer.json").is_file():
        raise InvalidRequest(
            "needs the model's tokenizer.json, which this model does not have", field="structured_output"
        )


class Grammars:
    """The grammar service of one engine; costs nothing before the first request that needs it.

    Args:
        path: directory of the checkpoint, whose tokenizer.json says what each id spells; None: there is none.
        traits: of the model.
        settings: time and memory limits.
        rows: that can be sampled at once.
    """

    def __init__(self, path: Path | None, traits: ModelTraits, settings: Settings, *, rows: int) -> None:
        self._path = None if path is None else path / "tokenizer.json"
        self._traits, self._settings, self._rows = traits, settings, rows
        self._compiler: GrammarCompiler | None = None
        self._starter: ThreadPoolExecutor | None = None
        self._filler: MaskFiller | None = None

    def check(self) -> None:
        """Verify that grammars can be served at all.

        Raises:
            CapabilityError: the grammar library is not installed; says how to install it.
            InvalidRequest: the model has no tokenizer.
        """
        check_grammars(None if self._path is None else self._path.parent)

    def submit(self, wanted: StructuredOutput) -> Future[CompiledGrammar]:
        """Start compiling, as `GrammarCompiler.submit`; the first call also starts the compiler, on another thread."""
        if self._compiler is not None:
            return self._compiler.submit(wanted)
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-grammar")
        future: Future[CompiledGrammar] = Future()
        self._starter.submit(self._submit_first, wanted, future)
        return future

    def _submit_first(self, wanted: StructuredOutput, future: Future[CompiledGrammar]) -> None:
        def hand_on(done: Future[CompiledGrammar]) -> None:
            with contextlib.suppress(InvalidStateError):  # cancelled
                error = done.exception()
                if error is None:
                    future.set_result(done.result())
                else:
                    future.set_exception(error)

        try:
            if self._compiler is None:
                self._compiler = self._start()
            inner = self._compiler.submit(wanted)
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
            return
        future.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        if not inner.cancelled():
            inner.add_done_callback(lambda done: None if done.cancelled() else hand_on(done))

    def _start(self) -> GrammarCompiler:
        assert self._path is not None
        traits, settings = self._traits, self._settings
        vocabulary = Vocabulary.from_file(self._path, traits.vocab_size, sorted(traits.eos_token_ids))
        return GrammarCompiler(
            vocabulary,
            grammar_timeout=settings.xgrammar_timeout,
            cache_bytes=settings.xgrammar_cache_limit_bytes,
        )

    def fill(self, requests: Sequence[MaskRequest]) -> tuple[NDArray[np.int32], MaskReport]:
        """Which token may come next in each sequence, and after each of its drafts.

        Args:
            requests: with rows from 0 on without a gap, at most as many as can be sampled at once; a matcher appears
                only once.

        Returns:
            Mask rows int32 [M, ceil(V / 32)], good until the next call, and what is to know of them.
        """
        if self._filler is None:
            assert self._compiler is not None
            vocabulary = self._compiler.vocabulary
            self._filler = MaskFiller(vocabulary, np.zeros((self._rows, vocabulary.words), np.int32))
        report = self._filler.fill(requests)
        return self._filler.mask[: sum(1 + len(request.drafts) for request in requests)], report

    def close(self) -> None:
        """End the worker processes; a second call does nothing."""
        if self._starter is not None:
            self._starter.shutdown(cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

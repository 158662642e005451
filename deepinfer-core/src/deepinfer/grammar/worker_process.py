"""A worker process seen from outside: start it, give it jobs, kill it when it hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from deepinfer.errors import EngineDead, GrammarError
from deepinfer.grammar.frames import Job, Reply, Setup, receive, send
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.sampling.structured import GrammarKind

__all__ = ["Cancelled", "WorkerProcess"]

POLL_S = 0.05
START_TIMEOUT_S = 120.0
WORKER = (sys.executable, "-P", "-m", "deepinfer.grammar.worker")


class Cancelled(Exception):
    """Nobody waits for this grammar any more."""


class WorkerProcess:
    """Compiles grammars in a process of its own, started at the first use and again after each time-out or crash.

    For one thread at a time.

    Args:
        vocabulary: of the model.
        memory_limit_bytes: by how much the process may grow while it compiles (where the system can limit it).
        command: program that speaks the worker's protocol; the file descriptor of its socket is appended.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, memory_limit_bytes: int = 4 << 30, command: Sequence[str] = WORKER
    ) -> None:
        self._setup = Setup(list(vocabulary.tokens), list(vocabulary.eos_token_ids), memory_limit_bytes)
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the object)

    def start(self, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            GrammarError: it did not come up.
            Cancelled: as asked.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()  # It ended while it had nothing to do: no fault of the next grammar.
        ours, theirs = socket.socketpair()
        # A worker finds the same packages as this process, wherever it has them from.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._log.seek(0)
            self._log.truncate()
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                env=environment,
            )  # fmt: skip
        self._channel = ours
        try:
            ours.settimeout(START_TIMEOUT_S)
            send(ours, self._setup)
            ours.settimeout(POLL_S)
            reply = receive(ours, Reply, _deadline(START_TIMEOUT_S, is_cancelled))
        except Cancelled:
            self._stop()
            raise
        except (EOFError, OSError) as error:
            raise GrammarError(f"the grammar compiler did not start: {self._stop(error)}") from error
        if reply.error is not None:
            self._stop()
            raise GrammarError(f"the grammar compiler did not start: {reply.error}")

    def compile(
        self, kind: GrammarKind, text: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> bytes:
        """Compile a grammar to packed bytes.

        Args:
            kind, text: as in `StructuredOutput`.
            timeout_s: seconds from now, the start of the process not counted.
            is_cancelled: asked now and then; True ends the work.

        Raises:
            GrammarError: the grammar is wrong, took too long, or killed the compiler.
            Cancelled: as asked.
        """
        self.start(is_cancelled)
        channel = self._channel
        if channel is None:
            raise EngineDead("the grammar compiler is closed")
        try:
            channel.settimeout(timeout_s)
            send(channel, Job(kind, text, timeout_s))
            channel.settimeout(POLL_S)
            reply = receive(channel, Reply, _deadline(timeout_s, is_cancelled))
        except Cancelled:
            self._stop()
            raise
        except TimeoutError as error:
            self._stop()
            message = f"structured_output.{kind}: not compiled within {timeout_s:g} s (grammar_timeout); simplify it"
            raise GrammarError(message) from error
        except (EOFError, OSError) as error:
            cause = self._stop(error)
            raise GrammarError(f"structured_output.{kind}: this grammar crashed its compiler ({cause})") from error
        if reply.error is not None or reply.grammar is None:
            raise GrammarError(reply.error or f"structured_output.{kind}: the compiler gave no answer")
        return reply.grammar

    def close(self) -> None:
        """End the process and drop its log."""
        self._stop()
        self._log.close()

    def _stop(self, error: Exception | None = None) -> str:
        """Kill the process; says how it ended if it was dead before."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return str(error)
        try:
            code = process.wait(1.0 if isinstance(error, EOFError) else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return str(error)
        return self._ending(code)

    def _ending(self, code: int) -> str:
        if code < 0:
            return signal.Signals(-code).name
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


def _deadline(seconds: float, is_cancelled: Callable[[], bool] | None) -> Callable[[], None]:
    """A check that raises once the time is over or the work is cancelled."""
    end = time.monotonic() + seconds

    def check() -> None:
        if is_cancelled is not None and is_cancelled():
            raise Cancelled
        if time.monotonic() >= end:
            raise TimeoutError

    return check

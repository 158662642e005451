"""The process of a loop seen from its front end: start it, speak with it, and say why it is gone."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from deepinfer.engine.generation import EngineStats
from deepinfer.engine.messages import CLOSED, EngineFacts, Listener, Order, as_dead
from deepinfer.engine.process.errors import unpack_error
from deepinfer.engine.process.frames import (
    PROTOCOL,
    Abort,
    Ask,
    Commands,
    Ended,
    Failed,
    FrameDecoder,
    Hello,
    LogEntry,
    News,
    OrderFrame,
    Progress,
    Ready,
    Setup,
    decode_news,
    encode,
    pack,
)
from deepinfer.engine.progress import StartProgress
from deepinfer.errors import CapabilityError, EngineDead, InvalidRequest
from deepinfer.observe.trace import StepTrace
from deepinfer.settings import Settings

__all__ = ["ProcessLoop"]

_logger = logging.getLogger("deepinfer.engine")

COMMAND = (sys.executable, "-P", "-m", "deepinfer.engine.process")
READ_BYTES = 1 << 20
END_SECONDS = 30.0
"""How long a process may take for its last step before it is killed."""


class ProcessLoop:
    """An engine in a process of its own; a `Loop`. Returns from construction when the model is loaded.

    Two threads serve the socket, so that neither a slow loop nor a slow consumer makes anybody wait: one sends what has
    been asked for since its last frame, one hands on what the loop says.

    Args:
        listener: hears of every step, on a thread of this object.
        model: as in `LLM`. settings: all of them. options: further arguments of `build_engine`, plain data.
        command: program that speaks the loop's protocol; the file descriptor of its socket and the id of this process
            are appended.

    Raises:
        DeepInferError: whatever ended the start, as if the model had been loaded here.
        EngineDead: the process died before it was ready.
        CapabilityError: this system cannot hand a socket to a process.
    """

    def __init__(
        self,
        listener: Listener,
        model: str | None,
        settings: Settings,
        options: dict[str, Any],
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.stats: Any = EngineStats()
        self._listener = listener
        self._owner = os.getpid()
        self._process, self._end = _launch(command)
        self.pid = self._process.pid
        self._decoder = FrameDecoder()
        self._bodies: list[bytes] = []
        level = logging.getLogger("deepinfer").getEffectiveLevel()
        try:
            self.facts = self._greet(Setup(model, settings.model_dump(mode="json"), options, level))
        except BaseException:
            self._kill()
            raise
        self._wake = threading.Condition()
        self._outbox: list[Any] = []
        self._closing = False
        self._dead: EngineDead | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, Future[str]] = {}
        self._trace: StepTrace | None = None
        self._threads = [
            threading.Thread(target=target, name=f"deepinfer-{name}", daemon=True)
            for name, target in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: Order) -> None:
        """Queue an order.

        Raises:
            InvalidRequest: a text in it is none.
        """
        try:
            self._post(OrderFrame.of(order))
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{error.object!r} holds a lone surrogate at position {error.start}, which no text has; remove it",
                field="request",
            ) from None

    def abort(self, number: int) -> None:
        """End what runs of an order."""
        self._post(Abort(number))

    def metrics_text(self) -> str:
        """Counters, gauges and histograms in the text format of Prometheus; waits for the step in flight.

        Raises:
            EngineDead: the process ended before it answered.
        """
        future: Future[str] = Future()
        number = next(self._numbers)
        with self._wake:
            if self._dead is not None:
                raise self._dead
            self._answers[number] = future
        self._post(Ask(number, "metrics"))
        return future.result()

    def trace(self) -> StepTrace:
        """A record of every step from now on; it grows as the loop reports."""
        trace = self._trace = StepTrace()
        self._post(Ask(next(self._numbers), "trace"))
        return trace

    def close(self) -> None:
        """End the process after its step in flight, or kill it if that takes too long."""
        if os.getpid() != self._owner:
            return  # A fork of the front end: the process is not its child.
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        _shut(self._end)
        self._wait(END_SECONDS)
        for thread in self._threads:
            if thread is not threading.current_thread():  # The collector may run on any thread.
                thread.join()
        self._end.close()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _greet(self, setup: Setup) -> EngineFacts:
        """Say what to run and wait until it runs."""
        hello = Hello(PROTOCOL, msgspec.Raw(msgspec.msgpack.encode(setup)))
        try:
            self._end.sendall(encode(hello))
            with StartProgress() as progress:
                while True:
                    message = decode_news(self._next_body())
                    if isinstance(message, Progress | Ready | Failed):
                        _replay(message.logs)
                    if isinstance(message, Progress):
                        progress.show(message.text)
                    elif isinstance(message, Ready):
                        return message.facts
                    elif isinstance(message, Failed):
                        raise unpack_error(message.error)
        except (EOFError, OSError):
            raise EngineDead(f"{self._ending()} before the model was ready; its own output says more") from None

    def _next_body(self) -> bytes:
        while not self._bodies:
            part = self._end.recv(READ_BYTES)
            if not part:
                raise EOFError("the process has hung up")
            self._bodies = self._decoder.feed(part)
        return self._bodies.pop(0)

    def _ending(self) -> str:
        """How the process ended; it has hung up."""
        code = self._wait(END_SECONDS)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the loop's process {self.pid} {how}"

    def _wait(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            _logger.warning("the loop's process %d did not end within %g s and is killed", self.pid, seconds)
            self._process.kill()
            return self._process.wait()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._end.close()

    # ---- the threads -------------------------------------------------------------------------------------------------

    def _post(self, item: OrderFrame | Abort | Ask) -> None:
        packed = pack(item)
        with self._wake:
            self._outbox.append(packed)
            self._wake.notify()

    def _send(self) -> None:
        while True:
            with self._wake:
                while not self._outbox and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                items, self._outbox = self._outbox, []
            try:
                self._end.sendall(encode(Commands(items)))
            except OSError:
                return  # The process is gone; the other thread says why.

    def _receive(self) -> None:
        dead: EngineDead | None = None
        try:
            while dead is None:
                message = decode_news(self._next_body())
                if isinstance(message, News):
                    self._hear(message)
                elif isinstance(message, Ended):
                    _replay(message.logs)
                    dead = as_dead(unpack_error(message.error))
        except (EOFError, OSError):
            pass
        except Exception as error:
            _logger.exception("the loop's process is not understood and is killed")
            self._process.kill()
            dead = as_dead(error)
        if self._closing:
            dead = EngineDead(CLOSED)
        self._bury(dead or EngineDead(f"{self._ending()}; make a new AsyncLLM"))

    def _hear(self, news: News) -> None:
        _replay(news.logs)
        self.stats = news.stats or self.stats
        if self._trace is not None:
            self._trace.extend(news.spans, news.counters)
        for number, text in news.answers.items():
            self._answers.pop(number).set_result(text)
        self._listener.deliver(news.updates, news.refused)

    def _bury(self, dead: EngineDead) -> None:
        with self._wake:
            self._dead = dead
            self._closing = True
            self._wake.notify_all()
            answers, self._answers = self._answers, {}
        for future in answers.values():
            future.set_exception(dead)
        self._listener.end(dead)


def _launch(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    if os.name != "posix":
        raise CapabilityError("a loop in a process of its own needs a POSIX system; give in_process=True")
    ours, theirs = socket.socketpair()
    # The process finds the same packages as this one, wherever it has them from.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        arguments = [*command, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    return process, ours


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The process was gone already.


def _replay(logs: Sequence[LogEntry]) -> None:
    """Log here what was logged there."""
    for entry in logs:
        logging.getLogger(entry.logger).log(entry.level, "%s", entry.message)

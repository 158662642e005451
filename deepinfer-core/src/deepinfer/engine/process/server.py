"""The process of a loop: starts an engine, turns it, and speaks with its front end between steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from deepinfer.engine.local import LocalEngine
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.messages import Update
from deepinfer.engine.metrics import metrics_text
from deepinfer.engine.process.channel import Channel
from deepinfer.engine.process.errors import pack_error
from deepinfer.engine.process.frames import (
    PROTOCOL,
    Abort,
    Ask,
    Commands,
    Ended,
    Failed,
    Hello,
    LogEntry,
    News,
    OrderFrame,
    Progress,
    Ready,
    Setup,
    decode_command,
)
from deepinfer.errors import DeepInferError, EngineDead
from deepinfer.observe.trace import StepTrace

__all__ = ["LogCollector", "LoopServer", "serve", "start_engine", "watch_parent"]

FAREWELL_SECONDS = 5.0
PARENT_POLL_SECONDS = 1.0
MAX_LOGS = 1000


class LogCollector(logging.Handler):
    """Keeps the records of this process for its front end, whose handlers write them; the oldest go first."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: deque[LogEntry] = deque(maxlen=MAX_LOGS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, its traceback included."""
        self._entries.append(LogEntry(record.name, record.levelno, self.format(record)))

    def take(self) -> list[LogEntry]:
        """The records since the last call."""
        return [self._entries.popleft() for _ in range(len(self._entries))]


class LoopServer:
    """An engine loop between two ends of a channel.

    What the front end has not read yet is merged: at most one update waits for each completion, so a front end that
    stands still costs the memory of its requests' outputs and no time.

    Args:
        channel: to the front end. engine: owned from now on. logs: of this process.
    """

    def __init__(self, channel: Channel, engine: LocalEngine, logs: LogCollector) -> None:
        self._channel, self._logs = channel, logs
        self._core = engine.core
        self._loop = EngineLoop(engine.core, engine.codec)
        self._waiting: dict[tuple[int, int], Update] = {}
        self._refused: dict[int, DeepInferError] = {}
        self._answers: dict[int, str] = {}
        self._has_news = False
        self._trace = StepTrace()
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Serve until the front end hangs up, a signal comes or the engine fails; the exit code of the process."""
        signal.signal(signal.SIGTERM, self._on_signal)
        error: BaseException = EngineDead("the front end has hung up")
        code = 0
        try:
            while True:
                self.turn()
        except (EOFError, OSError):
            if self._signal is not None:
                code = 128 + self._signal
                error = EngineDead(f"the loop's process was told to end by {self._signal.name}; make a new AsyncLLM")
        except Exception as failure:
            code, error = 1, failure
        self._channel.close(Ended(pack_error(error), self._logs.take()), FAREWELL_SECONDS)
        self._core.close()
        return code

    def turn(self) -> None:
        """Take what the front end wants, run a step, and say what is new.

        Raises:
            EOFError, OSError: the front end is gone.
            EngineDead: the engine failed.
        """
        for body in self._channel.receive(wait=not self._loop.has_work):
            commands = decode_command(body)
            if isinstance(commands, Commands):
                for item in commands.items:
                    self._obey(item)
        if self._loop.has_work:
            self._note(self._loop.step())
            self._has_news = True
        if self._has_news and self._channel.is_clear:
            self._tell()

    def _obey(self, item: OrderFrame | Abort | Ask) -> None:
        self._has_news = True
        if isinstance(item, OrderFrame):
            error = self._loop.add(item.order())
            if error is not None:
                self._refused[item.number] = error
        elif isinstance(item, Abort):
            self._note(self._loop.abort(item.number))
        elif item.what == "trace":
            self._core.recorder.trace = self._trace
        else:
            self._answers[item.number] = metrics_text({"0": self._core})

    def _note(self, updates: list[Update]) -> None:
        for update in updates:
            waiting = self._waiting.setdefault((update.number, update.index), update)
            if waiting is not update:
                waiting.absorb(update)

    def _tell(self) -> None:
        spans, counters = self._trace.take()
        news = News(
            list(self._waiting.values()),
            self._refused,
            self._core.stats,
            self._answers,
            spans,
            counters,
            self._logs.take(),
        )
        self._waiting, self._refused, self._answers, self._has_news = {}, {}, {}, False
        self._channel.send(news)

    def _on_signal(self, number: int, frame: Any) -> None:
        # The step in flight ends as usual; then the loop finds that nobody speaks to it any more.
        self._signal = signal.Signals(number)
        self._channel.hang_up()


def start_engine(channel: Channel, setup: Setup) -> LocalEngine:
    """Load a model and build its engine, reporting progress; errors as those of `LLM`."""
    from deepinfer.engine.loader import load_model
    from deepinfer.settings import Settings

    settings = Settings(**setup.settings)
    channel.send(Progress(f"loading {setup.model or settings.hf_model_dir or 'the released model'}"))
    loaded = load_model(setup.model, settings)
    channel.send(Progress(f"read {loaded.model.load_stats}; allocating caches"))
    return LocalEngine.build(loaded, settings, **setup.options)


def serve(channel: Channel, start: Callable[[Channel, Setup], LocalEngine]) -> int:
    """Greet the front end, start what it asks for and serve it; the exit code of the process.

    Args:
        channel: to the front end.
        start: makes the engine of a `Setup`.
    """
    logs = LogCollector()
    logger = logging.getLogger("deepinfer")
    logger.addHandler(logs)
    logger.propagate = False
    try:
        setup = _greet(channel)
        logger.setLevel(setup.log_level)
        engine = start(channel, setup)
        channel.send(Ready(engine.facts, logs.take()))
    except EOFError:
        return 0
    except Exception as error:
        channel.close(Failed(pack_error(error), logs.take()), FAREWELL_SECONDS)
        return 1
    return LoopServer(channel, engine, logs).run()


def _greet(channel: Channel) -> Setup:
    """Wait for the first frame.

    Raises:
        EngineDead: another version speaks.
    """
    bodies: list[bytes] = []
    while not bodies:
        bodies = channel.receive(wait=True)
    hello = decode_command(bodies[0])
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
        spoken = hello.protocol if isinstance(hello, Hello) else type(hello).__name__
        raise EngineDead(
            f"the front end speaks {spoken!r} and the loop's process {PROTOCOL!r}: two versions of DeepInfer are on "
            "the path; reinstall it"
        )
    return msgspec.msgpack.decode(hello.setup, type=Setup)


def watch_parent(parent: int) -> None:
    """End this process as soon as its parent has died, whatever it is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="deepinfer-parent", daemon=True).start()

"""A step loop on a thread of its own, in the process of its front end."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Any

from deepinfer.engine.core import EngineCore
from deepinfer.engine.local import LocalEngine
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.messages import CLOSED, Listener, Order, as_dead
from deepinfer.engine.metrics import metrics_text
from deepinfer.errors import DeepInferError, EngineDead
from deepinfer.observe.trace import StepTrace

__all__ = ["ThreadLoop"]

_logger = logging.getLogger("deepinfer.engine")


class ThreadLoop:
    """Turns an engine until it is closed; a `Loop`.

    Args:
        engine: owned from now on.
        listener: hears of every step, on the loop's thread.
    """

    def __init__(self, engine: LocalEngine, listener: Listener) -> None:
        self.facts = engine.facts
        self.core = engine.core
        self.pid = os.getpid()
        self.stats: Any = engine.core.stats
        self._loop = EngineLoop(engine.core, engine.codec)
        self._listener = listener
        self._inbox: deque[Order | int] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="deepinfer-loop", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Queue an order."""
        self._post(order)

    def abort(self, number: int) -> None:
        """End what runs of an order."""
        self._post(number)

    def metrics_text(self) -> str:
        """Counters, gauges and histograms in the text format of Prometheus."""
        return metrics_text({"0": self._alive()})

    def trace(self) -> StepTrace:
        """A record of every step from now on."""
        trace = self._alive().recorder.trace = StepTrace()
        return trace

    def close(self) -> None:
        """End the thread and free the caches; waits for the step in flight."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():  # The collector may run on any thread.
            self._thread.join()

    def _alive(self) -> EngineCore:
        core: EngineCore | None = self.__dict__.get("core")
        if core is None:
            raise EngineDead(CLOSED)
        return core

    def _post(self, command: Order | int) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # ---- the loop's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        dead = EngineDead(CLOSED)
        try:
            while self._serve():
                pass
            self._loop.abort_all()
        except Exception as error:
            _logger.error("the engine stopped", exc_info=error)
            dead = as_dead(error)
        self._listener.end(dead)
        self.core.close()
        del self.core, self._loop  # With them go the caches and the weights.

    def _serve(self) -> bool:
        """Take what consumers asked for and run one step; False when the engine is to end."""
        with self._wake:
            while not self._inbox and not self._closing and not self._loop.has_work:
                self._wake.wait()
            if self._closing:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        updates, refused = [], {}
        for command in commands:
            if isinstance(command, Order):
                error: DeepInferError | None = self._loop.add(command)
                if error is not None:
                    refused[command.number] = error
            else:
                updates += self._loop.abort(command)
        if self._loop.has_work:
            updates += self._loop.step()
        if updates or refused:
            self._listener.deliver(updates, refused)
        return True

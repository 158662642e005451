"""Progress of long work, on a terminal only: the requests of a call, an engine that starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from deepinfer.engine.generation import Generation

__all__ = ["GenerationProgress", "StartProgress"]

_logger = logging.getLogger("deepinfer.engine")

REFRESH_SECONDS = 0.1


class GenerationProgress:
    """Requests done and tokens per second.

    Args:
        total: requests of the call.
        enabled: False shows nothing; so does an output that is no terminal.
    """

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._tokens = 0
        self._done = 0
        self._shown = 0.0
        if enabled and total:
            self._bar = _make_bar()
        if self._bar is not None:
            self._task = self._bar.add_task("generating", total=total, speed="")

    def __enter__(self) -> GenerationProgress:
        self._start = time.perf_counter()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    def update(self, changed: Iterable[Generation]) -> None:
        """Count the generations that grew or ended in a step."""
        if self._bar is None:
            return
        for generation in changed:
            self._tokens += generation.error is None
            self._done += generation.finish_reason is not None
        if time.perf_counter() - self._shown >= REFRESH_SECONDS:
            self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        speed = f"{self._tokens / max(self._shown - self._start, 1e-9):,.1f} tokens/s"
        self._bar.update(self._task, completed=self._done, speed=speed)


class StartProgress:
    """What an engine that starts elsewhere is doing: on a terminal while it lasts, and in the log."""

    def __init__(self) -> None:
        self._status: Any = None

    def show(self, text: str) -> None:
        """Say what is done now."""
        _logger.info("%s", text)
        if self._status is None:
            from rich.console import Console

            console = Console(stderr=True)
            if not console.is_terminal:
                return
            self._status = console.status(text)
            self._status.start()
        self._status.update(text)

    def __enter__(self) -> StartProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[speed]}"), console=console)

"""Native handles that belong to one process: built on first use, built again after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerProcess", "quiet_parallelism"]

T = TypeVar("T")
_VARIABLE = "TOKENIZERS_PARALLELISM"
_guarded = False


def quiet_parallelism() -> None:
    """Keep the tokenizers' thread pool from hanging a forked child.

    The pool's threads do not survive a fork: a child that encodes would wait for them for ever. So the pool is off
    unless the user turned it on, and in a forked child it is off in any case. Call before the first encode.
    """
    global _guarded
    os.environ.setdefault(_VARIABLE, "false")
    if not _guarded:
        _guarded = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_off)


def _off() -> None:
    os.environ[_VARIABLE] = "false"


class PerProcess(Generic[T]):
    """A value that each process builds for itself (native handles can be neither pickled nor trusted after a fork)."""

    def __init__(self, build: Callable[[], T]) -> None:
        self._build = build
        self._made: tuple[int, T] | None = None
        self._lock = (os.getpid(), threading.Lock())

    def get(self) -> T:
        """The value of this process, built now if this process has none yet."""
        pid = os.getpid()
        made = self._made
        if made is not None and made[0] == pid:
            return made[1]
        if self._lock[0] != pid:  # the parent may have held it at the fork
            self._lock = (pid, threading.Lock())
        with self._lock[1]:
            made = self._made
            if made is None or made[0] != pid:
                quiet_parallelism()
                made = (pid, self._build())
                self._made = made
        return made[1]

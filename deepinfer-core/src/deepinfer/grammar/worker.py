"""The process that compiles grammars: a hostile grammar may hang or kill it, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from deepinfer.errors import DeepInferError, GrammarError
from deepinfer.grammar.frames import Job, Reply, Setup, receive, send
from deepinfer.grammar.library import GrammarLibrary, clean_message
from deepinfer.grammar.vocabulary import Vocabulary

__all__ = ["main", "serve", "time_limit"]

WARNING = "Warning: "


def serve(channel: socket.socket) -> None:
    """Answer jobs on the channel until the other side closes it."""
    setup = receive(channel, Setup)
    try:
        library = GrammarLibrary(Vocabulary(tuple(setup.tokens), tuple(setup.eos_token_ids)))
    except DeepInferError as error:
        send(channel, Reply(error=str(error)))
        return
    _limit_memory(setup.memory_limit_bytes)
    send(channel, Reply())
    while True:
        try:
            job = receive(channel, Job)
        except EOFError:
            return
        with time_limit(job.timeout_s):
            reply = _answer(library, job)
        send(channel, reply)


def _answer(library: GrammarLibrary, job: Job) -> Reply:
    try:
        with _standard_error() as written:
            packed = library.pack(library.compile(job.kind, job.text))
            written.seek(0)
            warnings = written.read().decode(errors="replace")
    except GrammarError as error:
        return Reply(error=str(error))
    except MemoryError:
        return Reply(error=f"structured_output.{job.kind}: the compiled grammar does not fit into memory; simplify it")
    if WARNING in warnings:
        # The library warns where it drops a part of the grammar; the text would then not be what was asked for.
        dropped = clean_message(warnings[warnings.index(WARNING) + len(WARNING) :].splitlines()[0])
        return Reply(error=f"structured_output.{job.kind}: {dropped}")
    return Reply(grammar=packed)


@contextlib.contextmanager
def _standard_error() -> Iterator[BinaryIO]:
    """Collect what native code writes to file descriptor 2."""
    with tempfile.TemporaryFile() as written:
        saved = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let the system end this process if it works much longer: its parent, which watches the clock too, has died."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # A worker may idle as long as it likes.


def _limit_memory(more: int) -> None:
    """Let the address space grow by this many bytes at most, where the system says how large it is now."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):
        return
    hard: Any = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    """Serve on the socket whose file descriptor is the first argument."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel)


if __name__ == "__main__":
    main()

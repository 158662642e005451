"""`python -m deepinfer.engine.process FD PARENT`: serve the front end at the other end of socket FD."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence

from deepinfer.engine.local import LocalEngine
from deepinfer.engine.process.channel import Channel
from deepinfer.engine.process.frames import Setup
from deepinfer.engine.process.server import serve, start_engine, watch_parent

__all__ = ["main"]


def main(arguments: Sequence[str], start: Callable[[Channel, Setup], LocalEngine] = start_engine) -> int:
    """Serve until the front end or this process is to end; the exit code.

    Args:
        arguments: file descriptor of the socket, process id of the front end.
        start: makes the engine.
    """
    # The front end decides what Ctrl-C means; a terminal sends it to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent(int(arguments[1]))
    return serve(Channel(socket.socket(fileno=int(arguments[0]))), start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

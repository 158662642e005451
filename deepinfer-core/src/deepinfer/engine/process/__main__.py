"""`python -m deepinfer.engine.process FD PARENT`: serve the front end at the other end of socket FD."""

from __future__ import annotations

import signal
import socket
import sys

from deepinfer.engine.process.channel import Channel
from deepinfer.engine.process.server import serve, watch_parent

if __name__ == "__main__":
    # The front end decides what Ctrl-C means; a terminal sends it to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent(int(sys.argv[2]))
    sys.exit(serve(Channel(socket.socket(fileno=int(sys.argv[1])))))

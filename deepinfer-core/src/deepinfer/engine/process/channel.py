"""The loop's end of its socket: reads and writes between steps and never makes the loop wait for the other side."""

from __future__ import annotations

import contextlib
import selectors
import socket

import msgspec

from deepinfer.engine.process.frames import FrameDecoder, encode

__all__ = ["Channel"]

READ_BYTES = 1 << 20


class Channel:
    """Frames over a stream socket, for one thread.

    Args:
        end: one end of a socket pair; owned from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder = FrameDecoder()
        self._unsent = memoryview(b"")
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)

    @property
    def is_clear(self) -> bool:
        """Whether everything was sent."""
        return not self._unsent

    def send(self, message: msgspec.Struct) -> None:
        """Send a message as far as the socket takes it; `receive` sends the rest.

        Whoever wants to bound memory sends only while the channel is clear.

        Raises:
            OSError: the other side is gone.
        """
        self._unsent = memoryview(b"".join((self._unsent, encode(message))))
        self._flush()

    def receive(self, *, wait: bool) -> list[bytes]:
        """Bodies of the frames that have come; with `wait` blocks until something could be read or sent.

        Raises:
            EOFError: the other side has hung up.
            OSError: the other side is gone.
        """
        self._selector.modify(self._end, selectors.EVENT_READ | (0 if self.is_clear else selectors.EVENT_WRITE))
        events = next((events for _, events in self._selector.select(None if wait else 0)), 0)
        if events & selectors.EVENT_WRITE:
            self._flush()
        return self._read() if events & selectors.EVENT_READ else []

    def hang_up(self) -> None:
        """Let `receive` raise `EOFError` from now on; may be called by a signal handler."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)

    def close(self, farewell: msgspec.Struct, timeout: float) -> None:
        """Send a last message if the other side reads it within `timeout` seconds, and close the socket."""
        with contextlib.suppress(OSError), self._end:
            self._end.settimeout(timeout)
            self._end.sendall(self._unsent)
            self._end.sendall(encode(farewell))
        self._selector.close()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]

    def _read(self) -> list[bytes]:
        bodies: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while part := self._end.recv(READ_BYTES):
                bodies += self._decoder.feed(part)
            raise EOFError("the front end has hung up")
        return bodies

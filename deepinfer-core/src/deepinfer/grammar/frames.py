"""Messages between a grammar compiler and its worker process: length-prefixed MessagePack over a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from deepinfer.sampling.structured import GrammarKind

__all__ = ["Job", "Reply", "Setup", "receive", "send"]

_LENGTH_BYTES = 8

Message = TypeVar("Message", bound=msgspec.Struct)


class Setup(msgspec.Struct):
    """First message: the vocabulary, and by how many bytes the worker may grow."""

    tokens: list[bytes]
    eos_token_ids: list[int]
    memory_limit_bytes: int


class Job(msgspec.Struct):
    """One grammar to compile."""

    kind: GrammarKind
    text: str
    timeout_s: float


class Reply(msgspec.Struct):
    """Answer to a setup (both empty: ready) or to a job."""

    grammar: bytes | None = None
    error: str | None = None


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone, or did not read within the socket's time-out.
    """
    body = msgspec.msgpack.encode(message)
    channel.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def receive(channel: socket.socket, kind: type[Message], wait: Callable[[], None] | None = None) -> Message:
    """Receive one message.

    Args:
        channel: a stream socket.
        kind: type of the message.
        wait: called before each read; may raise to give up.

    Raises:
        EOFError: the other side closed the channel.
    """
    size = int.from_bytes(_read(channel, _LENGTH_BYTES, wait), "little")
    return msgspec.msgpack.decode(_read(channel, size, wait), type=kind)


def _read(channel: socket.socket, size: int, wait: Callable[[], None] | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if wait is not None:
            wait()
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:
            continue
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other side closed the channel")
        parts += part
    return bytes(parts)

"""The loop's side of the socket: a front end that stands still costs nobody anything."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer import SamplingParams
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.local import LocalEngine
from deepinfer.engine.messages import Order, Update
from deepinfer.engine.process.channel import Channel
from deepinfer.engine.process.frames import (
    Abort,
    Ask,
    Commands,
    FrameDecoder,
    News,
    OrderFrame,
    decode_news,
    encode,
)
from deepinfer.engine.process.server import LogCollector, LoopServer
from deepinfer.errors import CapacityError
from deepinfer.settings import Settings

LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=3)


@pytest.fixture
def front() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs)


@pytest.fixture
def server(fake_model: Any, front: tuple[socket.socket, Channel]) -> Iterator[LoopServer]:
    settings = Settings(max_num_seqs=3, max_num_batched_tokens=16, use_nextn_decode=0)
    engine = LocalEngine.build(LoadedModel(fake_model), settings, num_pages=40, poison_released=True)
    server = LoopServer(front[1], engine, LogCollector())
    yield server
    engine.core.close()


def order(number: int, prompt: list[int], params: SamplingParams = LONG, limit: int = 50) -> OrderFrame:
    return OrderFrame.of(Order(number, str(number), np.array(prompt, np.int64), params, 5, limit))


def drain(end: socket.socket, decoder: FrameDecoder) -> list[bytes]:
    bodies: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while part := end.recv(1 << 16):
            bodies += decoder.feed(part)
    return bodies


def read(end: socket.socket, server: LoopServer, until: int) -> dict[int, Update]:
    """Read news, letting the server send what it holds, until so many requests have ended."""
    end.setblocking(False)
    decoder, found = FrameDecoder(), dict[int, Update]()
    while sum(item.finish_reason is not None for item in found.values()) < until:
        for news in map(decode_news, drain(end, decoder)):
            assert isinstance(news, News)
            for update in news.updates:
                seen = found.setdefault(update.number, update)
                if seen is not update:
                    seen.absorb(update)
        if server._loop.has_work or not server._channel.is_clear:
            server.turn()  # Does not wait: there is room again.
    return found


def test_a_front_end_that_stands_still(
    server: LoopServer, front: tuple[socket.socket, Channel], naive_model: Any
) -> None:
    end, channel = front
    channel._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    prompts = {number: [7 + number % 20, 8 + number % 5] for number in range(8)}
    end.sendall(encode(Commands([order(number, prompt) for number, prompt in prompts.items()])))
    while server._loop.has_work or not server._core.stats.steps:
        server.turn()
    assert not channel.is_clear, "the socket should be full, or this test shows nothing"
    # One unsent frame, and at most one update for each request whatever was said since.
    assert len(server._waiting) <= len(prompts)
    found = read(end, server, len(prompts))
    for number, prompt in prompts.items():
        assert found[number].token_ids == naive_model(prompt, LONG, 50, 5)[0]
        assert len(found[number].logprobs or ()) == 50
        assert found[number].metrics.num_generated_tokens == 50


def test_refusals_aborts_and_questions_are_answered(server: LoopServer, front: tuple[socket.socket, Channel]) -> None:
    end, _ = front
    wanted = [order(1, [7] * 8), order(2, [8] * 60, limit=200), Ask(0, "metrics"), Ask(1, "trace"), Abort(1), Abort(9)]
    end.sendall(encode(Commands(wanted)))
    server.turn()
    (body,) = FrameDecoder().feed(end.recv(1 << 16))
    news = decode_news(body)
    assert isinstance(news, News)
    assert [(update.number, update.finish_reason) for update in news.updates] == [(1, "abort")]
    assert list(news.refused) == [2]
    assert isinstance(news.refused[2], CapacityError | ValueError)
    assert "deepinfer_requests_total" in news.answers[0]
    assert news.stats is not None
    assert news.stats.finished == {"abort": 1}

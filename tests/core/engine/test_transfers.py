"""Copies between host and device: in the order of the steps, from memory that stays until the device is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.cpu.runtime import CpuRuntime
from deepinfer.engine.transfers import Transfers


class LateRuntime(CpuRuntime):
    """A device that does nothing before somebody waits: copies run at the first event that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], Any]] = []
        self.done: set[int] = set()
        self.blocks: list[Tensor] = []

    def alloc_pinned(self, nbytes: int) -> Tensor:
        self.blocks.append(super().alloc_pinned(nbytes))
        return self.blocks[-1]

    def copy_async(self, target: Tensor, source: Tensor, stream: Any = None) -> None:
        self.queue.append(lambda: target.copy_(source))

    def event(self, stream: Any = None) -> Any:
        return len(self.queue)

    def is_done(self, event: Any) -> bool:
        return event in self.done

    def wait(self, event: Any, stream: Any = None, *, host: bool = False) -> None:
        for action in self.queue[:event]:
            action()
        self.done.add(event)


def late() -> tuple[Transfers, LateRuntime]:
    runtime = LateRuntime()
    transfers = Transfers(torch.device("cpu"), runtime)
    transfers._runtime = runtime  # As on a device that is not the host.
    return transfers, runtime


def test_on_the_host_nothing_is_copied() -> None:
    transfers = Transfers(torch.device("cpu"), CpuRuntime())
    values = np.arange(4)
    sent = transfers.send(values)
    values[0] = 9
    assert sent.tolist() == [9, 1, 2, 3]
    assert transfers.fetch(sent).data_ptr() == sent.data_ptr()
    transfers.mark()()


def test_shapes_and_dtypes_survive_both_ways() -> None:
    transfers, _ = late()
    for values in (np.arange(6).reshape(2, 3), np.zeros((0, 5), np.float32), np.array([True, False]), np.int32([[7]])):
        sent = transfers.send(values)
        transfers.mark()()
        back = transfers.fetch(sent)
        transfers.mark()()
        assert back.numpy().dtype == values.dtype
        assert np.array_equal(back.numpy(), values)


def test_an_array_may_change_once_it_was_sent_and_marks_wait_for_their_own_step() -> None:
    transfers, runtime = late()
    values = np.arange(3)
    first = transfers.send(values)
    arrived = transfers.mark()
    values[:] = 7
    second = transfers.send(values)
    transfers.mark()
    arrived()
    assert first.tolist() == [0, 1, 2]
    assert len(runtime.done) == 1, "the later step was not waited for"
    assert second.shape == (3,)


def test_memory_is_kept_until_its_step_is_done() -> None:
    transfers, _ = late()
    marks = []
    for number in range(3):
        transfers.send(np.full(4, number))
        marks.append(transfers.mark())
    assert [len(held) for _, held in transfers._in_use] == [1, 1, 1]
    marks[1]()
    transfers.mark()
    assert next(event for event, _ in transfers._in_use) == 1, "the first step was not reported done yet"
    marks[0]()
    transfers.mark()
    assert next(event for event, _ in transfers._in_use) == 3

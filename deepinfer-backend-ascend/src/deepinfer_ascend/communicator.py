"""Collectives over HCCL; the host waits for other ranks over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

from deepinfer.api.backend import Communicator
from deepinfer.api.errors import CapabilityError

__all__ = ["GROUP_BACKEND", "HcclCommunicator"]

GROUP_BACKEND = "cpu:gloo,npu:hccl"
"""Backend of the `torch.distributed` group that the communicator needs."""


class HcclCommunicator(Communicator):
    """A group of ranks over HCCL, or a group of one when no group is given.

    Sums have no fixed order: HCCL chooses its algorithm by size and topology, and no page says that its
    deterministic mode exists on the 950. Methods that only move bytes move them as uint8.
    """

    fixed_order = frozenset({"all_gather", "all_to_all_v", "broadcast", "send_recv", "barrier"})

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks in an order that HCCL chooses."""
        _outside_capture()
        if self.size == 1:
            return
        buffer = tensor.contiguous()
        dist.all_reduce(buffer, group=self._group)
        _give_back(tensor, buffer)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Rank r's tensor becomes output[r]."""
        _outside_capture()
        if self.size == 1:
            output[0].copy_(tensor)
            return
        buffer = output.contiguous()
        dist.all_gather_into_tensor(_bytes(buffer), _bytes(tensor.contiguous()), group=self._group)
        _give_back(output, buffer)

    def all_to_all_v(
        self, output: torch.Tensor, tensor: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> None:
        """Exchange rows; counts may differ from rank to rank and may be zero."""
        _outside_capture()
        for name, rows, counts in (("output", output, output_rows), ("input", tensor, input_rows)):
            if len(counts) != self.size or sum(counts) != rows.shape[0]:
                raise ValueError(f"{name}: {list(counts)} do not cut {rows.shape[0]} rows for {self.size} ranks")
        if self.size == 1:
            output.copy_(tensor)
            return
        buffer = output.contiguous()
        dist.all_to_all_single(
            _row_bytes(buffer), _row_bytes(tensor.contiguous()), list(output_rows), list(input_rows), group=self._group
        )
        _give_back(output, buffer)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy rank `source`'s tensor to every rank."""
        _outside_capture()
        if self.size == 1:
            return
        buffer = tensor.contiguous()
        dist.broadcast(_bytes(buffer), self._global(source), group=self._group)
        _give_back(tensor, buffer)

    def send_recv(
        self, send: torch.Tensor | None, target: int | None, receive: torch.Tensor | None, source: int | None
    ) -> None:
        """Both halves as one batch, so that two ranks that exchange do not wait for each other."""
        _outside_capture()
        operations = []
        if send is not None and target is not None:
            peer = self._global(target)
            operations.append(dist.P2POp(dist.isend, _bytes(send.contiguous()), peer, self._group))
        buffer = receive.contiguous() if receive is not None and source is not None else None
        if buffer is not None and source is not None:
            operations.append(dist.P2POp(dist.irecv, _bytes(buffer), self._global(source), self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if receive is not None and buffer is not None:
            _give_back(receive, buffer)

    def barrier(self) -> None:
        """Wait on the host, over gloo: a barrier of HCCL would only order the device's streams."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def _outside_capture() -> None:
    if torch_npu.npu.is_current_stream_capturing():
        raise CapabilityError("collectives are not captured into graphs; end the graph before the exchange")


def _give_back(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a result from its contiguous buffer to where it belongs."""
    if buffer.data_ptr() != tensor.data_ptr():
        tensor.copy_(buffer)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8: every dtype then moves alike."""
    return tensor.view(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Rows [R, bytes] of a contiguous tensor."""
    rows = tensor.shape[0]
    width = tensor[0].numel() * tensor.element_size() if rows else 1
    return _bytes(tensor).view(rows, width) if rows else tensor.view(torch.uint8).reshape(0, width)

"""Collectives of the CPU backend over gloo; sums are folded in rank order, so their bits are always the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepinfer.api.backend import COLLECTIVES, Communicator

__all__ = ["GlooCommunicator"]


class GlooCommunicator(Communicator):
    """A gloo group, or a group of one when no group is given.

    Ranks are positions in the group, not global ranks.
    """

    fixed_order = frozenset(COLLECTIVES)

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Gather, then add in rank order: the same bits on every rank and in every run, unlike a ring."""
        if self.size == 1:
            return
        parts = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self.all_gather(parts, tensor)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Rank r's tensor becomes output[r]."""
        if self.size == 1:
            output[0].copy_(tensor)
            return
        dist.all_gather([_bytes(part) for part in output], _bytes(tensor.contiguous()), group=self._group)

    def all_to_all_v(
        self, output: torch.Tensor, tensor: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> None:
        """Exchange rows pairwise; a rank's rows for itself are copied."""
        for name, rows, counts in (("output", output, output_rows), ("input", tensor, input_rows)):
            if len(counts) != self.size or sum(counts) != rows.shape[0]:
                raise ValueError(f"{name}: {list(counts)} do not cut {rows.shape[0]} rows for {self.size} ranks")
        incoming, outgoing = output.split(list(output_rows)), tensor.split(list(input_rows))
        if incoming[self.rank].shape != outgoing[self.rank].shape:
            raise ValueError(f"rank {self.rank} sends itself {outgoing[self.rank].shape[0]} rows but expects others")
        incoming[self.rank].copy_(outgoing[self.rank])
        buffers = {peer: incoming[peer].contiguous() for peer in self._peers() if output_rows[peer]}
        sent = {peer: outgoing[peer].contiguous() for peer in self._peers() if input_rows[peer]}
        self._exchange(sent, buffers)
        for peer, buffer in buffers.items():
            incoming[peer].copy_(buffer)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy rank `source`'s tensor to every rank."""
        if self.size == 1:
            return
        buffer = tensor.contiguous()
        dist.broadcast(_bytes(buffer), self._global(source), group=self._group)
        tensor.copy_(buffer)

    def send_recv(
        self, send: torch.Tensor | None, target: int | None, receive: torch.Tensor | None, source: int | None
    ) -> None:
        """Post both halves, then wait for both."""
        sent = {target: send.contiguous()} if send is not None and target is not None else {}
        buffers = {source: receive.contiguous()} if receive is not None and source is not None else {}
        self._exchange(sent, buffers)
        for buffer in buffers.values():
            if receive is not None:
                receive.copy_(buffer)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self._group)

    def _exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Post all receives and sends, then wait for all."""
        works = [dist.irecv(_bytes(part), self._global(peer), group=self._group) for peer, part in received.items()]
        works += [dist.isend(_bytes(part), self._global(peer), group=self._group) for peer, part in sent.items()]
        for work in works:
            if work is not None:
                work.wait()

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8: gloo then moves every dtype alike."""
    return tensor.reshape(-1).view(torch.uint8)

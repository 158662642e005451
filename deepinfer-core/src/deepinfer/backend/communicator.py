"""Collectives between the ranks of one group, each saying whether its result depends on timing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

__all__ = ["COLLECTIVES", "Communicator"]

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all_v", "broadcast", "send_recv", "barrier")


class Communicator(ABC):
    """A group of ranks. Work is enqueued on the current stream; results are valid in stream order.

    Attributes:
        rank: own position in the group.
        size: number of ranks.
        fixed_order: names of the methods whose result bits are the same on every run, every rank and for every
            algorithm that the library may choose. Methods that only move bytes always belong to it.
    """

    rank: int
    size: int
    fixed_order: frozenset[str]

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor on every rank by the sum over ranks."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the tensors of all ranks, in rank order, into output [size, *tensor.shape]."""

    @abstractmethod
    def all_to_all_v(
        self, output: torch.Tensor, tensor: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> None:
        """Send `input_rows[r]` leading rows to rank r and receive `output_rows[r]` from it, both in rank order.

        Raises:
            ValueError: the counts do not add up to the first dimensions.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a tensor on every rank by that of rank `source`."""

    @abstractmethod
    def send_recv(
        self, send: torch.Tensor | None, target: int | None, receive: torch.Tensor | None, source: int | None
    ) -> None:
        """Send one tensor to a rank and receive one from a rank at the same time; either half may be None."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait on the host until every rank has come here."""

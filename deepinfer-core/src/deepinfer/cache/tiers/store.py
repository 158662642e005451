"""What a store of cache blocks must do; the interface that plugins implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

__all__ = ["BlockKey", "BlockKind", "KVStore"]

BlockKind = Literal["page", "snapshot"]


@dataclass(frozen=True)
class BlockKey:
    """Name of a block and of everything that its bytes depend on.

    Attributes:
        digest: key of the prefix up to the end of the page.
        kind: the page itself, or the state slot at its end.
        layout_id: byte layout of pages and slots.
        numerics_id: of the engine that computed it.
        nbytes: length of the block.
    """

    digest: bytes
    kind: BlockKind
    layout_id: str
    numerics_id: str
    nbytes: int


class KVStore(ABC):
    """Blocks outside the device. Worker threads call it, several at a time; it may be slow, never wrong.

    A store answers `get` only with the bytes that were `put` under exactly this key: anything torn, foreign or doubtful
    is a miss. An exception from any method switches the store off for its engine, which goes on without it.

    Attributes:
        name: for messages and metrics.
    """

    name: str

    @abstractmethod
    def put(self, key: BlockKey, data: bytes) -> bool:
        """Keep a block, evicting others where there is a bound; False if it was not kept."""

    @abstractmethod
    def get(self, key: BlockKey) -> bytes | None:
        """The block, or None for a miss."""

    @abstractmethod
    def contains(self, key: BlockKey) -> bool:
        """Whether `get` would probably find it; cheap, and may be wrong either way."""

    @abstractmethod
    def delete(self, key: BlockKey) -> None:
        """Forget a block; unknown ones are ignored."""

    def close(self) -> None:  # noqa: B027 - nothing to release by default
        """Release what the store holds; no other call follows."""

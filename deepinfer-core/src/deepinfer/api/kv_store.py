"""What a plugin implements to keep cache blocks outside the device."""

from __future__ import annotations

from deepinfer.cache.tiers.store import BlockKey, BlockKind, KVStore

__all__ = ["BlockKey", "BlockKind", "KVStore"]

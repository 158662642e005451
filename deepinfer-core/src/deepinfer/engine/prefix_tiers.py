"""Prefixes in lower tiers: what is published goes down, what a waiting request needs comes up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from deepinfer.cache.chain import CacheExport
from deepinfer.cache.reuse import PrefixCache
from deepinfer.cache.tiers.exchange import LoadJob, TierExchange
from deepinfer.cache.tiers.store import KVStore
from deepinfer.engine.block_copies import BlockCopies
from deepinfer.errors import ConfigError
from deepinfer.scheduler.request import Request

if TYPE_CHECKING:
    from deepinfer.settings import Settings

__all__ = ["MAX_LOADING", "PrefixTiers", "make_stores"]

_logger = logging.getLogger("deepinfer.cache")

MAX_LOADING = 16
"""Requests that may wait for the stores at the same time; the next ones run with what the device has."""
POLL_SECONDS = 0.001


class PrefixTiers:
    """Between the scheduler's prefix cache and the stores; called by the loop only.

    Args:
        prefix: of the device.
        exchange: the stores.
        copies: moves bytes in the order of the steps.
        run: hands a call to the executor, behind the steps submitted so far.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        exchange: TierExchange,
        copies: BlockCopies,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self.prefix = prefix
        self.exchange = exchange
        self._copies = copies
        self._run = run
        self._jobs: dict[Request, LoadJob] = {}
        prefix.exports = []

    def begin(self, request: Request) -> bool:
        """Look for more of a request's prefix than the device has; False if it need not wait."""
        if len(self._jobs) >= MAX_LOADING or not self.exchange.stores:
            return False
        keys = self.prefix.keys_of(request.prompt)
        present, resumable = self.prefix.resumable(keys)
        if resumable == len(keys):
            return False
        self._jobs[request] = self.exchange.load(keys, present, resumable)
        return True

    def cancel(self, request: Request) -> None:
        """Forget a request that has ended."""
        job = self._jobs.pop(request, None)
        if job is not None:
            job.future.cancel()

    def poll(self) -> list[Request]:
        """Requests that need not wait any longer; what was found for them is on its way to the device."""
        ready = [request for request, job in self._jobs.items() if job.is_over()]
        for request in ready:
            job = self._jobs.pop(request)
            self.exchange.stats.late += not job.future.done()
            self._adopt(job)
        return ready

    def wait(self) -> bool:
        """Sleep a moment when nothing else is to do but to wait for the stores; False if nobody waits for them."""
        if self._jobs and not any(job.is_over() for job in self._jobs.values()):
            time.sleep(POLL_SECONDS)
        return bool(self._jobs)

    def export(self) -> None:
        """Send what was published since the last call to the stores."""
        exports = self.prefix.exports
        if exports:
            self.prefix.exports = []
            self._run(partial(self._export, exports))

    def close(self) -> None:
        """Store what waits and end the threads; the executor must have ended before."""
        self._jobs.clear()
        self.exchange.close()

    def _export(self, exports: list[CacheExport]) -> None:
        try:
            for item in exports:
                if not self.exchange.has_room(item.kind):
                    continue  # Nothing is copied out for nothing.
                self.exchange.save(item.kind, item.key, self._copies.fetch(item.kind, item.index))
        except Exception:
            _logger.warning("%d blocks of the prefix cache were not stored", len(exports), exc_info=True)

    def _adopt(self, job: LoadJob) -> None:
        chain = job.result()
        if chain is None:
            return
        present, resumable = self.prefix.resumable(chain.keys)
        if resumable == len(chain.keys) or any(place not in chain.pages for place in range(present, len(chain.keys))):
            return
        adopted = self.prefix.adopt(chain.keys)
        if adopted is None:
            return
        fills, slot = adopted
        pages = [(page, chain.pages[place]) for place, page in fills]
        snapshot = (slot, chain.snapshot) if slot >= 0 else None
        self._run(partial(self._copies.fill, pages, snapshot))


def make_stores(settings: Settings) -> list[KVStore]:
    """The stores that the settings ask for, fastest first.

    Raises:
        ConfigError: a named store is not installed.
        PluginError: it cannot be imported.
    """
    from deepinfer.cache.tiers.files import FileStore
    from deepinfer.cache.tiers.memory import MemoryStore

    stores: list[KVStore] = []
    if settings.prefix_host_bytes:
        stores.append(MemoryStore(settings.prefix_host_bytes))
    if settings.prefix_disk_dir is not None:
        stores.append(FileStore(settings.prefix_disk_dir, settings.prefix_disk_bytes))
    names = [name.strip() for name in settings.kv_stores.split(",") if name.strip()]
    if names:
        from deepinfer.plugins.host import default_host, import_factory

        registry = default_host().kv_stores
        for name in names:
            entry = registry.get(name)
            if entry is None:
                known = ", ".join(sorted(item.descriptor.name for item in registry)) or "none"
                raise ConfigError(
                    f"no installed plugin offers the KV store {name!r}; installed: {known}", field="kv_stores"
                )
            stores.append(import_factory(entry)(settings))
    return stores

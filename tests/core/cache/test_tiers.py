"""Stores below the device: torn, altered and foreign data is a miss; a failing store never stops an engine."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.cache.tiers import exchange as exchange_module
from deepinfer.cache.tiers.exchange import LoadedChain, TierExchange
from deepinfer.cache.tiers.files import FileStore, decode_block, encode_block
from deepinfer.cache.tiers.memory import MemoryStore
from deepinfer.cache.tiers.store import BlockKey, KVStore

NBYTES = 40
KEY = BlockKey(bytes(range(32)), "page", "canonical/1", "cpu-abc", NBYTES)
DATA = bytes(200 - i for i in range(NBYTES))
FOREIGN = [
    replace(KEY, digest=bytes(32)),
    replace(KEY, kind="snapshot"),
    replace(KEY, layout_id="canonical/2"),
    replace(KEY, numerics_id="cpu-abd"),
    replace(KEY, nbytes=NBYTES + 1),
]


@pytest.fixture(params=["host", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return MemoryStore(10_000) if request.param == "host" else FileStore(tmp_path / "kv", 10_000)


def test_a_store_gives_back_what_was_put_and_nothing_else(store: KVStore) -> None:
    assert store.get(KEY) is None
    assert not store.contains(KEY)
    assert store.put(KEY, DATA)
    assert store.put(KEY, DATA)
    assert store.contains(KEY)
    assert store.get(KEY) == DATA
    for key in FOREIGN:
        assert store.get(key) is None
        assert not store.contains(key)
    store.delete(KEY)
    store.delete(KEY)
    assert store.get(KEY) is None
    store.close()


def keys(count: int) -> list[BlockKey]:
    return [replace(KEY, digest=index.to_bytes(32, "little")) for index in range(count)]


def test_host_memory_is_bounded_and_drops_the_least_recently_used() -> None:
    store = MemoryStore(3 * NBYTES)
    first, second, third, fourth = keys(4)
    for key in (first, second, third):
        assert store.put(key, DATA)
    assert store.get(first) == DATA
    store.put(fourth, DATA)
    assert [store.contains(key) for key in (first, second, third, fourth)] == [True, False, True, True]
    assert (store.nbytes, store.evicted, len(store)) == (3 * NBYTES, 1, 3)
    assert not store.put(KEY, bytes(3 * NBYTES + 1))


def test_files_are_bounded_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(encode_block(KEY, DATA))
    store = FileStore(tmp_path, 10 * size)
    names = keys(30)
    for moment, key in enumerate(names):
        assert store.put(key, DATA)
        os.utime(store.path(key), (moment, moment))
        if moment >= 3:
            assert store.get(names[3]) == DATA
    files = [path for path in tmp_path.glob("??/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10 * size
    assert len(files) >= 8
    assert store.contains(names[-1])
    assert store.contains(names[3]), "it was read all the time"
    assert store.evicted == 30 - len(files)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_a_miss(tmp_path: Path, data: st.DataObject, caplog: pytest.LogCaptureFixture) -> None:
    """Cut anywhere, longer, one bit turned anywhere, zeros or another block in its place."""
    store = FileStore(tmp_path, 1 << 20)
    store.put(KEY, DATA)
    path = store.path(KEY)
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "longer", "flip", "zeros", "foreign", "swap"]))
    if kind == "cut":
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "longer":
        damaged = content + data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "flip":
        position, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        damaged = content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]
    elif kind == "zeros":
        start = data.draw(st.integers(0, len(content) - 1))
        damaged = content[:start] + bytes(len(content) - start)
        if damaged == content:
            return
    elif kind == "foreign":
        foreign = data.draw(st.sampled_from(FOREIGN))
        damaged = encode_block(foreign, DATA + bytes(foreign.nbytes - NBYTES))
    else:
        damaged = content[::-1]
    path.write_bytes(damaged)
    assert store.get(KEY) is None
    assert not path.exists(), "it is computed and written anew"
    assert store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_block_says_whose_it_is() -> None:
    content = encode_block(KEY, DATA)
    assert decode_block(KEY, content) == DATA
    assert all(decode_block(key, content) is None for key in FOREIGN)


def test_a_full_disk_ends_writing_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, 1 << 20)
    first, second, third = keys(3)
    assert store.put(first, DATA)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deepinfer.cache.tiers.files.os.fsync", full)
    with caplog.at_level(logging.WARNING, "deepinfer.cache"):
        assert not store.put(second, DATA)
        assert not store.put(third, DATA)
    assert [record.getMessage() for record in caplog.records] == [
        f"the prefix cache in {tmp_path} is not written to any more: [Errno 28] No space left on device; free space "
        "there or choose another DEEPINFER_PREFIX_DISK_DIR; requests are served as before"
    ]
    assert store.get(first) == DATA, "what is there can still be read"
    assert store.get(second) is None
    assert [path.name for path in tmp_path.glob("??/*")] == [store.path(first).name], "nothing half written is left"


def test_a_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = FileStore(tmp_path / "file" / "kv", 1000)
    assert "is not written to any more" in caplog.text
    assert not store.put(KEY, DATA)
    assert store.get(KEY) is None


def test_what_a_crash_left_is_never_read_and_removed_later(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 20)
    folder = store.path(KEY).parent
    folder.mkdir()
    old, new = folder / ".writing-1-a", folder / ".writing-2-b"
    for path in (old, new):
        path.write_bytes(encode_block(KEY, DATA)[:50])
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    assert store.get(KEY) is None
    assert store.put(KEY, DATA)
    assert not old.exists()
    assert new.exists(), "another engine may be writing it"


WRITER = """
import random, sys
from dataclasses import replace
from deepinfer.cache.tiers.files import FileStore
from deepinfer.cache.tiers.store import BlockKey
store = FileStore(sys.argv[1], 20_000)
draw = random.Random(int(sys.argv[2]))
bad = 0
for _ in range(150):
    index = draw.randrange(100)
    key = BlockKey(index.to_bytes(32, "little"), "page", "layout", "numerics", 300)
    data = bytes([index]) * 300
    if draw.random() < 0.6:
        assert store.put(key, data) or store.disabled is None, store.disabled
    else:
        found = store.get(key)
        bad += found is not None and found != data
    if draw.random() < 0.05:
        store.delete(key)
assert store.disabled is None and store.torn == 0 and bad == 0, (store.disabled, store.torn, bad)
"""


def test_several_engines_share_a_directory(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)]) for seed in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert not list(tmp_path.glob("??/.writing-*"))
    total = sum(path.stat().st_size for path in tmp_path.glob("??/*"))
    assert total <= 20_000 * (1 + 3 / 16)


# ---- the exchange -----------------------------------------------------------------------------------------------


class Stubborn(MemoryStore):
    """A store that waits, raises or lies."""

    name = "stubborn"

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def get(self, key: BlockKey) -> bytes | None:
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return super().get(key)


def make(*stores: KVStore, **options: Any) -> TierExchange:
    sizes = {"page_bytes": 4, "slot_bytes": 6, "time_limit": 5.0}
    return TierExchange(stores, layout_id="layout", numerics_id="numerics", **{**sizes, **options})


CHAIN = [bytes([index]) * 32 for index in range(6)]


def fill(exchange: TierExchange, pages: range, snapshots: tuple[int, ...]) -> None:
    for index in pages:
        exchange.save("page", CHAIN[index], lambda index=index: bytes([index]) * 4)
    for index in snapshots:
        exchange.save("snapshot", CHAIN[index], lambda index=index: bytes([index]) * 6)
    exchange.flush()


def found(exchange: TierExchange, present: int = 0, resumable: int = 0) -> LoadedChain | None:
    job = exchange.load(CHAIN, present, resumable)
    return job.future.result(10)


def test_the_deepest_place_with_pages_and_snapshot_is_found() -> None:
    exchange = make(MemoryStore(1000))
    fill(exchange, range(5), (1, 3, 5))
    chain = found(exchange)
    assert chain is not None
    assert chain.keys == tuple(CHAIN[:4])
    assert chain.pages == {index: bytes([index]) * 4 for index in range(4)}
    assert chain.snapshot == bytes([3]) * 6
    rest = found(exchange, present=3, resumable=2)
    assert rest is not None
    assert list(rest.pages) == [3]
    assert found(exchange, present=4, resumable=4) is None, "the device can resume there already"
    exchange.close()


def test_a_hole_or_a_torn_page_cuts_the_chain(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 20)
    exchange = make(store)
    fill(exchange, range(6), (1, 3, 5))
    path = store.path(BlockKey(CHAIN[4], "page", "layout", "numerics", 4))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    chain = found(exchange)
    assert chain is not None
    assert len(chain.keys) == 4
    store.delete(BlockKey(CHAIN[0], "page", "layout", "numerics", 4))
    assert found(exchange) is None
    exchange.close()


def test_what_is_found_below_moves_up(tmp_path: Path) -> None:
    below = make(FileStore(tmp_path, 1 << 20))
    fill(below, range(2), (1,))
    below.close()
    fast = MemoryStore(1000)
    exchange = make(fast, FileStore(tmp_path, 1 << 20))
    assert found(exchange) is not None
    assert len(fast) == 3
    exchange.close()


def test_a_slow_store_is_a_miss_in_time() -> None:
    store = Stubborn()
    exchange = make(store, time_limit=0.05)
    fill(exchange, range(2), (1,))
    store.gate.clear()
    job = exchange.load(CHAIN, 0, 0)
    assert not job.is_over()
    time.sleep(0.06)
    assert job.is_over()
    assert job.result() is None
    store.gate.set()
    exchange.close()


def test_a_store_that_raises_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    store = Stubborn()
    exchange = make(store)
    fill(exchange, range(2), (1,))
    store.error = RuntimeError("lost the network")
    assert found(exchange) is None
    assert exchange.stores == ()
    assert exchange.stats.disabled == ["stubborn"]
    assert "KV store 'stubborn' failed and is not used any more: RuntimeError: lost the network" in caplog.text
    fill(exchange, range(2), (1,))
    assert exchange.stats.dropped == 3
    exchange.close()


def test_blocks_of_the_wrong_length_are_misses() -> None:
    class Liar(MemoryStore):
        def get(self, key: BlockKey) -> bytes | None:
            return b"short"

    exchange = make(Liar(1000))
    fill(exchange, range(2), (1,))
    assert found(exchange) is None
    exchange.close()


def test_too_much_at_once_is_dropped_not_piled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PENDING_BYTES", 10)
    exchange = make(MemoryStore(1000))
    gate = threading.Event()

    def wait() -> bytes:
        gate.wait(10)
        return bytes(4)

    for key in CHAIN:
        exchange.save("page", key, wait)
    assert exchange.stats.dropped == 4
    gate.set()
    exchange.flush()
    assert exchange.stats.saved == 2
    exchange.close()


def test_a_prefix_larger_than_the_bound_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "LOAD_BYTES", 6 + 3 * 4)
    exchange = make(MemoryStore(1000))
    fill(exchange, range(6), (1, 5))
    chain = found(exchange)
    assert chain is not None
    assert len(chain.keys) == 2
    exchange.close()


def test_random_chains_never_give_wrong_bytes(tmp_path: Path) -> None:
    draw = random.Random(7)
    store = FileStore(tmp_path, 4000)
    exchange = make(MemoryStore(30), store)
    for _ in range(60):
        index = draw.randrange(6)
        fill(exchange, range(index, index + 1), (index,) if draw.random() < 0.5 else ())
        for path in tmp_path.glob("??/*"):
            if draw.random() < 0.03:
                content = bytearray(path.read_bytes())
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                path.write_bytes(content)
        chain = found(exchange, draw.randrange(2), 0)
        if chain is not None:
            assert chain.snapshot == bytes([len(chain.keys) - 1]) * 6
            assert all(page == bytes([position]) * 4 for position, page in chain.pages.items())
    exchange.close()

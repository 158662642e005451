"""Blocks in a local directory: one checked file each, safe to share between engines and to lose power over."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from deepinfer.cache.tiers.store import BlockKey, KVStore

try:
    import fcntl
except ImportError:  # Not a POSIX system: engines may then clean up at the same time, which costs only work.
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileStore"]

_logger = logging.getLogger("deepinfer.cache")

MAGIC = b"DIKV\x001\r\n"
PREFIX = struct.Struct("<8sIQ")
"""Magic, length of the header, length of the block."""
CHECK_BYTES = 32
TEMPORARY = ".writing-"
STALE_SECONDS = 3600.0
SHARE_TO_KEEP = 0.9
"""A clean-up goes down to this share of the bound, so that it is not needed at every write."""
SHARE_BETWEEN_SCANS = 1 / 16
"""An engine looks at the whole directory again after it has written this share of the bound."""


def _check(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=CHECK_BYTES, person=b"deepinfer-block")
    for part in parts:
        digest.update(part)
    return digest.digest()


def encode_block(key: BlockKey, data: bytes) -> bytes:
    """The file of a block: magic, lengths, names, bytes, and a hash over all of them."""
    header = json.dumps(
        {
            "digest": key.digest.hex(),
            "kind": key.kind,
            "layout_id": key.layout_id,
            "numerics_id": key.numerics_id,
        },
        sort_keys=True,
    ).encode()
    body = PREFIX.pack(MAGIC, len(header), len(data)) + header + data
    return body + _check(body)


def decode_block(key: BlockKey, content: bytes) -> bytes | None:
    """The block of a file, or None if it is torn, altered, or of anything but `key`."""
    expected = encode_block(key, b"")[:-CHECK_BYTES]
    header = expected[PREFIX.size :]
    size = PREFIX.size + len(header) + key.nbytes + CHECK_BYTES
    if len(content) != size or content[: PREFIX.size] != PREFIX.pack(MAGIC, len(header), key.nbytes):
        return None
    if content[PREFIX.size : PREFIX.size + len(header)] != header:
        return None
    if _check(content[:-CHECK_BYTES]) != content[-CHECK_BYTES:]:
        return None
    return content[PREFIX.size + len(header) : -CHECK_BYTES]


class FileStore(KVStore):
    """A directory of blocks, shared by all engines that are given it.

    A file is written under another name, flushed to the disk and then renamed, so readers see all of it or nothing;
    what a crash leaves is removed later. Every read checks the whole file against its hash and its key. The bound is
    kept by removing the least recently used files; engines that share a directory may exceed it together by a
    sixteenth each. The first write that fails (disk full, no permission) ends writing for this engine with a warning.

    Args:
        directory: made if it does not exist.
        max_bytes: of all files together.
    """

    name = "files"

    def __init__(self, directory: str | Path, max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.written = 0
        self.torn = 0
        self.evicted = 0
        self.disabled: str | None = None
        """Why nothing is written any more; None while writing works."""
        self._lock = threading.Lock()
        self._until_scan = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._disable(error)

    def path(self, key: BlockKey) -> Path:
        """Where the block of a key lies."""
        names = "\0".join((key.layout_id, key.numerics_id, str(key.nbytes))).encode()
        name = blake2b(key.digest + names, digest_size=24, person=b"deepinfer-file").hexdigest()
        return self.directory / name[:2] / f"{name}.{key.kind}"

    def put(self, key: BlockKey, data: bytes) -> bool:
        """Write a block unless a sound file of it is there; False if it was not written."""
        if self.disabled or len(data) > self.max_bytes:
            return False
        if self.contains(key) and self.get(key) == data:
            return True
        content = encode_block(key, data)
        try:
            self._make_room(len(content))
            self._write(self.path(key), content)
        except OSError as error:
            self._disable(error)
            return False
        self.written += len(content)
        return True

    def get(self, key: BlockKey) -> bytes | None:
        """Read and check a block; a file that does not hold it is removed."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        data = decode_block(key, content)
        if data is None:
            self.torn += 1
            _logger.warning("%s does not hold the block that it is named after; it is removed and computed anew", path)
            self._unlink(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # Order of use for every engine that shares the directory.
        return data

    def contains(self, key: BlockKey) -> bool:
        """Whether there is a file of the right length."""
        try:
            return self.path(key).stat().st_size == len(encode_block(key, b"")) + key.nbytes
        except OSError:
            return False

    def delete(self, key: BlockKey) -> None:
        """Remove the file of a block."""
        self._unlink(self.path(key))

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            self._unlink(temporary)
            raise

    def _make_room(self, nbytes: int) -> None:
        """Look at the directory now and then, and remove what was not used for longest."""
        with self._lock:
            self._until_scan -= nbytes
            if self._until_scan > 0:
                return
            step = int(self.max_bytes * SHARE_BETWEEN_SCANS)
            total = self._clean(nbytes)
            self._until_scan = max(min(step, self.max_bytes - total), 0)

    def _clean(self, nbytes: int) -> int:
        """Remove files until `nbytes` more fit; returns the bytes that are left, without them."""
        with open(self.directory / "lock", "ab") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # Freed when the file is closed, also by a crash.
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            if total + nbytes <= self.max_bytes:
                return total
            for _, size, path in files:
                if total + nbytes <= self.max_bytes * SHARE_TO_KEEP:
                    break
                self._unlink(path)
                self.evicted += 1
                total -= size
            return total

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of all blocks; forgotten temporary files are removed on the way."""
        for path in self.directory.glob("??/*"):
            try:
                info = path.stat()
            except OSError:
                continue
            if not path.name.startswith(TEMPORARY):
                yield info.st_mtime, info.st_size, path
            elif time.time() - info.st_mtime > STALE_SECONDS:
                self._unlink(path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _logger.debug("%s could not be removed: %s", path, error)

    def _disable(self, error: OSError) -> None:
        if self.disabled is None:
            self.disabled = str(error)
            _logger.warning(
                "the prefix cache in %s is not written to any more: %s; free space there or choose another "
                "DEEPINFER_PREFIX_DISK_DIR; requests are served as before",
                self.directory,
                error,
            )

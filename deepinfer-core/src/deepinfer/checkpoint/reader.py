"""Planned, coalesced, parallel reads of tensor bytes into buffers of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.checkpoint.index import Location
from deepinfer.errors import CheckpointError

__all__ = ["TORCH_DTYPES", "ReadStats", "plan_reads", "read_tensors"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Dtype of the tensors handed out. I8 holds two FP4 codes a byte and F8_E8M0 an exponent: both come as uint8."""

_REQUEST_BYTES = 32 << 20  # one read call at most; larger tensors are split over threads
_MAX_VECTORS = 512  # below every platform's limit of buffers per readv call


@dataclass
class ReadStats:
    """Totals over all reads of a checkpoint."""

    bytes: int = 0
    seconds: float = 0.0
    requests: int = 0

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes per second, 0 before the first read."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return f"{self.bytes / 1e9:.3f} GB in {self.seconds:.2f} s, {self.gigabytes_per_second:.2f} GB/s"


@dataclass(frozen=True)
class ReadRequest:
    """One read call: consecutive file bytes from `start` into `views`, in order."""

    path: Path
    start: int
    views: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the call must bring."""
        return sum(view.nbytes for view in self.views)


def allocate(locations: Iterable[Location], into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A uint8 buffer per tensor, of exactly its bytes: the caller's where `into` has one, else uninitialised."""
    buffers = {}
    for item in locations:
        given = into.get(item.name)
        if given is None:
            buffers[item.name] = torch.empty(item.entry.nbytes, dtype=torch.uint8)
            continue
        if given.device.type != "cpu" or not given.is_contiguous() or given.nbytes != item.entry.nbytes:
            raise ValueError(
                f"{item.name} needs a contiguous CPU buffer of {item.entry.nbytes} bytes; got {given.nbytes} bytes on "
                f"{given.device}"
            )
        buffers[item.name] = given.view(-1).view(torch.uint8)
    return buffers


def typed(buffer: torch.Tensor, location: Location) -> torch.Tensor:
    """View a uint8 buffer with the tensor's dtype and shape."""
    return buffer.view(TORCH_DTYPES[location.entry.dtype]).view(location.entry.shape)


def plan_reads(locations: Iterable[Location], buffers: Mapping[str, torch.Tensor]) -> list[ReadRequest]:
    """Order by file and position, join neighbours into one vectored read, split what exceeds a request's size."""
    requests: list[ReadRequest] = []
    run: list[memoryview] = []
    path: Path | None = None
    start = end = 0

    def flush() -> None:
        nonlocal run
        if run and path is not None:
            requests.append(ReadRequest(path, start, tuple(run)))
        run = []

    for item in sorted(locations, key=lambda item: (item.path, item.entry.start)):
        view = buffers[item.name].numpy().data
        position = item.entry.start
        while view.nbytes:
            full = end - start >= _REQUEST_BYTES or len(run) >= _MAX_VECTORS
            if item.path != path or position != end or full or not run:
                flush()
                path, start, end = item.path, position, position
            part = view[: _REQUEST_BYTES - (end - start)]
            run.append(part)
            position, end = position + part.nbytes, end + part.nbytes
            view = view[part.nbytes :]
    flush()
    return requests


def read_tensors(
    locations: Sequence[Location],
    *,
    threads: int,
    stats: ReadStats,
    progress: Callable[[int], None] | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Read whole tensors; each lands in a buffer of its own, copied once by the kernel.

    Raises:
        CheckpointError: a file ended early or could not be read.
        ValueError: a buffer of `into` does not fit its tensor.
    """
    began = time.perf_counter()
    buffers = allocate(locations, into or {})
    requests = plan_reads(locations, buffers)
    files = _Files()
    lock = threading.Lock()

    def run(request: ReadRequest) -> None:
        _read(files.descriptor(request.path), request)
        if progress is not None:
            with lock:
                progress(request.nbytes)

    try:
        if len(requests) <= 1 or threads <= 1:
            for request in requests:
                run(request)
        else:
            with ThreadPoolExecutor(min(threads, len(requests))) as pool:
                list(pool.map(run, requests))
    finally:
        files.close()
    stats.bytes += sum(item.entry.nbytes for item in locations)
    stats.requests += len(requests)
    stats.seconds += time.perf_counter() - began
    return {item.name: typed(buffers[item.name], item) for item in locations}


class _Files:
    """Descriptors shared by the reading threads: positional reads do not move a file's cursor."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                try:
                    self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            return self._open[path]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _read(descriptor: int, request: ReadRequest) -> None:
    views = list(request.views)
    position = request.start
    while views:
        try:
            count = os.preadv(descriptor, views, position)
        except OSError as error:
            raise CheckpointError(
                f"{request.path} cannot be read at byte {position}: {error.strerror or error}"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{request.path} ended at byte {position} while {request.start + request.nbytes} bytes were promised: "
                "the file changed or is truncated; fetch it again"
            )
        position += count
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if count:
            views[0] = views[0][count:]

"""A name for the weights of a checkpoint folder that changes whenever they might have."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

__all__ = ["checkpoint_digest"]

SAMPLE_BYTES = 4096
SAMPLES = 64


def checkpoint_digest(folder: Path) -> bytes:
    """32 bytes that name the weights in a folder, for caches that outlive the process.

    Hashed are the configuration and, of each weight file, name, length, time of change, beginning (which holds the
    header with all names and shapes) and samples of its content. Reading every byte of a large model would take longer
    than loading it; the time of change makes an edited file a new one, and a copied checkpoint merely starts cold.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake2b(digest_size=32, person=b"deepinfer-model")
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        info = path.stat()
        digest.update(f"\0{path.name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * max(info.st_size - SAMPLE_BYTES, 0) // (SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()

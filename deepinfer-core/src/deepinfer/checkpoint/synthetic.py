"""Synthetic checkpoints in the released format: random weights that exercise every path (spec/model appendix D)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deepinfer.checkpoint.presets import preset_config
from deepinfer.checkpoint.random_weights import make_tensors, stem
from deepinfer.checkpoint.safetensors_writer import file_order, shard_names, split_shards, write_index, write_shard
from deepinfer.checkpoint.tensor_spec import TensorSpec
from deepinfer.checkpoint.tokenizer_file import SpecialIds, tokenizer_config, tokenizer_json
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig, parse_config
from deepinfer.models.deepseek_v41.tensors import expected_tensors

__all__ = ["make_checkpoint", "write_checkpoint"]

_SHARD_BYTES = 2 << 30


def make_checkpoint(
    folder: str | Path,
    preset: str = "tiny",
    seed: int = 0,
    shards: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a synthetic checkpoint; the folder appears complete or not at all.

    A tensor's values depend on `seed` and its name alone. Memory needed is a few tensors, whatever the preset.

    Args:
        folder: must not exist yet, or be empty.
        preset: `tiny` (9 MB), `small` (about 0.5 GB) or `wide` (layers of released widths, about 5 GB).
        seed: of the weights; the tokenizer does not depend on it.
        shards: number of files; by default one file per 2 GiB.
        progress: gets the bytes done and the bytes in all.

    Raises:
        CheckpointError: the folder has content or cannot be written.
        ConfigError: unknown preset, or a number of shards below 1.
    """
    return write_checkpoint(folder, preset_config(preset), seed=seed, shards=shards, progress=progress)


def write_checkpoint(
    folder: str | Path,
    raw_config: dict[str, Any],
    *,
    seed: int = 0,
    shards: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """`make_checkpoint` for any config whose `engram_compressed_vocab_size` fits the tokenizer made here."""
    if shards is not None and shards < 1:
        raise ConfigError(f"{shards} is not a number of files; give 1 or more", field="shards")
    config = parse_config(raw_config)
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; choose another or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be written: {error.strerror or error}") from error
    try:
        _write_side_files(partial, raw_config, config)
        _write_weights(partial, config, seed, shards, progress)
        partial.chmod(0o755)
        os.replace(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_side_files(folder: Path, raw_config: dict[str, Any], config: ModelConfig) -> None:
    ids = SpecialIds(
        bos=config.bos_token_id,
        eos=config.eos_token_id,
        pad=config.pad_token_id,
        system=config.dspark_noise_token_id,
        image=config.image_token_id,
    )
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    files = {
        "config.json": raw_config,
        "tokenizer.json": tokenizer_json(config.vocab_size, ids),
        "tokenizer_config.json": tokenizer_config(config.max_position_embeddings),
        "generation_config.json": generation,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, config: ModelConfig, seed: int, shards: int | None, progress: Callable[[int, int], None] | None
) -> None:
    specs = list(expected_tensors(config).values())
    total = sum(spec.nbytes for spec in specs)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    parts = split_shards(specs, shards or -(-total // _SHARD_BYTES))
    names = shard_names(len(parts))
    for part, name in zip(parts, names, strict=True):
        ordered = file_order(part)
        write_shard(folder / name, ordered, _generate(ordered, seed), advance)
    if len(parts) > 1:
        write_index(folder, parts, names)


def _generate(specs: Sequence[TensorSpec], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in order, made a few ahead by worker threads."""
    workers = min(8, os.cpu_count() or 1)
    pending: deque[tuple[list[TensorSpec], Future[list[torch.Tensor]]]] = deque()

    def oldest() -> Iterator[tuple[str, torch.Tensor]]:
        group, future = pending.popleft()
        yield from zip((spec.name for spec in group), future.result(), strict=True)

    with ThreadPoolExecutor(workers) as pool:
        for _, group in itertools.groupby(specs, stem):
            members = list(group)
            pending.append((members, pool.submit(make_tensors, members, seed)))
            if len(pending) > 2 * workers:
                yield from oldest()
        while pending:
            yield from oldest()

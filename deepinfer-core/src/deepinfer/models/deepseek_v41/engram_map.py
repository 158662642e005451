"""Hashing constants and the compressed token map of the n-gram memory (spec/model 3.9)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_primes import engram_primes

__all__ = ["EngramMap", "derive_token_map", "engram_multipliers"]

_SEED_BASE = 10007
_SENTINEL = "\ue000"
_REPLACEMENT = "�"


@dataclass(frozen=True)
class EngramMap:
    """Constants that turn token ids into table rows.

    Attributes:
        layer_ids: the layers with a table, in config order; L of them.
        primes: int64 `[L, G - 1, heads]`, bucket counts by n-gram size 2..G.
        offsets: int64 `[L, (G - 1) * heads]`, first row of each column's sub-table.
        multipliers: int64 `[L, G]`, odd.
        token_map: int64 `[vocab_size]`, compressed id of each raw id; -1 where the tokenizer has no such id.
        pad: compressed id that fills slots before the sequence start.
    """

    layer_ids: tuple[int, ...]
    primes: np.ndarray
    offsets: np.ndarray
    multipliers: np.ndarray
    token_map: np.ndarray
    pad: int

    @classmethod
    def build(cls, config: ModelConfig, folder: str | Path | None = None) -> EngramMap:
        """Constants of a valid config; `folder` holds tokenizer.json and is read only where the map is not identity.

        Raises:
            CheckpointError: the tokenizer is needed and cannot be read.
            ConfigError: the derived map has another size than `engram_compressed_vocab_size` (rule 7).
        """
        shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
        primes = np.array(
            engram_primes(config.engram_vocab_size, config.engram_max_ngram_size, config.engram_n_heads, shape[0]),
            dtype=np.int64,
        ).reshape(shape)
        flat = primes.reshape(shape[0], shape[1] * shape[2])
        token_map = _token_map(config, folder)
        return cls(
            layer_ids=config.engram_layer_ids,
            primes=primes,
            offsets=np.cumsum(flat, axis=1) - flat,
            multipliers=np.stack(
                [
                    engram_multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
                    for layer in config.engram_layer_ids
                ]
            )
            if shape[0]
            else np.zeros((0, config.engram_max_ngram_size), np.int64),
            token_map=token_map,
            pad=int(token_map[config.engram_pad_token_id]),
        )


def engram_multipliers(layer: int, compressed_vocab_size: int, max_ngram_size: int) -> np.ndarray:
    """Odd int64 `[max_ngram_size]` for the table of backbone layer `layer`; products with an id never overflow."""
    bound = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    draws = np.random.default_rng(_SEED_BASE * layer).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return 2 * draws + 1


def _token_map(config: ModelConfig, folder: str | Path | None) -> np.ndarray:
    if config.engram_compressed_vocab_size == config.vocab_size:
        return np.arange(config.vocab_size, dtype=np.int64)
    if folder is None:
        raise CheckpointError(
            "engram_compressed_vocab_size differs from vocab_size, so tokenizer.json is needed: give the folder"
        )
    return derive_token_map(Path(folder) / "tokenizer.json", config)


def derive_token_map(tokenizer_file: Path, config: ModelConfig) -> np.ndarray:
    """Compressed ids `[vocab_size]` int64, derived from `tokenizer.json`; see `EngramMap.build` for errors."""
    tokenizer = _load_tokenizer(tokenizer_file)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > config.vocab_size:
        raise ConfigError(
            f"{config.vocab_size}, but {tokenizer_file.name} has {size} tokens", field="text_config.vocab_size"
        )
    normalise = _normaliser()
    first_seen: dict[str, int] = {}
    token_map = np.full(config.vocab_size, -1, dtype=np.int64)
    for token in range(config.vocab_size):
        spelling = tokenizer.id_to_token(token)
        if spelling is not None:
            key = _key(tokenizer.decode([token], skip_special_tokens=False), spelling, normalise)
            token_map[token] = first_seen.setdefault(key, len(first_seen))
    if len(first_seen) != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"{config.engram_compressed_vocab_size}, but {tokenizer_file} derives {len(first_seen)} compressed ids; "
            "the tokenizer and the weights do not belong together",
            field="text_config.engram_compressed_vocab_size",
        )
    return token_map


def compressed_vocab_size(tokenizer_file: Path) -> int:
    """Distinct compressed ids that a tokenizer derives: what `engram_compressed_vocab_size` must hold."""
    tokenizer = _load_tokenizer(tokenizer_file)
    normalise = _normaliser()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return len(
        {
            _key(tokenizer.decode([token], skip_special_tokens=False), spelling, normalise)
            for spelling, token in vocab.items()
        }
    )


def _key(text: str, spelling: str, normalise: Any) -> str:
    """What two tokens must share to get one compressed id."""
    if _REPLACEMENT in text:
        return spelling
    return normalise.normalize_str(text) or text


def _normaliser() -> Any:
    """The steps of spec/model 3.9 as the tokenizer library's own normalizers."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )


def _load_tokenizer(file: Path) -> Any:
    # the only library that decodes every tokenizer.json exactly; loaded where the map is not the identity
    from tokenizers import Tokenizer

    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; the n-gram memory derives its token map from it")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a usable tokenizer: {error}") from error

"""A working byte-level tokenizer for synthetic checkpoints, with V4.1's special tokens at the config's ids."""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

__all__ = ["SpecialIds", "tokenizer_config", "tokenizer_json"]

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
_ROLE_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
_FIM_TOKENS = ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")
_GROUNDING_TOKENS = tuple(f"<｜{slash}{kind}｜>" for kind in ("ref", "box", "point", "polygon") for slash in ("", "/"))
_NUM_SPECIAL = 5 + len(_ROLE_TOKENS) + len(_FIM_TOKENS) + len(_GROUNDING_TOKENS)
_SPECIAL = {BOS, EOS, PAD, IMAGE, *_GROUNDING_TOKENS}
"""Tokens that a decoder may skip; role, thinking and tool markers are plain added tokens, as in the release."""

_TEXT = """
The engine reads a prompt, cuts it into pieces and walks them through the layers of the model. Every layer looks at
the last few words, at the entries that its indexer picked, and at a table of short phrases that it has seen before.
Then the experts are asked: a router finds the best of them, each gives an answer, and the answers are added in order.
When the last layer is done, the head turns the result into one number for each token, and the sampler chooses one.
A small drafter guesses what comes next, so that the large model can check many guesses in one step. What is right
stays, what is wrong is thrown away, and the text that a reader sees is the same with the drafter and without it.
There should be no difference between a request that runs alone and a request that shares the machine with others.
"""


@dataclass(frozen=True)
class SpecialIds:
    """Ids that a config fixes; `system` is the drafter's noise token, as in the release."""

    bos: int
    eos: int
    pad: int
    system: int
    image: int


def tokenizer_json(vocab_size: int, ids: SpecialIds) -> dict[str, Any]:
    """Contents of a tokenizer.json with exactly `vocab_size` tokens: 256 bytes, merges, special tokens.

    Raises:
        ConfigError: the special ids clash, or `vocab_size` is too small for them and the bytes.
    """
    alphabet = _byte_alphabet()
    if vocab_size < len(alphabet) + _NUM_SPECIAL:
        raise ConfigError(
            f"{vocab_size} is too small: {len(alphabet)} bytes and {_NUM_SPECIAL} special tokens must fit",
            field="vocab_size",
        )
    special = _place_special(vocab_size, ids)
    free = [token for token in range(vocab_size) if token not in special]
    merges = list(itertools.islice(_merges(), len(free) - len(alphabet)))
    if len(merges) < len(free) - len(alphabet):
        raise ConfigError(f"{vocab_size} is larger than the built-in merges can fill", field="vocab_size")
    pieces = [*alphabet, *(left + right for left, right in merges)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": special[token],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special[token] in _SPECIAL,
            }
            for token in sorted(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # added tokens get their id only where the vocabulary lists them too: else they are numbered from its end
            "vocab": {**dict(zip(pieces, free, strict=True)), **{name: token for token, name in special.items()}},
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Contents of tokenizer_config.json; names no class with code of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def _place_special(vocab_size: int, ids: SpecialIds) -> dict[int, str]:
    """Spelling by id: the config's ids first, the rest at the highest ids that are free."""
    placed: dict[int, str] = {}
    fixed = ((ids.bos, BOS), (ids.eos, EOS), (ids.pad, PAD), (ids.system, SYSTEM), (ids.image, IMAGE))
    for token, spelling in fixed:
        if token in placed:
            raise ConfigError(f"id {token} is asked for {placed[token]} and {spelling}", field="tokenizer")
        placed[token] = spelling
    token = vocab_size - 1
    for spelling in (*_ROLE_TOKENS, *_FIM_TOKENS, *_GROUNDING_TOKENS):
        while token in placed:
            token -= 1
        placed[token] = spelling
    return placed


def _byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE in byte order: visible Latin-1 as itself, the rest from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = itertools.count(0x100)
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge, best first: learned from a short text, then syllables; every result is new."""
    seen: set[str] = set()
    for left, right in itertools.chain(_learned(), _syllables()):
        if left + right not in seen:
            seen.add(left + right)
            yield left, right


def _learned() -> Iterator[tuple[str, str]]:
    """Byte-pair encoding of the built-in text, until no pair inside a word occurs twice."""
    words = Counter(tuple("Ġ" + word) for word in _TEXT.split())
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            return
        yield best
        words = Counter({_merge(word, best): count for word, count in words.items()})


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    for piece in word:
        # a merged piece differs from pair[0], so this never merges one symbol twice
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return tuple(result)


def _syllables() -> Iterator[tuple[str, str]]:
    """Consonant-vowel syllables, with and without a leading space, then their combinations."""
    vowels = "aeiou"
    consonants = [letter for letter in string.ascii_lowercase if letter not in vowels]
    plain = [first + second for first in consonants for second in vowels]
    yield from ((piece[0], piece[1]) for piece in plain)
    yield from (("Ġ", piece) for piece in plain)
    for first, second in itertools.product(plain, plain):
        yield first, second
    for first, second in itertools.product(plain, plain):
        yield "Ġ" + first, second

"""Tokenizers and codecs of the tests: a small byte-level one with V4.1's special tokens, made here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.golden import golden_sets, missing_golden

from deepinfer_recipe import RecipeCodec
from deepinfer_recipe.detokenize import byte_alphabet

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
IMAGE, OTHER_IMAGE = "<｜deepseek_image｜>", "<｜image｜>"
DSML = "｜DSML｜"
V41_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, IMAGE, OTHER_IMAGE, "<think>", "</think>", DSML)
SPECIAL = (BOS, EOS, PAD, IMAGE, OTHER_IMAGE)
# words whose pieces become tokens; several tokens end or begin inside a character
WORDS = ("the", " the", "</", " <", "in", "er", "杭", "州", "ll", " ü", "ing", "::", "json")


def pieces_of(text: str) -> list[str]:
    back = {value: character for character, value in byte_alphabet().items()}
    return [back[value] for value in text.encode()]


def byte_level(tokens: Sequence[str] = V41_TOKENS, words: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """A tokenizer.json: 256 bytes, merges along WORDS and `words`, then added tokens."""
    vocab = {character: value for value, character in enumerate(byte_alphabet())}
    merges = []
    # a space glued to half a character, and half characters of an emoji
    back = {value: character for character, value in byte_alphabet().items()}
    chains = [pieces_of(word) for word in (*WORDS, *words)] + [[back[0x20], back[0xF0]], [back[0xF0], back[0x9F]]]
    for chain in chains:
        left = chain[0]
        for right in chain[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append([left, right])
            left += right
    numbers = itertools.count(len(vocab))
    added = [
        {
            "id": vocab[token] if token in vocab else next(numbers),
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL,
        }
        for token in tokens
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
            "vocab": vocab,
            "merges": merges,
        },
        **changes,
    }


def id_in(tokenizer: dict[str, Any], token: str) -> int:
    return next(entry["id"] for entry in tokenizer["added_tokens"] if entry["content"] == token)


def write_model(
    directory: Path, tokenizer: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """A model directory with tokenizer.json and config.json; returns it and the tokenizer's path."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level() if tokenizer is None else tokenizer
    ids = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    if config is None:
        config = {
            "model_type": "deepseek_v41",
            "bos_token_id": ids.get(BOS),
            "eos_token_id": ids.get(EOS),
            "image_token_id": ids.get(IMAGE),
            # eight padding rows without a token, as padded embeddings have
            "text_config": {"vocab_size": len(tokenizer["model"]["vocab"]) + len(ids) + 8},
        }
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory, path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(tmp_path_factory.mktemp("v41"))


@pytest.fixture(scope="session")
def codec(model: tuple[Path, Path]) -> RecipeCodec:
    return RecipeCodec(*model, served_names=("flash", "flash-alias"))


@pytest.fixture(scope="session")
def ids_of(codec: RecipeCodec) -> Callable[[str], list[int]]:
    """Ids of a text in which special tokens are spelled out."""
    return lambda text: codec.encode_text(text, allow_special=True)


@pytest.fixture(scope="session")
def golden() -> Path:
    """A golden checkpoint; required in CI, skipped where there is none."""
    if not golden_sets():
        missing_golden()
    return golden_sets()[0].path


def chat_body(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "flash", "messages": [{"role": "user", "content": content}], **more}


def body_of(protocol: str, **more: Any) -> dict[str, Any]:
    """The smallest body of each protocol."""
    if protocol == "responses":
        return {"model": "flash", "input": "hi", **more}
    if protocol == "messages":
        return chat_body(max_tokens=64, **more)
    return chat_body(**more)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tools_of(protocol: str, *names: str) -> list[dict[str, Any]]:
    if protocol == "responses":
        return [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
    if protocol == "messages":
        return [{"name": name, "input_schema": SCHEMA} for name in names]
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]


def cuts(ids: Sequence[int], points: Sequence[int]) -> list[list[int]]:
    """`ids` cut at the given places."""
    edges = [0, *sorted({point for point in points if 0 < point < len(ids)}), len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]

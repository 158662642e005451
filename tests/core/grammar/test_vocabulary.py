from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deepinfer.checkpoint.tokenizer_file import SpecialIds, tokenizer_json
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.grammar.vocabulary import Vocabulary

IDS = SpecialIds(bos=0, eos=1, pad=2, system=507, image=508)


@pytest.fixture
def contents() -> dict[str, Any]:
    return tokenizer_json(512, IDS)


def test_bytes_are_what_the_tokenizer_decodes(vocabulary: Vocabulary) -> None:
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary.tokens)
    assert vocabulary.tokens[1] == b""
    assert vocabulary.size == 512
    assert vocabulary.words == 16


def test_bytes_agree_with_the_decoder_of_golden(golden: Path, golden_vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer.from_file(str(golden / "v41-tiny-a" / "tokenizer.json"))
    compared = 0
    for token, text in enumerate(golden_vocabulary.tokens):
        if text and not any(byte >= 0x80 for byte in text):
            assert tokenizer.decode([token], skip_special_tokens=False).encode() == text
            compared += 1
    assert compared > 200
    added = {token for token in range(golden_vocabulary.size) if not golden_vocabulary.tokens[token]}
    assert added == set(golden_vocabulary.added.values())
    assert golden_vocabulary.spelled[golden_vocabulary.added["</think>"]] == b"</think>"


def test_ids_without_a_token_are_nothing(contents: dict[str, Any]) -> None:
    wide = Vocabulary.from_tokenizer_json(contents, 530, [1])
    assert wide.size == 530
    assert wide.words == 17
    assert set(wide.tokens[512:]) == {b""}
    assert Vocabulary.from_tokenizer_json(contents, 300, [1]).size == 300


def test_digest_names_tokens_and_ends(contents: dict[str, Any]) -> None:
    first = Vocabulary.from_tokenizer_json(contents, 512, [1])
    assert first.digest == Vocabulary.from_tokenizer_json(contents, 512, [1]).digest
    others = [
        Vocabulary.from_tokenizer_json(contents, 530, [1]),
        Vocabulary.from_tokenizer_json(contents, 512, [1, 2]),
        Vocabulary((b"ab", b"c", b""), (2,)),
        Vocabulary((b"a", b"bc", b""), (2,)),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5


def test_other_tokenizers_are_refused(contents: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="decoder 'Metaspace' is not ByteLevel"):
        Vocabulary.from_tokenizer_json({**contents, "decoder": {"type": "Metaspace"}}, 512, [1])
    with pytest.raises(CheckpointError, match="decoder None is not ByteLevel"):
        Vocabulary.from_tokenizer_json({**contents, "decoder": None}, 512, [1])
    with pytest.raises(CheckpointError, match="model.vocab is missing"):
        Vocabulary.from_tokenizer_json({**contents, "model": {"type": "Unigram", "vocab": []}}, 512, [1])
    with pytest.raises(CheckpointError, match="piece '世' .* outside the byte-level alphabet"):
        Vocabulary.from_tokenizer_json({**contents, "model": {"vocab": {"世": 5}}}, 512, [1])
    sequence = {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}
    assert Vocabulary.from_tokenizer_json({**contents, "decoder": sequence}, 512, [1]).size == 512


def test_a_text_must_be_able_to_end(contents: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="eos_token_ids: is empty"):
        Vocabulary.from_tokenizer_json(contents, 512, [])
    with pytest.raises(ConfigError, match="eos_token_ids: 512 is not an id of a vocabulary of 512"):
        Vocabulary.from_tokenizer_json(contents, 512, [512])
    with pytest.raises(ConfigError, match="eos_token_ids: 0 is the ordinary text b'a'"):
        Vocabulary((b"a",), (0,))
    with pytest.raises(CheckpointError, match="nowhere.json does not exist"):
        Vocabulary.from_file(Path("nowhere.json"), 512, [1])

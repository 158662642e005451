from __future__ import annotations

import copy
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy

from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import load_config, parse_config
from deepinfer.models.deepseek_v41.engram_map import EngramMap
from deepinfer.models.deepseek_v41.engram_primes import engram_primes


def rows_of(constants: EngramMap, layer: int, history: list[int], position: int) -> list[int]:
    """Straight-line reading of spec/model 3.9 on compressed ids."""
    grams = constants.multipliers.shape[1]
    blocked, tokens = False, []
    for back in range(grams):
        blocked = blocked or position < back or history[position - back] == -1
        tokens.append(constants.pad if blocked else history[position - back])
    value = tokens[0] * int(constants.multipliers[layer][0])
    rows, column = [], 0
    for size in range(2, grams + 1):
        value ^= tokens[size - 1] * int(constants.multipliers[layer][size - 1])
        for prime in constants.primes[layer][size - 2]:
            rows.append(value % int(prime) + int(constants.offsets[layer][column]))
            column += 1
    return rows


def test_released_primes_and_multipliers(raw_release: dict[str, Any]) -> None:
    primes = engram_primes(16_000_000, 4, 8, 2)
    flat = [prime for layer in primes for heads in layer for prime in heads]
    assert all(sympy.isprime(prime) for prime in flat)
    assert len(set(flat)) == 48
    assert primes[0][0] == (
        16000057,
        16000079,
        16000081,
        16000097,
        16000121,
        16000129,
        16000133,
        16000183,
    )
    assert primes[1][2] == (
        16000781,
        16000799,
        16000813,
        16000819,
        16000841,
        16000877,
        16000879,
        16000889,
    )
    release = raw_release
    release["text_config"]["engram_compressed_vocab_size"] = release["text_config"]["vocab_size"]
    constants = EngramMap.build(parse_config(release))
    assert constants.offsets[1][-1] + constants.primes[1][-1][-1] == 384_016_682


def test_multipliers_follow_the_compressed_size() -> None:
    from deepinfer.models.deepseek_v41.engram_map import engram_multipliers

    assert engram_multipliers(1, 99_092, 4).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert engram_multipliers(14, 99_092, 4).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_tiny_vectors(raw: dict[str, Any]) -> None:
    constants = EngramMap.build(parse_config(raw))
    assert constants.primes.tolist() == [
        [[1009, 1013], [1019, 1021], [1031, 1033]],
        [[1039, 1049], [1051, 1061], [1063, 1069]],
    ]
    assert constants.multipliers.tolist() == [
        [14831304026200453, 936705081716061, 6959601268494069, 14319439928568407],
        [5327545137947969, 15804252993068197, 2105304604748359, 13605204602324401],
    ]
    history = [0, 5, 17, 42, -1, 7]
    assert [rows_of(constants, 0, history, position) for position in (0, 3, 5)] == [
        [272, 1825, 2155, 3458, 4685, 5461],
        [203, 1037, 2501, 3117, 4993, 5958],
        [246, 1629, 2634, 4006, 4211, 6112],
    ]
    assert [rows_of(constants, 1, history, position) for position in (0, 3, 5)] == [
        [358, 1193, 2415, 3236, 4773, 5859],
        [740, 1449, 2585, 3609, 5161, 5265],
        [265, 1108, 2203, 3938, 4474, 5714],
    ]
    assert constants.token_map.tolist() == list(range(512))
    assert constants.pad == 2


def test_no_engram_layers(raw: dict[str, Any]) -> None:
    raw["text_config"].update(engram_layer_ids=[], engram_num_embeddings=[])
    constants = EngramMap.build(parse_config(raw))
    assert constants.multipliers.shape == (0, 4)
    assert constants.offsets.shape == (0, 6)


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny checkpoint's tokenizer, and a config whose compressed size is the derived one."""
    folder = make_checkpoint(tmp_path_factory.mktemp("derived") / "tiny", "tiny")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keys = set(plain_keys(folder))
    assert len(keys) < 512
    raw["text_config"]["engram_compressed_vocab_size"] = len(keys)
    return folder, raw


def plain_keys(folder: Path) -> list[str]:
    """The steps of spec/model 3.9 with the standard library instead of the tokenizer's normalizers."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    keys = []
    for token in range(512):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            keys.append(str(tokenizer.id_to_token(token)))
            continue
        plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn").lower()
        plain = re.sub("[ \t\r\n]+", " ", plain)
        plain = "\ue000" if plain == " " else plain
        keys.append(plain.strip().replace("\ue000", " ") or text)
    return keys


def test_derived_map_matches_the_standard_library(derived: tuple[Path, dict[str, Any]]) -> None:
    folder, raw = derived
    constants = EngramMap.build(parse_config(raw), folder)
    seen: dict[str, int] = {}
    expected = [seen.setdefault(key, len(seen)) for key in plain_keys(folder)]
    assert constants.token_map.tolist() == expected
    assert constants.token_map[:3].tolist() == [0, 1, 2]


def test_rule_seven_names_the_sizes(derived: tuple[Path, dict[str, Any]]) -> None:
    folder, raw = derived
    wrong = copy.deepcopy(raw)
    right = wrong["text_config"]["engram_compressed_vocab_size"]
    wrong["text_config"]["engram_compressed_vocab_size"] = right - 1
    with pytest.raises(ConfigError, match=f"{right - 1}, but .* derives {right} compressed ids") as caught:
        EngramMap.build(parse_config(wrong), folder)
    assert caught.value.field == "text_config.engram_compressed_vocab_size"


def test_missing_or_broken_tokenizer(derived: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, raw = derived
    with pytest.raises(CheckpointError, match="give the folder"):
        EngramMap.build(parse_config(raw))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        EngramMap.build(parse_config(raw), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a usable tokenizer"):
        EngramMap.build(parse_config(raw), tmp_path)


def test_ids_beyond_the_tokenizer_map_to_minus_one(derived: tuple[Path, dict[str, Any]]) -> None:
    folder, raw = derived
    wider = copy.deepcopy(raw)
    wider["text_config"]["vocab_size"] = 520
    constants = EngramMap.build(parse_config(wider), folder)
    assert constants.token_map[512:].tolist() == [-1] * 8
    narrower = copy.deepcopy(raw)
    narrower["text_config"]["vocab_size"] = 511
    with pytest.raises(ConfigError, match="has 512 tokens"):
        EngramMap.build(parse_config(narrower), folder)


def test_golden_constants(golden: Path) -> None:
    folder = golden / "v41-tiny-a"
    constants = EngramMap.build(load_config(folder), folder)
    reference = np.load(folder / "reference.npz")
    for name in ("token_map", "primes", "offsets", "multipliers"):
        np.testing.assert_array_equal(getattr(constants, name), reference[f"engram.{name}"])


def test_golden_released_rows(golden: Path, raw_release: dict[str, Any]) -> None:
    vectors = np.load(golden / "ops.npz")
    release = raw_release
    config = parse_config(release)
    primes = np.array(engram_primes(config.engram_vocab_size, 4, 8, 2))
    np.testing.assert_array_equal(primes, vectors["engram.primes"])
    flat = primes.reshape(2, 24)
    from deepinfer.models.deepseek_v41.engram_map import engram_multipliers

    constants = EngramMap(
        (1, 14),
        primes,
        np.cumsum(flat, 1) - flat,
        np.stack([engram_multipliers(layer, 99_092, 4) for layer in (1, 14)]),
        np.arange(0),
        int(vectors["engram.pad"]),
    )
    np.testing.assert_array_equal(constants.offsets, vectors["engram.offsets"])
    np.testing.assert_array_equal(constants.multipliers, vectors["engram.multipliers"])
    ids = vectors["engram.compressed_ids"].tolist()
    dead = [-1 if hidden else token for token, hidden in zip(ids, vectors["engram.dead"], strict=True)]
    for history, key in ((ids, "engram.rows"), (dead, "engram.rows_dead")):
        for layer in (0, 1):
            rows = [rows_of(constants, layer, history, position) for position in range(len(ids))]
            np.testing.assert_array_equal(np.array(rows), vectors[key][:, layer])

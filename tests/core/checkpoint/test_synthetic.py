from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint import Checkpoint
from deepinfer.checkpoint.formats import dequantise
from deepinfer.checkpoint.presets import PRESETS, preset_config
from deepinfer.checkpoint.random_weights import make_tensors
from deepinfer.checkpoint.safetensors_writer import file_order, split_shards
from deepinfer.checkpoint.synthetic import make_checkpoint, write_checkpoint
from deepinfer.checkpoint.tokenizer_file import SpecialIds, tokenizer_json
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.engram_map import compressed_vocab_size
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.models.deepseek_v41.topology import Topology

tokenizers = pytest.importorskip("tokenizers")


def special_ids(preset: str) -> tuple[int, SpecialIds]:
    config = parse_config(preset_config(preset))
    return config.vocab_size, SpecialIds(
        config.bos_token_id,
        config.eos_token_id,
        config.pad_token_id,
        config.dspark_noise_token_id,
        config.image_token_id,
    )


@pytest.fixture(scope="module", params=["tiny", "small"])
def tokenizer(request: pytest.FixtureRequest):
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(*special_ids(request.param))))


def test_same_seed_same_bytes_whatever_the_shards(tiny_single: Path, tiny_sharded: Path) -> None:
    one, three = Checkpoint.open(tiny_single), Checkpoint.open(tiny_sharded)
    left, right = one.read(one.names), three.read(three.names)
    assert set(left) == set(right)
    assert all(torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left)
    assert (tiny_single / "tokenizer.json").read_bytes() == (tiny_sharded / "tokenizer.json").read_bytes()


def test_another_seed_changes_every_tensor() -> None:
    specs = expected_tensors(parse_config(preset_config("tiny")))
    for name in ("embed.weight", "layers.0.attn.wq_a.weight", "layers.0.ffn.experts.1.w2.weight", "norm.weight"):
        first, second = (make_tensors([specs[name]], seed)[0].view(torch.uint8) for seed in (0, 1))
        assert not torch.equal(first, second), name
    same_shape = (make_tensors([specs[f"layers.{layer}.ffn.gate.bias"]], 0)[0] for layer in (0, 1))
    assert not torch.equal(*same_shape)


def test_weights_follow_the_recipe(tiny_single: Path) -> None:
    checkpoint = Checkpoint.open(tiny_single)
    values = dequantise(checkpoint.read(checkpoint.names))

    def deviation(name: str) -> float:
        return float(values[name].std())

    assert deviation("embed.weight") == pytest.approx(1, rel=0.02)
    assert deviation("layers.1.engram.embed.weight") == pytest.approx(1, rel=0.02)
    assert deviation("head.weight") == pytest.approx(256**-0.5, rel=0.02)
    assert deviation("layers.0.attn.wq_b.weight") == pytest.approx(64**-0.5, rel=0.05)
    assert deviation("layers.0.ffn.experts.0.w2.weight") == pytest.approx(64**-0.5, rel=0.05)
    gate, key = "layers.1.attn.compressor.wgate.weight", "layers.1.attn.compressor.wkv.weight"
    assert deviation(gate) == pytest.approx(2 * deviation(key), rel=0.05)
    assert float(values["layers.0.attn_norm.weight"].mean()) == pytest.approx(1, abs=0.03)
    assert float(values["layers.0.hc_attn_scale"].min()) > 0.5
    assert not torch.equal(values["layers.0.ffn.gate.bias"], values["layers.0.ffn.gate.bias_vl"])


def test_presets_are_what_they_promise() -> None:
    sizes = {}
    for preset in PRESETS:
        raw = preset_config(preset)
        config = parse_config(raw)
        sizes[preset] = sum(spec.nbytes for spec in expected_tensors(config).values())
        if config.engram_compressed_vocab_size == config.vocab_size:
            continue
        vocab_size, ids = special_ids(preset)
        assert config.image_token_id < vocab_size
        assert len({ids.bos, ids.eos, ids.pad, ids.system, ids.image}) == 5
    assert sizes["tiny"] == 8_512_610
    assert 0.4e9 < sizes["small"] < 0.6e9
    assert 3.5e9 < sizes["wide"] < 5e9
    wide = parse_config(preset_config("wide"))
    assert (wide.hidden_size, wide.head_dim, wide.index_head_dim, wide.moe_intermediate_size) == (5120, 512, 128, 2304)
    kinds = [(role.kind, role.ratio) for role in Topology.from_config(wide).layers]
    assert set(kinds) >= {("window", 0), ("full", 2), ("reuse", 2), ("full", 1), ("reuse", 1), ("reindex", 1)}


@pytest.mark.parametrize("preset", ["small", "wide"])
def test_compressed_size_is_what_the_tokenizer_derives(preset: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(*special_ids(preset))))
    assert compressed_vocab_size(file) == preset_config(preset)["text_config"]["engram_compressed_vocab_size"]


def test_special_tokens_sit_where_the_config_says(tokenizer) -> None:
    config = parse_config(preset_config("tiny" if tokenizer.get_vocab_size() == 512 else "small"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    for spelling, token in {
        "<｜begin▁of▁sentence｜>": config.bos_token_id,
        "<｜end▁of▁sentence｜>": config.eos_token_id,
        "<｜▁pad▁｜>": config.pad_token_id,
        "<｜deepseek_image｜>": config.image_token_id,
        "<｜System｜>": config.dspark_noise_token_id,
    }.items():
        assert tokenizer.token_to_id(spelling) == token
    for spelling in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"):
        assert tokenizer.encode(spelling).ids == [tokenizer.token_to_id(spelling)]
    # role markers are not special for the decoder, image and begin of sentence are
    assert tokenizer.decode([tokenizer.token_to_id("<think>"), config.bos_token_id, config.image_token_id]) == "<think>"


@given(text=st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_decode_undoes_encode(text: str) -> None:
    assert DECODER.decode(DECODER.encode(text).ids, skip_special_tokens=False) == text


DECODER = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(*special_ids("tiny"))))


def test_every_byte_and_common_words_have_tokens(tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("naïve 日本 🙂\r\n\t").ids) == "naïve 日本 🙂\r\n\t"
    assert len(tokenizer.encode(" the model and the drafter").ids) < 12


def test_vocabulary_too_small_or_clashing_ids() -> None:
    with pytest.raises(ConfigError, match="vocab_size: 200 is too small"):
        tokenizer_json(200, SpecialIds(0, 1, 2, 3, 4))
    with pytest.raises(ConfigError, match="id 1 is asked for"):
        tokenizer_json(512, SpecialIds(0, 1, 1, 3, 4))
    with pytest.raises(ConfigError, match="larger than the built-in merges"):
        tokenizer_json(129_280, SpecialIds(0, 1, 2, 3, 4))


def test_shards_cut_anywhere_but_inside_a_table() -> None:
    specs = list(expected_tensors(parse_config(preset_config("tiny"))).values())
    for count in (1, 2, 7, 40, 400):
        parts = split_shards(specs, count)
        assert len(parts) <= count
        assert [spec for part in parts for spec in part] == specs
        for part in parts:
            names = {spec.name for spec in part}
            tables = {name.rsplit(".", 1)[0] for name in names if ".engram.embed." in name}
            assert all({f"{table}.weight", f"{table}.scale"} <= names for table in tables)
            widths = [{"F32": 4, "BF16": 2}.get(spec.dtype, 1) for spec in file_order(part)]
            assert widths == sorted(widths, reverse=True)


def test_nothing_is_left_or_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    (target / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        make_checkpoint(target)
    (target / "mine.txt").unlink()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(target, progress=stop)
    assert list(target.iterdir()) == []
    assert list(tmp_path.iterdir()) == [target]
    steps: list[tuple[int, int]] = []
    make_checkpoint(target, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (8_512_610, 8_512_610)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preset: 'huge' is not a preset; choose one of tiny, small, wide"):
        make_checkpoint(tmp_path / "x", "huge")
    with pytest.raises(ConfigError, match="shards: 0 is not a number of files"):
        make_checkpoint(tmp_path / "x", shards=0)
    broken = copy.deepcopy(preset_config("tiny"))
    broken["text_config"]["head_dim"] = 33
    with pytest.raises(ConfigError, match="head_dim"):
        write_checkpoint(tmp_path / "x", broken)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        make_checkpoint(tmp_path / "file" / "below")


def test_text_only_checkpoint(tmp_path: Path) -> None:
    raw = preset_config("tiny")
    del raw["vision_config"]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "text", raw, seed=5))
    checkpoint.validate(expected_tensors(parse_config(checkpoint.config)))
    assert len(checkpoint.names) == 834

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint import Checkpoint
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.tensors import expected_tensors

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def validate(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.validate(expected_tensors(parse_config(checkpoint.config)))


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        validate(folder)
    assert str(folder) in str(caught.value)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    file = folder / INDEX
    raw = json.loads(file.read_text())
    change(raw["weight_map"])
    file.write_text(json.dumps(raw))


def names_in(folder: Path, shard: str) -> list[str]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return [name for name, file in weight_map.items() if file == shard]


def test_good_checkpoints_pass(tiny_single: Path, tiny_sharded: Path) -> None:
    validate(tiny_single)
    validate(tiny_sharded)


def test_truncated_shard(sharded: Path) -> None:
    file = sharded / SHARD
    file.write_bytes(file.read_bytes()[:-100])
    problems = problems_of(sharded)
    assert any(problem.startswith(f"{SHARD}: ") and "the file is truncated" in problem for problem in problems)


def test_missing_shard_names_its_tensors_and_modules(sharded: Path) -> None:
    lost = names_in(sharded, SHARD)
    (sharded / SHARD).unlink()
    problems = problems_of(sharded)
    assert f"{SHARD}: named by {INDEX} but missing" in problems
    assert len([problem for problem in problems if problem.startswith("missing tensor")]) == len(lost)
    expert = next(name for name in lost if ".experts." in name)
    assert f"missing tensor {expert} (module {expert.rsplit('.', 2)[0]})" in problems


def test_tensor_dropped_from_the_file_but_not_the_index(sharded: Path) -> None:
    name = names_in(sharded, SHARD)[3]
    rewrite(sharded / SHARD, lambda tensors: tensors.pop(name))
    problems = problems_of(sharded)
    assert f"{SHARD}: the index promises {name} but the file lacks it" in problems


def test_tensor_dropped_from_both(sharded: Path) -> None:
    name = names_in(sharded, SHARD)[3]
    rewrite(sharded / SHARD, lambda tensors: tensors.pop(name))
    edit_index(sharded, lambda weight_map: weight_map.pop(name))
    problems = problems_of(sharded)
    assert [problem for problem in problems if name in problem] == list(problems)
    assert problems[0].startswith(f"missing tensor {name} (module ")


def test_stale_tensor_outside_the_index(sharded: Path) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.update(left_over=torch.zeros(2)))
    assert problems_of(sharded) == (f"{SHARD}: stale tensor left_over: not in the index",)


def test_stale_copy_in_another_shard(sharded: Path) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.update({"embed.weight": torch.zeros(2)}))
    assert problems_of(sharded) == (
        f"{SHARD}: stale tensor embed.weight: the index puts it in model-00001-of-00003.safetensors",
    )


def test_stale_file_outside_the_index(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "old.safetensors")
    assert problems_of(sharded) == ("old.safetensors: stale file outside the index; remove it",)


def test_single_file_beside_an_index_is_stale(sharded: Path, tiny_single: Path) -> None:
    (sharded / "model.safetensors").symlink_to(tiny_single / "model.safetensors")
    assert problems_of(sharded) == ("model.safetensors: stale file outside the index; remove it",)


def test_shape_dtype_unknown_missing_in_one_error(single: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.2.attn.q_norm.weight"] = torch.zeros(65, dtype=torch.bfloat16)
        tensors["layers.2.ffn_norm.weight"] = torch.zeros(256)
        tensors["layers.2.attn.bias"] = torch.zeros(1)
        tensors["layers.2.hc_attn_norm.weight"] = torch.zeros(1)
        tensors["other"] = torch.zeros(1)
        del tensors["mtp.1.attn.attn_sink"]

    rewrite(single / "model.safetensors", change)
    file = "model.safetensors"
    assert set(problems_of(single)) == {
        f"{file}: layers.2.attn.q_norm.weight has shape [65], expected [64] (module layers.2.attn)",
        f"{file}: layers.2.ffn_norm.weight has dtype F32, expected BF16 (module layers.2)",
        f"{file}: unknown tensor layers.2.attn.bias (module layers.2.attn)",
        f"{file}: unknown tensor layers.2.hc_attn_norm.weight (the hyper-connection norm is folded into hc_*_fn; "
        "a separate one means another model version)",
        f"{file}: unknown tensor other (no module of this model)",
        "missing tensor mtp.1.attn.attn_sink (module mtp.1.attn)",
    }


def test_model_prefix_is_tolerated_and_ambiguity_is_not(single: Path) -> None:
    def add_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    rewrite(single / "model.safetensors", add_prefix)
    validate(single)
    assert "embed.weight" in Checkpoint.open(single).names
    rewrite(
        single / "model.safetensors",
        lambda tensors: tensors.update({"norm.weight": torch.zeros(256, dtype=torch.bfloat16)}),
    )
    assert problems_of(single) == ("norm.weight: present with and without the prefix 'model.'; keep one",)


def test_index_damage(sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({"embed.weight": "../evil.safetensors"}))
    assert any("expected a file name in the same folder" in problem for problem in problems_of(sharded))
    edit_index(sharded, lambda weight_map: weight_map.update({"embed.weight": "pytorch_model.bin"}))
    assert any("not a .safetensors file; refused" in problem for problem in problems_of(sharded))
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"head.weight": "x.safetensors", '))
    assert any(f"{INDEX}: 'head.weight' appears twice" in problem for problem in problems_of(sharded))
    (sharded / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="has no weight_map object"):
        Checkpoint.open(sharded)


def test_open_errors(tmp_path: Path, single: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Checkpoint.open(tmp_path / "empty")
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        Checkpoint.open(single)
    (single / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which can run code .* refused"):
        Checkpoint.open(single)
    config = (single / "config.json").read_text()
    (single / "config.json").write_text(config.rstrip()[:-1] + ', "dtype": "bfloat16"}')
    with pytest.raises(ConfigError, match="dtype: appears twice"):
        Checkpoint.open(single)


@given(cut=st.integers(1, 60_000), position=st.integers(0, 59_999), byte=st.integers(0, 255))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_header_byte_damage_is_typed(single: Path, cut: int, position: int, byte: int) -> None:
    """A changed header byte, or a cut anywhere, is reported or harmless; nothing else is ever raised."""
    file = single / "model.safetensors"
    good = file.read_bytes()
    places = dict(Checkpoint.open(single).index.tensors)
    try:
        file.write_bytes(good[:position] + bytes([byte]) + good[position + 1 :])
        refused = False
        try:
            validate(single)
        except CheckpointError:
            refused = True
        # what passes must be what was there: a byte of the metadata, or the same byte
        assert refused or dict(Checkpoint.open(single).index.tensors) == places
        file.write_bytes(good[:-cut])
        assert problems_of(single)
    finally:
        file.write_bytes(good)

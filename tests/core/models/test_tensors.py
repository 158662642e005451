from __future__ import annotations

from typing import Any

from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.models.deepseek_v41.weights import weight_groups


def test_released_counts(raw_release: dict[str, Any]) -> None:
    specs = expected_tensors(parse_config(raw_release))
    assert len(specs) == 96_085
    assert sum(spec.nbytes for spec in specs.values()) == 510_286_023_000


def test_tiny_counts(raw: dict[str, Any]) -> None:
    specs = expected_tensors(parse_config(raw))
    assert len(specs) == 860
    del raw["vision_config"]
    assert len(expected_tensors(parse_config(raw))) == 860 - 26


def test_released_shapes(raw_release: dict[str, Any]) -> None:
    specs = expected_tensors(parse_config(raw_release))
    for name, dtype, shape in [
        ("layers.5.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.5.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.39.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384_016_682, 8)),
        ("layers.14.engram.wkv.weight", "F8_E4M3", (25_600, 6_144)),
        ("layers.36.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15_360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("layers.0.hc_attn_fn", "F32", (24, 20_480)),
    ]:
        assert (specs[name].dtype, specs[name].shape) == (dtype, shape), name
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs
    assert specs["layers.5.attn.wo_a.scale"].module == "layers.5.attn"
    assert specs["layers.5.ffn.experts.7.w1.weight"].module == "layers.5.ffn.experts.7"


def test_only_the_grouped_output_linear_meets_plain_rows(raw_release: dict[str, Any]) -> None:
    groups = weight_groups(parse_config(raw_release)).values()
    plain = {group.name for group in groups if group.plain_rows}
    assert plain == {f"layers.{layer}.wo_a" for layer in range(40)} | {f"mtp.{stage}.wo_a" for stage in range(3)}

"""Every tensor of a released checkpoint: name, dtype, shape and owning module (spec/model 5, appendix D)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepinfer.checkpoint.tensor_spec import TensorSpec
from deepinfer.models.deepseek_v41.config import ModelConfig, VisionConfig
from deepinfer.models.deepseek_v41.topology import LayerRole, Topology

__all__ = ["expected_tensors"]

BLOCK = 32
"""Edge of an FP8 weight tile, and length of an FP4 or Engram scale group."""


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors that a checkpoint of `config` holds, in file order; vision tensors only with `config.vision`."""
    specs = [*_globals(config)]
    for role in Topology.from_config(config).layers:
        specs += _block(config, f"layers.{role.layer}", config.n_routed_experts)
        specs += _layer_extras(config, role)
    for stage in range(config.num_nextn_predict_layers):
        specs += _block(config, f"mtp.{stage}", config.dspark_n_routed_experts)
        specs += _stage_extras(config, stage)
    if config.vision is not None:
        specs += _vision(config, config.vision)
    return {spec.name: spec for spec in specs}


def _bf16(module: str, name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{module}.{name}", "BF16", shape, module)


def _f32(module: str, name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{module}.{name}", "F32", shape, module)


def _fp8(module: str, name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.{name}.weight", "F8_E4M3", (rows, columns), module)
    scales = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    yield TensorSpec(f"{module}.{name}.scale", "F8_E8M0", scales, module)


def _fp4(module: str, name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.{name}.weight", "I8", (rows, columns // 2), module)
    yield TensorSpec(f"{module}.{name}.scale", "F8_E8M0", (rows, columns // BLOCK), module)


def _globals(config: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", "BF16", (config.vocab_size, config.hidden_size), "embed")
    yield TensorSpec("head.weight", "BF16", (config.vocab_size, config.hidden_size), "head")
    yield TensorSpec("norm.weight", "BF16", (config.hidden_size,), "norm")


def _block(config: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    """The 30 + 6 E tensors that any backbone layer or draft stage has."""
    d, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    rank, inter = config.q_lora_rank, config.moe_intermediate_size
    out_rank = config.o_groups * config.o_lora_rank
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    yield _bf16(prefix, "attn_norm.weight", d)
    yield _bf16(prefix, "ffn_norm.weight", d)
    yield _f32(attn, "attn_sink", heads)
    yield _bf16(attn, "q_norm.weight", rank)
    yield _bf16(attn, "kv_norm.weight", head_dim)
    yield from _fp8(attn, "wq_a", rank, d)
    yield from _fp8(attn, "wq_b", heads * head_dim, rank)
    yield from _fp8(attn, "wkv", head_dim, d)
    yield from _fp8(attn, "wo_a", out_rank, heads * head_dim // config.o_groups)
    yield from _fp8(attn, "wo_b", d, out_rank)
    mixes = (2 + config.hc_mult) * config.hc_mult
    for sublayer in ("attn", "ffn"):
        yield _f32(prefix, f"hc_{sublayer}_fn", mixes, config.hc_mult * d)
        yield _f32(prefix, f"hc_{sublayer}_base", mixes)
        yield _f32(prefix, f"hc_{sublayer}_scale", 3)
    yield _bf16(ffn, "gate.weight", experts, d)
    yield _f32(ffn, "gate.bias", experts)
    yield _f32(ffn, "gate.bias_vl", experts)
    shared = f"{ffn}.shared_experts"
    yield from _fp8(shared, "w1", inter, d)
    yield from _fp8(shared, "w2", d, inter)
    yield from _fp8(shared, "w3", inter, d)
    for expert in range(experts):
        module = f"{ffn}.experts.{expert}"
        yield from _fp4(module, "w1", inter, d)
        yield from _fp4(module, "w2", d, inter)
        yield from _fp4(module, "w3", inter, d)


def _layer_extras(config: ModelConfig, role: LayerRole) -> Iterator[TensorSpec]:
    """Tensors that depend on the layer's role."""
    d, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    compressor, indexer = f"layers.{role.layer}.attn.compressor", f"layers.{role.layer}.attn.indexer"
    if role.is_kv_source:
        yield _bf16(compressor, "wkv.weight", head_dim, d)
        if role.ratio > 1:
            yield _bf16(compressor, "wgate.weight", head_dim, d)
        yield _bf16(compressor, "norm.weight", head_dim)
        yield _bf16(indexer, "wk.weight", index_dim, head_dim)
        yield _bf16(indexer, "k_norm.weight", index_dim)
    if role.is_index_source:
        yield from _fp8(indexer, "wq_b", config.index_n_heads * index_dim, config.q_lora_rank)
        yield _bf16(indexer, "weights_proj.weight", config.index_n_heads, d)
    if role.has_engram:
        yield from _engram(config, role.layer)


def _engram(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    module, d, width = f"layers.{layer}.engram", config.hidden_size, config.engram_head_dim
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    yield TensorSpec(f"{module}.embed.weight", "F8_E4M3", (rows, width), module)
    yield TensorSpec(f"{module}.embed.scale", "F8_E8M0", (rows, width // BLOCK), module)
    yield from _fp8(module, "wkv", d * (config.hc_mult + 1), config.num_engram_columns * width)
    yield _bf16(module, "q_weight", config.hc_mult, d)
    yield _bf16(module, "k_weight", config.hc_mult, d)


def _stage_extras(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """What the first and the last draft stage hold besides their block."""
    d, rank, module = config.hidden_size, config.dspark_markov_rank, f"mtp.{stage}"
    if stage == 0:
        yield from _fp8(module, "main_proj", d, len(config.dspark_target_layer_ids) * d)
        yield _bf16(module, "main_norm.weight", d)
    if stage == config.num_nextn_predict_layers - 1:
        yield _bf16(module, "norm.weight", d)
        yield _bf16(module, "markov_head.embed.weight", config.vocab_size, rank)
        yield _bf16(module, "markov_head.head.weight", config.vocab_size, rank)
        yield _bf16(module, "confidence_head.proj.weight", 1, d + rank)


def _vision(config: ModelConfig, vision: VisionConfig) -> Iterator[TensorSpec]:
    d, width, inter = config.hidden_size, vision.hidden_size, vision.intermediate_size
    for name in ("image_start", "image_end", "image_newline"):
        yield TensorSpec(name, "BF16", (d,), "image_tokens")
    yield _bf16("aligner", "w1.weight", d, width * vision.downsample_ratio**2)
    yield _bf16("aligner", "w1.bias", d)
    yield _bf16("aligner", "w2.weight", d, d)
    yield _bf16("aligner", "w2.bias", d)
    yield _bf16("vision", "patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield _bf16("vision", "patch_embed.proj.bias", width)
    yield _bf16("vision", "norm.weight", width)
    for block in range(vision.num_hidden_layers):
        module = f"vision.blocks.{block}"
        yield _bf16(module, "norm1.weight", width)
        yield _bf16(module, "norm2.weight", width)
        yield _bf16(module, "attn.wqkv.weight", 3 * width, width)
        yield _bf16(module, "attn.wqkv.bias", 3 * width)
        yield _bf16(module, "attn.wo.weight", width, width)
        yield _bf16(module, "attn.wo.bias", width)
        yield _bf16(module, "mlp.w1.weight", 2 * inter, width)
        yield _bf16(module, "mlp.w2.weight", width, inter)

"""Rules between fields of a model config (spec/model 1.7): each breach is a ConfigError naming the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.engram_primes import engram_primes, engram_row_counts

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import ModelConfig

__all__ = ["check_rules"]


def check_rules(config: ModelConfig) -> None:
    """Check every rule of spec/model 1.7 that needs the config alone.

    Rule 7's last clause, the size of the derived token map, needs the tokenizer: see `engram_map`.
    """
    _check_tokens(config)
    _check_widths(config)
    _check_ratios(config)
    _check_sources(config)
    _check_candidates(config)
    _check_experts(config)
    _check_engram(config)
    _check_draft(config)


def _fail(field: str, message: str) -> NoReturn:
    raise ConfigError(message, field=f"text_config.{field}")


def _check_tokens(config: ModelConfig) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(config, name)
        if value >= config.vocab_size:
            raise ConfigError(
                f"{value} is outside the vocabulary; it must be < vocab_size {config.vocab_size}", field=name
            )
    for name in ("engram_pad_token_id", "dspark_noise_token_id"):
        value = getattr(config, name)
        if value >= config.vocab_size:
            _fail(name, f"{value} is outside the vocabulary; it must be < vocab_size {config.vocab_size}")
    if config.engram_compressed_vocab_size > config.vocab_size:
        _fail(
            "engram_compressed_vocab_size",
            f"{config.engram_compressed_vocab_size} exceeds vocab_size {config.vocab_size}",
        )


def _check_widths(config: ModelConfig) -> None:
    if config.num_attention_heads % config.o_groups:
        _fail("o_groups", f"{config.o_groups} must divide num_attention_heads {config.num_attention_heads}")
    limit = min(config.head_dim, config.index_head_dim)
    if config.qk_rope_head_dim > limit:
        _fail("qk_rope_head_dim", f"{config.qk_rope_head_dim} must be <= min(head_dim, index_head_dim) = {limit}")


def _check_ratios(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    expected = layers + config.num_nextn_predict_layers
    if len(ratios) != expected:
        _fail(
            "compress_ratios", f"{len(ratios)} entries; num_hidden_layers + num_nextn_predict_layers needs {expected}"
        )
    for layer in range(layers, expected):
        if ratios[layer]:
            _fail(f"compress_ratios[{layer}]", f"{ratios[layer]} belongs to a draft stage and must be 0")
    compressed = [layer for layer in range(layers) if ratios[layer]]
    if compressed:
        for layer in range(compressed[0], layers):
            if not ratios[layer]:
                _fail(
                    f"compress_ratios[{layer}]",
                    f"0 after layer {compressed[0]}: layers of ratio 0 may only precede the first key source",
                )


def _check_ascending(config: ModelConfig, name: str) -> None:
    ids = getattr(config, name)
    if list(ids) != sorted(set(ids)):
        _fail(name, f"{list(ids)} must be strictly ascending")
    if ids and ids[-1] >= config.num_hidden_layers:
        _fail(name, f"layer {ids[-1]} does not exist; num_hidden_layers is {config.num_hidden_layers}")


def _check_sources(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_ascending(config, name)
        for layer in getattr(config, name):
            if not ratios[layer]:
                _fail(name, f"layer {layer} has compress_ratios 0; a source needs ratio 1 or 2")
    kv_sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    missing = sorted(set(kv_sources) - set(index_sources))
    if missing:
        _fail("index_source_layer_ids", f"{list(index_sources)} lacks the key sources {missing}")
    first = next((layer for layer in range(layers) if ratios[layer]), None)
    if first is None:
        return
    if not kv_sources or kv_sources[0] != first:
        _fail("kv_source_layer_ids", f"{list(kv_sources)} must begin with {first}, the first layer of ratio > 0")
    source = first
    for layer in range(first, layers):
        source = layer if layer in kv_sources else source
        if ratios[layer] != ratios[source]:
            what = (
                "is the boundary and must be its own key source"
                if layer == config.boundary
                else f"has ratio {ratios[layer]} but reads the keys of layer {source} with ratio {ratios[source]}"
            )
            _fail("kv_source_layer_ids", f"{list(kv_sources)}: layer {layer} {what}")
    if config.boundary < layers and config.boundary not in kv_sources:
        _fail(
            "kv_source_layer_ids",
            f"{list(kv_sources)}: layer {config.boundary} is the boundary and must be its own key source",
        )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    if source not in config.kv_source_layer_ids or source not in config.index_source_layer_ids:
        _fail("candidate_source_layer_id", f"{source} must be in kv_source_layer_ids and index_source_layer_ids")
    if config.candidate_topk_blocks < 8 or config.candidate_topk_blocks % 8:
        _fail("candidate_topk_blocks", f"{config.candidate_topk_blocks} must be a positive multiple of 8")
    if config.candidate_block_size < 1:
        _fail("candidate_block_size", f"{config.candidate_block_size} must be in 1..16")
    capacity = config.candidate_topk_blocks * config.candidate_block_size
    if capacity < config.index_topk:
        _fail(
            "candidate_topk_blocks",
            f"{config.candidate_topk_blocks} x candidate_block_size {config.candidate_block_size} = {capacity} "
            f"must be >= index_topk {config.index_topk}",
        )
    for layer in range(source, config.num_hidden_layers):
        if config.compress_ratios[layer] != config.compress_ratios[source]:
            _fail(
                "candidate_source_layer_id",
                f"{source}: layer {layer} has ratio {config.compress_ratios[layer]}, the source has "
                f"{config.compress_ratios[source]}; all layers from the source on need one ratio",
            )


def _check_experts(config: ModelConfig) -> None:
    for chosen, total in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        if getattr(config, chosen) > getattr(config, total):
            _fail(chosen, f"{getattr(config, chosen)} must be <= {total} {getattr(config, total)}")


def _check_engram(config: ModelConfig) -> None:
    layers, rows = config.engram_layer_ids, config.engram_num_embeddings
    if len(layers) != len(rows):
        _fail("engram_num_embeddings", f"{len(rows)} entries for {len(layers)} engram_layer_ids")
    if len(set(layers)) != len(layers):
        _fail("engram_layer_ids", f"{list(layers)} names a layer twice")
    late = [layer for layer in layers if layer >= config.boundary]
    if late:
        _fail("engram_layer_ids", f"{late} must be < {config.boundary}, the first layer of ratio 1")
    primes = engram_primes(config.engram_vocab_size, config.engram_max_ngram_size, config.engram_n_heads, len(layers))
    expected = engram_row_counts(primes)
    if rows != expected:
        _fail(
            "engram_num_embeddings",
            f"{list(rows)}; the bucket primes above engram_vocab_size {config.engram_vocab_size} sum to "
            f"{list(expected)}",
        )


def _check_draft(config: ModelConfig) -> None:
    _check_ascending(config, "dspark_target_layer_ids")
    targets = config.dspark_target_layer_ids
    if config.num_nextn_predict_layers and not targets:
        _fail("dspark_target_layer_ids", "[] names no layer; the draft stages need at least one")
    if len({layer >= config.boundary for layer in targets}) > 1:
        _fail(
            "dspark_target_layer_ids",
            f"{list(targets)} straddles layer {config.boundary}; all must be on one side of it",
        )

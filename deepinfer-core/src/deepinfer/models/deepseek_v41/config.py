"""Model configuration: the nested `config.json` of a checkpoint as one validated dataclass (spec/model 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.json_files import read_json_object
from deepinfer.models.deepseek_v41 import config_fields as fields
from deepinfer.models.deepseek_v41.config_rules import check_rules
from deepinfer.models.deepseek_v41.config_spelling import normalise_spelling

__all__ = ["ModelConfig", "RopeScaling", "VisionConfig", "load_config", "parse_config"]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed keys (spec/model 3.3)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower (spec/model 1.4)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True)
class ModelConfig:
    """A valid DeepSeek-V4.1 configuration; field names are those of `text_config` and of the top level.

    `compress_ratios` has one entry per backbone layer and one (0) per draft stage. `candidate_source_layer_id` is
    None where level-one selection is off; `rope_scaling` is None where frequencies are plain.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    compress_rope_theta: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    use_fp4_sparse_kv: bool
    vision: VisionConfig | None

    @property
    def boundary(self) -> int:
        """First layer of the consumer half: the first of ratio 1, or `num_hidden_layers` if there is none."""
        backbone = self.compress_ratios[: self.num_hidden_layers]
        return backbone.index(1) if 1 in backbone else self.num_hidden_layers

    @property
    def num_engram_columns(self) -> int:
        """Table rows looked up per token and layer: (max n-gram - 1) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn the parsed `config.json` into a `ModelConfig`.

    Raises:
        ConfigError: a field is missing, unknown, contradictory or breaks a rule of spec/model 1.1-1.7; `.field` is
            its dotted path.
    """
    top = normalise_spelling(raw)
    fields.check_known(top, fields.TOP_LEVEL, "")
    fields.check_fixed(top, fields.TOP_LEVEL, "")
    quantization = fields.section(top, "quantization_config")
    fields.check_known(quantization, fields.QUANTIZATION, "quantization_config.")
    fields.check_fixed(quantization, fields.QUANTIZATION, "quantization_config.")
    text = fields.section(top, "text_config")
    fields.check_known(text, fields.TEXT, "text_config.")
    fields.check_fixed(text, fields.TEXT, "text_config.")

    values = fields.read_values(text, fields.TEXT, "text_config.")
    values |= fields.read_values(top, fields.TOP_LEVEL, "")
    if "rope_scaling" not in text:
        raise ConfigError(
            "missing; give the yarn parameters, or null for plain frequencies", field="text_config.rope_scaling"
        )
    values["rope_scaling"] = _rope_scaling(text["rope_scaling"])
    values["vision"] = _vision(top)
    index_k_sources = values.pop("index_k_source_layer_ids")
    if values["candidate_source_layer_id"] == -1:
        values["candidate_source_layer_id"] = None
    config = ModelConfig(**values)
    if index_k_sources is not None and index_k_sources != config.kv_source_layer_ids:
        raise ConfigError(
            f"{list(index_k_sources)} differs from kv_source_layer_ids {list(config.kv_source_layer_ids)}; "
            "index keys of layers without compressed keys of their own are not supported: drop the key",
            field="text_config.index_k_source_layer_ids",
        )
    check_rules(config)
    return config


def _rope_scaling(raw: Any) -> RopeScaling | None:
    prefix = "text_config.rope_scaling."
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{raw!r} is not an object", field=prefix[:-1])
    fields.check_known(raw, fields.ROPE_SCALING, prefix)
    fields.check_fixed(raw, fields.ROPE_SCALING, prefix)
    return RopeScaling(**fields.read_values(raw, fields.ROPE_SCALING, prefix))


def _vision(top: Mapping[str, Any]) -> VisionConfig | None:
    if top.get("vision_config") is None:
        return None
    raw = fields.section(top, "vision_config")
    prefix = "vision_config."
    fields.check_known(raw, fields.VISION, prefix)
    fields.check_fixed(raw, fields.VISION, prefix)
    vision = VisionConfig(**fields.read_values(raw, fields.VISION, prefix))
    if vision.hidden_size % (4 * vision.num_attention_heads):
        raise ConfigError(
            f"{vision.hidden_size} divided by num_attention_heads {vision.num_attention_heads} must be a multiple of 4",
            field="vision_config.hidden_size",
        )
    return vision


def load_config(path: str | Path) -> ModelConfig:
    """Read `config.json` of the checkpoint folder (or the file itself) at `path`.

    Raises:
        CheckpointError: there is no readable JSON object.
        ConfigError: see `parse_config`, or a key appears twice.
    """
    file = Path(path)
    raw, duplicates = read_json_object(file / "config.json" if file.is_dir() else file)
    if duplicates:
        raise ConfigError("appears twice in the file; keep one", field=duplicates[0])
    return parse_config(raw)

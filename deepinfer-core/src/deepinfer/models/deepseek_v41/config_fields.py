"""Which fields a `config.json` may hold, of what type and range (tables of spec/model 1.1-1.4)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

__all__ = [
    "QUANTIZATION",
    "ROPE_SCALING",
    "TEXT",
    "TOP_LEVEL",
    "VISION",
    "Field",
    "check_fixed",
    "check_known",
    "read_values",
    "section",
]

_REQUIRED = object()
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Field:
    """One config key: `kind` is int, float, bool, ints, fixed (one allowed value, absent if optional) or ignored."""

    kind: str
    default: Any = _REQUIRED
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    multiple: int = 1
    allowed: tuple[Any, ...] = ()

    @property
    def required(self) -> bool:
        """True where absence is an error."""
        return self.default is _REQUIRED


def _positive(multiple: int = 1, **extra: Any) -> Field:
    return Field("int", minimum=1, multiple=multiple, **extra)


def _fixed(*allowed: Any, optional: bool = False) -> Field:
    return Field("fixed", default=None if optional else _REQUIRED, allowed=allowed)


_TOKEN = Field("int", minimum=0)
_RATE = Field("float", above=0)
_IGNORED = Field("ignored", default=None)
_SECTION = Field("section", default=None)

TOP_LEVEL: dict[str, Field] = {
    "architectures": _fixed(["DeepseekV41ForCausalLM"]),
    "model_type": _fixed("deepseek_v41"),
    "transformers_version": _IGNORED,
    "_name_or_path": _IGNORED,
    "dtype": _fixed("bfloat16"),
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "image_token_id": _TOKEN,
    "tie_word_embeddings": _fixed(False, optional=True),
    "quantization_config": _SECTION,
    "text_config": _SECTION,
    "vision_config": _SECTION,
}

QUANTIZATION: dict[str, Field] = {
    "quant_method": _fixed("fp8"),
    "activation_scheme": _fixed("dynamic"),
    "weight_block_size": _fixed([32, 32]),
    "scale_fmt": _fixed("ue8m0"),
    "expert_dtype": _fixed("fp4"),
    "fmt": _fixed("e4m3", optional=True),
}

ROPE_SCALING: dict[str, Field] = {
    "rope_type": _fixed("yarn"),
    "factor": Field("float", minimum=1),
    "beta_fast": _RATE,
    "beta_slow": _RATE,
    "original_max_position_embeddings": _positive(),
}

TEXT: dict[str, Field] = {
    "model_type": _fixed("deepseek_v41_text", optional=True),
    "dtype": _fixed("bfloat16", optional=True),
    "vocab_size": _positive(),
    "hidden_size": _positive(32),
    "num_hidden_layers": _positive(),
    "num_attention_heads": _positive(),
    "num_key_value_heads": _fixed(1),
    "head_dim": _positive(32),
    "qk_rope_head_dim": _positive(2),
    "q_lora_rank": _positive(32),
    "o_groups": _positive(),
    "o_lora_rank": _positive(32),
    "hidden_act": _fixed("silu"),
    "swiglu_limit": _RATE,
    "rms_norm_eps": _RATE,
    "attention_bias": _fixed(False, optional=True),
    "attention_dropout": _fixed(0.0, optional=True),
    "initializer_range": _IGNORED,
    "use_cache": _IGNORED,
    "tie_word_embeddings": _fixed(False, optional=True),
    "max_position_embeddings": _positive(),
    "rope_theta": _RATE,
    "rope_scaling": _SECTION,
    "compress_rope_theta": _RATE,
    "sliding_window": _positive(),
    "compress_ratios": Field("ints", minimum=0, maximum=2),
    "kv_source_layer_ids": Field("ints", minimum=0),
    "index_source_layer_ids": Field("ints", minimum=0),
    "index_k_source_layer_ids": Field("ints", default=None, minimum=0),
    "index_n_heads": _positive(),
    "index_head_dim": _positive(32),
    "index_topk": _positive(),
    "candidate_source_layer_id": Field("int", default=None, minimum=-1),
    "candidate_topk_blocks": Field("int", default=0, minimum=0),
    "candidate_block_size": Field("int", default=0, minimum=0, maximum=16),
    "moe_intermediate_size": _positive(32),
    "n_routed_experts": _positive(),
    "n_shared_experts": _fixed(1),
    "num_experts_per_tok": _positive(),
    "scoring_func": _fixed("sqrtsoftplus"),
    "topk_method": _fixed("noaux_tc"),
    "norm_topk_prob": _fixed(True),
    "routed_scaling_factor": _RATE,
    "num_hash_layers": _fixed(0, optional=True),
    "hc_mult": Field("int", allowed=(4,)),
    "hc_sinkhorn_iters": _positive(),
    "hc_eps": Field("float", allowed=(1e-6,)),
    "hc_shifted": _fixed(True, optional=True),
    "engram_layer_ids": Field("ints", minimum=0),
    "engram_num_embeddings": Field("ints", minimum=1),
    "engram_max_ngram_size": Field("int", minimum=2),
    "engram_vocab_size": _positive(maximum=2**31),
    "engram_n_heads": _positive(),
    "engram_head_dim": _positive(32),
    "engram_pad_token_id": _TOKEN,
    "engram_compressed_vocab_size": _positive(),
    "num_nextn_predict_layers": Field("int", minimum=0),
    "dspark_block_size": _positive(),
    "dspark_noise_token_id": _TOKEN,
    "dspark_target_layer_ids": Field("ints", minimum=0),
    "dspark_target_attn_input": _fixed(True, optional=True),
    "dspark_markov_rank": _positive(),
    "dspark_n_routed_experts": _positive(),
    "dspark_num_experts_per_tok": _positive(),
    "use_fp4_sparse_kv": Field("bool", default=True),
    "gate_temp": _fixed(1.0, optional=True),
}

VISION: dict[str, Field] = {
    "model_type": _IGNORED,
    "dtype": _fixed("bfloat16", optional=True),
    "num_hidden_layers": _positive(),
    "hidden_size": _positive(),
    "num_attention_heads": _positive(),
    "intermediate_size": _positive(),
    "patch_size": _positive(),
    "rope_theta": _RATE,
    "downsample_ratio": _positive(),
    "max_image_tokens": _positive(),
    "min_pixels": _positive(),
    "max_wh_ratio": Field("float", default=None, above=0),
}


def section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under `name`; ConfigError if it is absent or something else."""
    value = raw.get(name)
    if value is None:
        raise ConfigError(
            f"missing; expected the nested layout with text_config and quantization_config (found keys "
            f"{sorted(raw)[:8]}); convert a flat inference config to the checkpoint's config.json",
            field=name,
        )
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is a {type(value).__name__}; expected an object", field=name)
    return value


def check_known(raw: Mapping[str, Any], table: Mapping[str, Field], prefix: str) -> None:
    """Refuse keys that `table` does not have, naming the nearest one that it has."""
    for key in raw:
        if key in table:
            continue
        near = difflib.get_close_matches(str(key), table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(table)}"
        raise ConfigError(f"unknown field (value {raw[key]!r}); {hint}", field=f"{prefix}{key}")


def check_fixed(raw: Mapping[str, Any], table: Mapping[str, Field], prefix: str) -> None:
    """Check the fields whose value this architecture fixes."""
    for key, field in table.items():
        if field.kind != "fixed":
            continue
        if raw.get(key) is None:
            if field.required:
                raise ConfigError(f"missing; the only allowed value is {field.allowed[0]!r}", field=prefix + key)
            continue
        value = raw[key]
        # bool is an int in Python: True must not pass for 1, nor 0 for False
        if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in field.allowed):
            raise ConfigError(
                f"{value!r} is not supported; the only allowed value is {field.allowed[0]!r}", field=prefix + key
            )


def read_values(raw: Mapping[str, Any], table: Mapping[str, Field], prefix: str) -> dict[str, Any]:
    """The checked values of all fields of `table` that carry a value (not fixed, ignored or sections)."""
    values: dict[str, Any] = {}
    for key, field in table.items():
        if field.kind in ("fixed", "ignored", "section"):
            continue
        value = raw.get(key)
        if value is None:
            if field.required:
                raise ConfigError(f"missing; it needs {_describe(field)} and has no default", field=prefix + key)
            values[key] = field.default
            continue
        values[key] = _convert(value, field, prefix + key)
    return values


def _convert(value: Any, field: Field, path: str) -> Any:
    if field.kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{value!r} is not true or false", field=path)
        return value
    if field.kind == "ints":
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{value!r} is not a list of integers", field=path)
        return tuple(_number(item, field, f"{path}[{index}]") for index, item in enumerate(value))
    return _number(value, field, path)


def _number(value: Any, field: Field, path: str) -> Any:
    integral = field.kind != "float"
    good_type = isinstance(value, int) or (not integral and isinstance(value, float) and math.isfinite(value))
    ok = good_type and not isinstance(value, bool) and abs(value) <= _INT64_MAX
    ok = ok and (field.minimum is None or value >= field.minimum)
    ok = ok and (field.maximum is None or value <= field.maximum)
    ok = ok and (field.above is None or value > field.above)
    ok = ok and (not integral or value % field.multiple == 0)
    ok = ok and (not field.allowed or value in field.allowed)
    if not ok:
        raise ConfigError(f"{value!r} is not allowed; it must be {_describe(field)}", field=path)
    return value if integral else float(value)


def _describe(field: Field) -> str:
    if field.allowed:
        return " or ".join(repr(value) for value in field.allowed)
    noun = {"int": "an integer", "float": "a finite number", "bool": "true or false", "ints": "integers"}[field.kind]
    parts = [noun]
    if field.multiple > 1:
        parts.append(f"that is a multiple of {field.multiple}")
    if field.minimum is not None:
        parts.append(f">= {field.minimum}")
    if field.above is not None:
        parts.append(f"> {field.above}")
    if field.maximum is not None:
        parts.append(f"<= {field.maximum}")
    return " ".join(parts)

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.presets import PRESETS, preset_config
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig, load_config, parse_config

REMOVE = object()


def changed(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(raw)
    *parents, last = path.split(".")
    target = result
    for name in parents:
        target = target[name]
    if value is REMOVE:
        del target[last]
    else:
        target[last] = value
    return result


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    config = parse_config(preset_config(preset))
    assert config.num_nextn_predict_layers == 3


def test_released_config(raw_release: dict[str, Any]) -> None:
    config = parse_config(raw_release)
    assert config.boundary == 20
    assert config.num_engram_columns == 24
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 16.0
    assert config.vision is not None
    assert config.vision.max_wh_ratio is None
    assert config.use_fp4_sparse_kv is True
    assert config.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0)


T, Q = "text_config.", "quantization_config."
BAD_VALUES = [
    # tables 1.1 and 1.2
    ("architectures", ["DeepseekV4ForCausalLM"], "architectures"),
    ("architectures", ["DeepseekV41ForCausalLM", "Other"], "architectures"),
    ("model_type", "deepseek_v4", "model_type"),
    ("dtype", "float16", "dtype"),
    ("bos_token_id", [0, 1], "bos_token_id"),
    ("eos_token_id", 512, "eos_token_id"),
    ("pad_token_id", -1, "pad_token_id"),
    ("image_token_id", 512, "image_token_id"),
    ("image_token_id", REMOVE, "image_token_id"),
    (Q + "quant_method", "awq", Q + "quant_method"),
    (Q + "activation_scheme", "static", Q + "activation_scheme"),
    (Q + "weight_block_size", [128, 128], Q + "weight_block_size"),
    (Q + "scale_fmt", "float", Q + "scale_fmt"),
    (Q + "expert_dtype", "fp8", Q + "expert_dtype"),
    (Q + "expert_dtype", REMOVE, Q + "expert_dtype"),
    (Q + "fmt", "e5m2", Q + "fmt"),
    ("quantization_config", REMOVE, "quantization_config"),
    ("text_config", REMOVE, "text_config"),
    ("text_config", [1], "text_config"),
    # table 1.3
    (T + "vocab_size", 0, T + "vocab_size"),
    (T + "vocab_size", True, T + "vocab_size"),
    (T + "hidden_size", 250, T + "hidden_size"),
    (T + "hidden_size", "256", T + "hidden_size"),
    (T + "hidden_size", 256.0, T + "hidden_size"),
    (T + "num_key_value_heads", 2, T + "num_key_value_heads"),
    (T + "num_key_value_heads", True, T + "num_key_value_heads"),
    (T + "head_dim", 48, T + "head_dim"),
    (T + "q_lora_rank", 40, T + "q_lora_rank"),
    (T + "o_lora_rank", 40, T + "o_lora_rank"),
    (T + "index_head_dim", 40, T + "index_head_dim"),
    (T + "moe_intermediate_size", 40, T + "moe_intermediate_size"),
    (T + "engram_head_dim", 40, T + "engram_head_dim"),
    (T + "hidden_act", "gelu", T + "hidden_act"),
    (T + "swiglu_limit", float("nan"), T + "swiglu_limit"),
    (T + "rms_norm_eps", -1e-6, T + "rms_norm_eps"),
    (T + "attention_bias", True, T + "attention_bias"),
    (T + "attention_dropout", 0.1, T + "attention_dropout"),
    (T + "tie_word_embeddings", True, T + "tie_word_embeddings"),
    (T + "n_shared_experts", 2, T + "n_shared_experts"),
    (T + "scoring_func", "sigmoid", T + "scoring_func"),
    (T + "topk_method", "greedy", T + "topk_method"),
    (T + "norm_topk_prob", False, T + "norm_topk_prob"),
    (T + "norm_topk_prob", 1, T + "norm_topk_prob"),
    (T + "num_hash_layers", 3, T + "num_hash_layers"),
    (T + "hc_mult", 2, T + "hc_mult"),
    (T + "hc_eps", 1e-5, T + "hc_eps"),
    (T + "hc_shifted", False, T + "hc_shifted"),
    (T + "gate_temp", 2.0, T + "gate_temp"),
    (T + "dspark_target_attn_input", False, T + "dspark_target_attn_input"),
    (T + "use_fp4_sparse_kv", "yes", T + "use_fp4_sparse_kv"),
    (T + "index_k_source_layer_ids", [1, 3], T + "index_k_source_layer_ids"),
    (T + "engram_max_ngram_size", 1, T + "engram_max_ngram_size"),
    (T + "rope_scaling.rope_type", "linear", T + "rope_scaling.rope_type"),
    (T + "rope_scaling.factor", 0.5, T + "rope_scaling.factor"),
    (T + "rope_scaling.mscale", 1.0, T + "rope_scaling.mscale"),
    (T + "rope_scaling", 16, T + "rope_scaling"),
    (T + "rope_scaling", REMOVE, T + "rope_scaling"),
    (T + "compress_ratios", REMOVE, T + "compress_ratios"),
    (T + "compress_ratios", "none", T + "compress_ratios"),
    (T + "engram_pad_token_id", 512, T + "engram_pad_token_id"),
    (T + "dspark_noise_token_id", 600, T + "dspark_noise_token_id"),
    # rules 1-3 of 1.7
    (T + "compress_ratios", [0, 2, 2, 2, 1, 1, 1, 1], T + "compress_ratios"),
    (T + "compress_ratios", [0, 4, 2, 2, 1, 1, 1, 1, 0, 0, 0], T + "compress_ratios[1]"),
    (T + "compress_ratios", [0, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0], T + "compress_ratios[9]"),
    (T + "compress_ratios", [0, 2, 0, 2, 1, 1, 1, 1, 0, 0, 0], T + "compress_ratios[2]"),
    (T + "kv_source_layer_ids", [0, 1, 3, 4], T + "kv_source_layer_ids"),
    (T + "kv_source_layer_ids", [3, 4], T + "kv_source_layer_ids"),
    (T + "kv_source_layer_ids", [3, 1, 4], T + "kv_source_layer_ids"),
    (T + "kv_source_layer_ids", [1, 3, 4, 9], T + "kv_source_layer_ids"),
    (T + "index_source_layer_ids", [1, 4, 6], T + "index_source_layer_ids"),
    (T + "index_source_layer_ids", [1, 1, 3, 4], T + "index_source_layer_ids"),
    # rule 4: the boundary owns its keys; a change of ratio inside a segment
    (T + "kv_source_layer_ids", [1, 3], T + "kv_source_layer_ids"),
    (T + "compress_ratios", [0, 2, 1, 2, 1, 1, 1, 1, 0, 0, 0], T + "kv_source_layer_ids"),
    # rule 5
    (T + "candidate_source_layer_id", 6, T + "candidate_source_layer_id"),
    (T + "candidate_source_layer_id", 3, T + "candidate_source_layer_id"),
    (T + "candidate_topk_blocks", 12, T + "candidate_topk_blocks"),
    (T + "candidate_topk_blocks", 0, T + "candidate_topk_blocks"),
    (T + "candidate_block_size", 17, T + "candidate_block_size"),
    (T + "candidate_block_size", 0, T + "candidate_block_size"),
    (T + "index_topk", 64, T + "candidate_topk_blocks"),
    # rule 6
    (T + "o_groups", 3, T + "o_groups"),
    (T + "qk_rope_head_dim", 15, T + "qk_rope_head_dim"),
    (T + "qk_rope_head_dim", 34, T + "qk_rope_head_dim"),
    # rule 7
    (T + "engram_layer_ids", [1], T + "engram_num_embeddings"),
    (T + "engram_layer_ids", [1, 1], T + "engram_layer_ids"),
    (T + "engram_layer_ids", [1, 4], T + "engram_layer_ids"),
    (T + "engram_num_embeddings", [6126, 6333], T + "engram_num_embeddings"),
    (T + "engram_compressed_vocab_size", 513, T + "engram_compressed_vocab_size"),
    # rule 8
    (T + "dspark_target_layer_ids", [3, 4, 5], T + "dspark_target_layer_ids"),
    (T + "dspark_target_layer_ids", [6, 5, 7], T + "dspark_target_layer_ids"),
    (T + "dspark_target_layer_ids", [], T + "dspark_target_layer_ids"),
    # counts
    (T + "num_experts_per_tok", 9, T + "num_experts_per_tok"),
    (T + "dspark_num_experts_per_tok", 5, T + "dspark_num_experts_per_tok"),
    # vision
    ("vision_config.num_attention_heads", 3, "vision_config.hidden_size"),
    ("vision_config.patch_size", 0, "vision_config.patch_size"),
    ("vision_config.dtype", "float16", "vision_config.dtype"),
]


@pytest.mark.parametrize(("path", "value", "field"), BAD_VALUES)
def test_bad_value_names_its_field(raw: dict[str, Any], path: str, value: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw, path, value))
    assert caught.value.field is not None
    assert caught.value.field.startswith(field)
    assert str(caught.value).startswith(caught.value.field)


def test_message_has_value_and_allowed(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size: 250 .* multiple of 32"):
        parse_config(changed(raw, "text_config.hidden_size", 250))
    with pytest.raises(ConfigError, match=r"quant_method: 'awq' .* allowed value is 'fp8'"):
        parse_config(changed(raw, "quantization_config.quant_method", "awq"))


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("text_config.num_hidden_layer", "num_hidden_layers"),
        ("text_config.slidingwindow", "sliding_window"),
        ("imagetoken_id", "image_token_id"),
        ("quantization_config.scale_format", "scale_fmt"),
    ],
)
def test_unknown_field_names_the_nearest(raw: dict[str, Any], path: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown field .*did you mean '{near}'") as caught:
        parse_config(changed(raw, path, 1))
    assert caught.value.field == path


@pytest.mark.parametrize("absent", ["absent", None, -1])
def test_candidates_can_be_off(raw: dict[str, Any], absent: Any) -> None:
    text = raw["text_config"]
    for name in ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"):
        del text[name]
    if absent != "absent":
        text["candidate_source_layer_id"] = absent
    assert parse_config(raw).candidate_source_layer_id is None


def test_optional_keys(raw: dict[str, Any]) -> None:
    text = raw["text_config"]
    text.update(
        hc_shifted=True,
        use_fp4_sparse_kv=False,
        index_k_source_layer_ids=[1, 3, 4],
        dspark_target_attn_input=True,
        num_hash_layers=0,
        gate_temp=1.0,
    )
    raw["quantization_config"]["fmt"] = "e4m3"
    del raw["vision_config"]
    config = parse_config(raw)
    assert config.use_fp4_sparse_kv is False
    assert config.vision is None


def test_plain_frequencies_are_said_not_assumed(raw: dict[str, Any]) -> None:
    raw["text_config"]["rope_scaling"] = None
    assert parse_config(raw).rope_scaling is None
    newer = newer_spelling(raw | {"text_config": {**raw["text_config"], "rope_scaling": {"rope_type": "default"}}})
    assert parse_config(newer).rope_scaling is None


def test_flat_inference_config_gets_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="flat inference config"):
        parse_config({"dim": 5120, "n_layers": 40})


# Spellings (bug H7)


def newer_spelling(raw: dict[str, Any], *, rates_as_list: bool = False, nested_rope: bool = False) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    text = raw["text_config"]
    ratios = text.pop("compress_ratios")[: text["num_hidden_layers"]]
    names = {0: "sliding_attention", 1: "full_selected_attention", 2: "compressed_sparse_attention"}
    text["layer_types"] = [names[ratio] for ratio in ratios]
    text["compress_rates"] = ratios if rates_as_list else {names[1]: 1, names[2]: 2}
    scaling = text.pop("rope_scaling")
    if nested_rope:
        text["rope_parameters"] = {
            "main": {"rope_type": "default", "rope_theta": text.pop("rope_theta"), "partial_rotary_factor": 0.25},
            "compress": {**scaling, "rope_theta": text.pop("compress_rope_theta"), "partial_rotary_factor": 0.25},
        }
        text["mlp_layer_types"] = ["moe"] * len(ratios)
    else:
        text["rope_parameters"] = {**scaling, "rope_theta": text.pop("rope_theta")}
    return raw


def test_three_spellings_parse_equal(raw: dict[str, Any]) -> None:
    expected = parse_config(raw)
    older = copy.deepcopy(raw)
    older["text_config"]["rope_scaling"]["type"] = older["text_config"]["rope_scaling"].pop("rope_type")
    older["torch_dtype"] = older.pop("dtype")
    older["text_config"]["bos_token_id"] = 0
    assert parse_config(older) == expected
    assert parse_config(newer_spelling(raw)) == expected
    assert parse_config(newer_spelling(raw, rates_as_list=True, nested_rope=True)) == expected


def test_spelling_keeps_its_input(raw: dict[str, Any]) -> None:
    newer = newer_spelling(raw)
    before = copy.deepcopy(newer)
    parse_config(newer)
    assert newer == before


def test_a_ratio_is_never_made_up(raw: dict[str, Any]) -> None:
    newer = newer_spelling(raw)
    newer["text_config"]["layer_types"][3] = "heavily_compressed_attention"
    with pytest.raises(ConfigError, match=r"layer_types\[3\]: 'heavily_compressed_attention' has no rate"):
        parse_config(newer)
    for name in ("layer_types", "compress_rates"):
        with pytest.raises(ConfigError, match="given without"):
            parse_config(changed(newer_spelling(raw), f"text_config.{name}", REMOVE))


def test_contradictions_name_both(raw: dict[str, Any]) -> None:
    both = newer_spelling(raw)
    both["text_config"]["compress_ratios"] = [0, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"layer_types: .* contradicts compress_ratios"):
        parse_config(both)
    both = newer_spelling(raw)
    both["text_config"]["rope_scaling"] = {**raw["text_config"]["rope_scaling"], "factor": 4}
    with pytest.raises(ConfigError, match=r"rope_parameters: .* contradicts rope_scaling"):
        parse_config(both)
    raw["text_config"]["eos_token_id"] = 7
    with pytest.raises(ConfigError, match="eos_token_id: 7 contradicts eos_token_id = 1"):
        parse_config(raw)
    listed = newer_spelling(
        {**raw, "text_config": {k: v for k, v in raw["text_config"].items() if k != "eos_token_id"}}, rates_as_list=True
    )
    listed["text_config"]["compress_rates"][0] = 2
    with pytest.raises(ConfigError, match="contradicts rate 2"):
        parse_config(listed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partial_rotary_factor", 0.5),
        ("partial_rotary_factor", "x"),
        ("partial_rotary_factor", 0.3),
        ("mlp_layer_types", ["hash_moe", "moe"]),
    ],
)
def test_newer_keys_must_agree(raw: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw, f"text_config.{name}", value))
    assert caught.value.field == f"text_config.{name}"


def test_agreeing_duplicates_pass(raw: dict[str, Any]) -> None:
    expected = parse_config(raw)
    both = newer_spelling(raw)
    both["text_config"]["compress_ratios"] = list(expected.compress_ratios)
    assert parse_config(both) == expected
    types_only = copy.deepcopy(raw)
    types_only["text_config"]["layer_types"] = newer_spelling(raw)["text_config"]["layer_types"]
    assert parse_config(types_only) == expected
    types_only["text_config"]["layer_types"][1] = "sliding_attention"
    with pytest.raises(ConfigError, match=r"layer_types\[1\]"):
        parse_config(types_only)


# Files


def test_load_config_errors_are_typed(tmp_path: Path, raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    for content, message in (
        (b"{", "not readable JSON"),
        (b"[1]", "expected a JSON object"),
        (b"\xff\xfe", "not read"),
        (b"[" * 200_000, "not readable JSON"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load_config(tmp_path)
    file.write_text(json.dumps(raw)[:-1] + ', "dtype": "float16"}')
    with pytest.raises(ConfigError, match="dtype: appears twice"):
        load_config(tmp_path)
    file.write_text(json.dumps(raw))
    assert load_config(tmp_path) == load_config(file) == parse_config(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
TEXT_KEYS = st.sampled_from(
    [*preset_config("tiny")["text_config"], "layer_types", "compress_rates", "rope_parameters", "torch_dtype"]
)
TOP_KEYS = st.sampled_from(list(preset_config("tiny")))


@given(text_key=TEXT_KEYS, top_key=TOP_KEYS | st.none(), value=JSON)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_parses_or_raises_config_error(text_key: str, top_key: str | None, value: Any) -> None:
    raw = copy.deepcopy(preset_config("tiny"))
    if top_key is None:
        raw["text_config"][text_key] = value
    else:
        raw[top_key] = value
    failed_field: str | None = "none"
    try:
        assert isinstance(parse_config(raw), ModelConfig)
    except ConfigError as error:
        failed_field = error.field
    assert failed_field

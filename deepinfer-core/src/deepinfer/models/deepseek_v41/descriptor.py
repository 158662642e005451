"""Light half of the DeepSeek-V4.1 model family."""

from __future__ import annotations

from typing import Any

from deepinfer.api.descriptor import ModelDescriptor

__all__ = ["DEEPSEEK_V41", "deepinfer_register_models"]

DEEPSEEK_V41 = ModelDescriptor(
    name="deepseek_v41",
    api=(1, 0),
    module="deepinfer.models.deepseek_v41.spec:build",
    summary="DeepSeek-V4.1-Flash: CSA2 attention, Engram, MoE, DSpark drafter",
    architectures=("DeepseekV41ForCausalLM",),
    ops=(
        "attention_output",
        "commit_window",
        "compress_entries",
        "draft_block",
        "keep_rows",
        "take_rows",
        "draft_main_keys",
        "embedding",
        "engram_hash",
        "engram_inject",
        "hyper_connection_boundary",
        "hyper_connection_expand",
        "hyper_connection_head",
        "index_select",
        "lm_head",
        "moe_block",
        "qkv_project",
        "rope_angles",
        "sparse_attention",
        "stream_mean",
    ),
)


def deepinfer_register_models(registry: Any) -> None:
    """Offer the model family."""
    registry.add(DEEPSEEK_V41)

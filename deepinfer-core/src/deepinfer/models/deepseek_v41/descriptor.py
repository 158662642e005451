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
)


def deepinfer_register_models(registry: Any) -> None:
    """Offer the model family."""
    registry.add(DEEPSEEK_V41)

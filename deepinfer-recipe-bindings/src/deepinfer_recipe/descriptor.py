"""Descriptor of the DeepSeek-V4.1 codec: standard library and the light API only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer.api.descriptor import CodecDescriptor

MODEL_TYPES = ("deepseek_v41",)

CODEC = CodecDescriptor(
    name="deepseek-recipe",
    api=(1, 0),
    module="deepinfer_recipe.codec:RecipeCodec",
    summary="text and chats (chat, responses, messages) of DeepSeek-V4.1, over deepseek-recipe",
    model_types=MODEL_TYPES,
)


def deepinfer_register_codecs(registry: Any) -> None:
    """List the codec."""
    registry.add(CODEC)


def deepinfer_make_codec(model_dir: Path, model_type: str, tokenizer_json: Path, served_names: tuple[str, ...]) -> Any:
    """Build the codec for a V4.1 checkpoint; leave every other model to the next plugin."""
    if model_type not in MODEL_TYPES:
        return None
    from .codec import RecipeCodec

    return RecipeCodec(model_dir, tokenizer_json, served_names)

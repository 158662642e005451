"""Descriptor of the plain text codec, asked last: standard library and the light API only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer.api.descriptor import CodecDescriptor, hookimpl

CODEC = CodecDescriptor(
    name="plain-text",
    api=(1, 0),
    module="deepinfer_recipe.text:TextCodec",
    summary="text of any tokenizer.json; no chats",
)


def deepinfer_register_codecs(registry: Any) -> None:
    """List the codec."""
    registry.add(CODEC)


@hookimpl(trylast=True)
def deepinfer_make_codec(model_dir: Path, model_type: str, tokenizer_json: Path, served_names: tuple[str, ...]) -> Any:
    """Build a text codec for whatever model nobody else knows; a model without a tokenizer is served by ids alone."""
    if not tokenizer_json.exists():
        return None
    from .text import TextCodec

    return TextCodec(model_dir, tokenizer_json)

"""Text and protocol codec of DeepSeek-V4.1 for DeepInfer, and a plain text codec for every other tokenizer.

Names are imported on first use, so that the descriptors stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Codec": "chat",
    "CodecError": "errors",
    "Constraint": "chat",
    "DecodeStream": "detokenize",
    "EncodedChat": "chat",
    "OutputStream": "chat",
    "RecipeCodec": "codec",
    "Sampling": "chat",
    "StreamEvent": "chat",
    "TextCodec": "text",
    "ToolCallProblem": "chat",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

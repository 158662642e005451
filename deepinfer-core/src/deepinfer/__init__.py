"""DeepInfer: an inference engine for DeepSeek-V4.1-Flash on any accelerator."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.async_llm import AsyncLLM
    from deepinfer.engine.llm import LLM
    from deepinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
    from deepinfer.sampling.params import SamplingParams
    from deepinfer.sampling.structured import StructuredOutput

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncLLM": "deepinfer.engine.async_llm",
    "LLM": "deepinfer.engine.llm",
    "CompletionOutput": "deepinfer.engine.outputs",
    "Logprob": "deepinfer.engine.outputs",
    "RequestOutput": "deepinfer.engine.outputs",
    "ScoreOutput": "deepinfer.engine.outputs",
    "SamplingParams": "deepinfer.sampling.params",
    "StructuredOutput": "deepinfer.sampling.structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import deepinfer` stays light."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")

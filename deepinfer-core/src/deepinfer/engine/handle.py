"""What `LLM` and `AsyncLLM` say about their engine, wherever it runs."""

from __future__ import annotations

from typing import Any

from deepinfer.checkpoint.reader import ReadStats
from deepinfer.engine.front_end import FrontEnd
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.models.traits import ModelTraits

__all__ = ["EngineHandle"]


class EngineHandle:
    """Facts of an engine; they outlive it."""

    _front: FrontEnd

    @property
    def traits(self) -> ModelTraits:
        """What the engine knows of the model: vocabulary, special ids, context, page size."""
        return self._front.facts.traits

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._front.facts.max_model_len

    @property
    def numerics_id(self) -> str:
        """Names the numerics of everything bound; equal ids promise equal tokens for equal seeds."""
        return self._front.facts.numerics_id

    @property
    def memory_plan(self) -> MemoryPlan:
        """Every byte that the engine takes."""
        return self._front.facts.memory_plan

    @property
    def load_stats(self) -> ReadStats:
        """Bytes, seconds and GB/s of the checkpoint's reads."""
        return self._front.facts.load_stats

    def get_tokenizer(self) -> Any:
        """The codec: `encode_text(text) -> ids` and `decode(ids) -> text`; None if no plugin serves the model."""
        return self._front.codec

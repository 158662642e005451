"""An engine in this process: its model, its core and the facts that a front end needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.engine.build import build_engine
from deepinfer.engine.core import EngineCore
from deepinfer.engine.messages import EngineFacts

if TYPE_CHECKING:
    from deepinfer.engine.loader import LoadedModel
    from deepinfer.settings import Settings

__all__ = ["LocalEngine"]


@dataclass(frozen=True)
class LocalEngine:
    """What `LLM`, the thread of a loop and the process of a loop run.

    Attributes:
        core: the engine. codec: text to ids and back, None without one. facts: what a front end needs to know.
    """

    core: EngineCore
    codec: Any
    facts: EngineFacts

    @classmethod
    def build(cls, loaded: LoadedModel, settings: Settings, **options: Any) -> LocalEngine:
        """Allocate an engine for a model; options and errors as those of `build_engine`."""
        built = build_engine(loaded, settings, **options)
        facts = EngineFacts(
            traits=loaded.model.traits,
            max_model_len=built.max_model_len,
            numerics_id=loaded.numerics_id,
            replay_keep=settings.replay_keep,
            memory_plan=built.plan,
            load_stats=loaded.model.load_stats,
            path=None if loaded.path is None else str(loaded.path),
            served_name=loaded.served_name,
        )
        return cls(built.core, loaded.codec, facts)

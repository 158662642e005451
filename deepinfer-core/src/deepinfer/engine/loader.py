"""From a model's name to something that the engine can run: checkpoint, backend and model brought together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from deepinfer.models.traits import ModelTraits

if TYPE_CHECKING:
    from pathlib import Path

    from deepinfer.backend.backend import StepLimits
    from deepinfer.ops.metadata import StepInputs
    from deepinfer.settings import Settings

__all__ = ["LoadedModel", "ModelTraits", "ServedModel", "StepOps", "load_model", "numerics_id"]


class ForwardResult(Protocol):
    """What a forward pass leaves."""

    logits: Tensor


class DraftResult(Protocol):
    """What a draft pass leaves."""

    ids: Tensor
    confidences: Tensor


class StepOps(Protocol):
    """The part of a kernel table that the engine itself calls."""

    expand_plan: Any
    commit_step: Any
    sample_step: Any


class ServedModel(Protocol):
    """What the factory of a `ModelDescriptor` returns: `factory(path, backend, settings) -> ServedModel`.

    Attributes:
        traits: sizes and ids.
        table: the bound kernel table.
        device: of all its tensors.
    """

    traits: ModelTraits
    table: StepOps
    device: torch.device

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes of temporaries of the largest step."""

    def allocate_caches(self, num_pages: int, num_slots: int) -> Any:
        """The storage of pages and slots (page 0 and slot 0 included), all poisoned."""

    def forward(self, inputs: StepInputs, storage: Any) -> ForwardResult:
        """Run all rows; logits [S, V] of `inputs.last_rows`, undefined where that is -1."""

    def draft(self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: Any) -> DraftResult:
        """Propose tokens after the anchors (int64 [S]); positions (int64 [S]) of the last accepted rows."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: the model.
        path: directory of the checkpoint.
        codec: text to ids and back; None if no plugin serves it.
        numerics_id: name of the numerics of everything bound.
        budget: bytes of device memory that the engine may use, weights included; None: unlimited.
    """

    model: ServedModel
    path: Path | None = None
    codec: Any = None
    numerics_id: str = ""
    budget: int | None = None


def load_model(name: str, settings: Settings) -> LoadedModel:
    """Resolve a model, choose the backend, load the weights and build the codec.

    Args:
        name: directory, Hub id, or the name of a synthetic preset.
        settings: `settings.accelerator` chooses the backend.

    Raises:
        AcceleratorUnavailable, PluginError: no usable backend.
        CheckpointError, ConfigError: the checkpoint cannot be found or is not valid.
        CapabilityError, CapacityError: the backend cannot do it, or not in its memory.
    """
    from deepinfer.checkpoint import resolve_model
    from deepinfer.json_files import read_json_object
    from deepinfer.plugins.host import default_host, import_factory
    from deepinfer.plugins.selection import select_backend

    path = resolve_model(name, settings)
    config = read_json_object(path / "config.json")
    host = default_host()
    architecture = str(next(iter(config.get("architectures") or []), config.get("model_type", "")))
    entry = host.model_for(architecture)
    backend, _ = select_backend(settings.accelerator, host)
    budget = int(backend.runtime().memory_info().free * settings.memory_utilization)
    model: ServedModel = import_factory(entry)(path, backend, settings)
    codec = host.make_codec(path, str(config.get("model_type", "")), path / "tokenizer.json", (name,))
    return LoadedModel(model, path, codec, numerics_id(model, backend, settings), budget)


def numerics_id(model: ServedModel, backend: Any, settings: Settings) -> str:
    """A short name of everything that decides bits: equal ids promise equal bits (design 1).

    Backend and version, torch, compiler, device architecture, numerics settings and the bound ops.
    """
    bindings = getattr(model.table, "bindings", None)
    capabilities = backend.capabilities()
    facts: Mapping[str, object] = {
        "backend": [backend.name, backend.version],
        "torch": torch.__version__,
        "compiler": capabilities.compiler,
        "device": backend.runtime().fingerprint(),
        "numerics": settings.numerics().describe(),
        "ops": sorted([b.op, str(b.kind), b.backend] for b in bindings()) if bindings is not None else [],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{backend.name}-{digest[:16]}"

"""From a model's name to something that the engine can run: checkpoint, backend and model brought together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from deepinfer.models.traits import ModelTraits

if TYPE_CHECKING:
    from pathlib import Path

    from deepinfer.backend.backend import Backend, StepLimits
    from deepinfer.backend.runtime import DeviceRuntime
    from deepinfer.checkpoint.reader import ReadStats
    from deepinfer.ops.draft import Choose
    from deepinfer.ops.step import StepInputs
    from deepinfer.settings import Settings

__all__ = ["LoadedModel", "ServedModel", "StepOps", "load_codec", "load_model"]

_logger = logging.getLogger("deepinfer.engine")


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
    verify_coupled: Any
    copy_blocks: Any
    apply_filters: Any
    add_bias: Any
    apply_penalties: Any
    apply_token_mask: Any
    forbid_tokens: Any
    force_tokens: Any
    draft_step: Any
    judge_step: Any
    count_tokens: Any
    token_logprobs: Any

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes of the scratch buffer that all bound kernels share."""


class ServedModel(Protocol):
    """What the factory of a `ModelDescriptor` returns: `factory(path, backend, settings) -> ServedModel`.

    Attributes:
        traits: sizes and ids.
        table: the bound kernel table.
        device: of all its tensors.
        load_stats: what was read of the checkpoint, and how fast.
    """

    traits: ModelTraits
    table: StepOps
    device: torch.device
    load_stats: ReadStats

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes of temporaries of the largest step."""

    def allocate_caches(self, num_pages: int, num_slots: int) -> Any:
        """The storage of pages and slots (page 0 and slot 0 included), all poisoned."""

    def forward(self, inputs: StepInputs, storage: Any) -> ForwardResult:
        """Run all rows; logits [R, V] of `inputs.sample_rows`, undefined where that is -1."""

    def draft(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: Any, choose: Choose | None = None
    ) -> DraftResult:
        """Propose tokens after the anchors (int64 [S]); positions (int64 [S]) of the last accepted rows.

        `choose` takes each draft from its logits; without it the largest logit is taken.
        """


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: the model.
        path: directory of the checkpoint.
        codec: text to ids and back; None if no plugin serves it.
        numerics_id: name of the numerics of everything bound.
        budget: bytes of device memory that the engine may use, weights included; None: unlimited.
        backend, runtime: what runs it; None for a model that needs no workspace.
        served_name: what the codec calls the model.
    """

    model: ServedModel
    path: Path | None = None
    codec: Any = None
    numerics_id: str = ""
    budget: int | None = None
    backend: Backend | None = None
    runtime: DeviceRuntime | None = None
    served_name: str = ""


def load_model(name: str | Path | None, settings: Settings) -> LoadedModel:
    """Resolve a model, choose the backend, load the weights and build the codec.

    Args:
        name: directory, Hub id, or the name of a synthetic preset; None: `settings.hf_model_dir`, else the released
            model on the Hub.
        settings: `settings.accelerator` chooses the backend.

    Raises:
        AcceleratorUnavailable, PluginError: no usable backend.
        CheckpointError, ConfigError: the checkpoint cannot be found or is not valid.
        CapabilityError, CapacityError: the backend cannot do it, or not in its memory.
    """
    from deepinfer.backend.identity import numerics_id
    from deepinfer.backend.process import apply_process_settings
    from deepinfer.checkpoint import resolve_model
    from deepinfer.json_files import read_json_object
    from deepinfer.plugins.host import default_host, import_factory
    from deepinfer.plugins.selection import select_backend

    host = default_host()
    backend, _ = select_backend(settings.accelerator, host)
    path = resolve_model(name, settings)
    config, _ = read_json_object(path / "config.json")
    architectures = config.get("architectures") or ["(none)"]
    entry = host.model_for(str(architectures[0]))
    runtime = backend.runtime()
    wanted = dict(backend.process_settings(settings.numerics()))
    if settings.num_threads is not None:
        wanted["num_threads"] = settings.num_threads
    apply_process_settings(wanted, owner=f"an engine on {backend.name!r}")
    budget = int(runtime.memory_info().free * settings.memory_utilization)
    model = import_factory(entry)(path, backend, settings, host.load_backend)
    _logger.info("%s: read %s", path, model.load_stats)
    served_name = str(name or path.name)
    return LoadedModel(
        model,
        path=path,
        codec=load_codec(path, served_name),
        numerics_id=numerics_id(backend, runtime, model.table),
        budget=budget,
        backend=backend,
        runtime=runtime,
        served_name=served_name,
    )


def load_codec(path: Path, served_name: str) -> Any:
    """Text to ids and back for a checkpoint directory; None if no plugin serves the model. Loads nothing heavy.

    Raises:
        PluginError: a plugin that was asked failed.
        ConfigError, CheckpointError: config or tokenizer cannot be read.
    """
    from deepinfer.json_files import read_json_object
    from deepinfer.plugins.host import default_host

    config, _ = read_json_object(path / "config.json")
    tokenizer = path / "tokenizer.json"
    return default_host().make_codec(path, str(config.get("model_type", "")), tokenizer, (served_name,))

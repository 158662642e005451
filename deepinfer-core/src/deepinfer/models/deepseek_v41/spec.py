"""What the engine builds from a V4.1 checkpoint: config, layout, bound kernels and the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deepinfer.backend.backend import Backend, StepLimits
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.backend.numerics import Numerics
from deepinfer.cache.layout import CacheLayout, CacheStorage
from deepinfer.checkpoint import Checkpoint
from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig, parse_config
from deepinfer.models.deepseek_v41.graph import ForwardResult, Graph
from deepinfer.models.deepseek_v41.topology import Topology
from deepinfer.models.deepseek_v41.weights import load_weights
from deepinfer.models.traits import ModelTraits, number_of_drafts
from deepinfer.ops.draft import Choose, DraftResult
from deepinfer.ops.step import StepInputs

if TYPE_CHECKING:
    from deepinfer.settings import Settings

__all__ = ["GRAPH_OPS", "DeepseekV41", "build", "load"]

GRAPH_OPS = (
    "embedding",
    "rope_angles",
    "hyper_connection_expand",
    "hyper_connection_boundary",
    "hyper_connection_head",
    "lm_head",
    "engram_hash",
    "engram_inject",
    "qkv_project",
    "compress_entries",
    "index_select",
    "sparse_attention",
    "attention_output",
    "commit_window",
    "moe_block",
    "stream_mean",
    "draft_main_keys",
    "draft_block",
    "keep_rows",
    "take_rows",
)
"""Ops that the graph asks for by name; everything else is reached through them."""


class DeepseekV41:
    """A loaded V4.1 model on one device.

    Attributes:
        config, topology, numerics, layout: what was loaded and how it is cached.
        table: the bound kernel table. device: of all tensors. traits: what the engine needs to know.
        load_stats: bytes, seconds and GB/s of the checkpoint reads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: Backend,
        table: KernelTable,
        numerics: Numerics,
        *,
        page_size: int,
        max_draft: int | None = None,
        confidence_temperatures: tuple[float, ...] = (1.0,),
        replay: Literal["compact", "mask"] = "compact",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        block_size = config.dspark_block_size if config.num_nextn_predict_layers else 0
        max_draft = number_of_drafts(max_draft, block_size)
        if len(confidence_temperatures) not in (1, config.dspark_block_size):
            raise ConfigError(
                f"{len(confidence_temperatures)} temperatures are listed, the checkpoint drafts blocks of "
                f"{config.dspark_block_size}; give one number, or {config.dspark_block_size} of them",
                field="dflash_confidence_head_temperature",
            )
        self.config, self.numerics, self.table = config, numerics, table
        self.topology = Topology.from_config(config)
        self.device = backend.runtime().device
        self.layout = CacheLayout.build(config, self.topology, numerics, page_size, max_draft)
        self.weights = load_weights(
            checkpoint, config, self.topology, self.layout, backend, numerics, self.device, progress=progress
        )
        if self.weights.draft is not None:
            self.weights.draft.temperature[:] = torch.tensor(confidence_temperatures)
        self.load_stats = checkpoint.stats
        self.graph = Graph(config, self.weights, table, replay=replay)
        self.traits = ModelTraits(
            vocab_size=config.vocab_size,
            context=config.max_position_embeddings,
            eos_token_ids=frozenset({config.eos_token_id}),
            image_token_id=config.image_token_id if config.vision is not None else None,
            ngram_size=config.engram_max_ngram_size if config.engram_layer_ids else 1,
            max_drafts=max_draft,
            page_size=page_size,
            page_bytes=self.layout.page_bytes,
            slot_bytes=self.layout.slot_bytes,
            ring_length=self.layout.ring_length,
            weight_bytes=self.weights.device_bytes,
            layout_id=self.layout.layout_id,
            # A row at position p reads the ring from p - window + 1 on.
            resume_slack=self.layout.ring_length - config.sliding_window + 1,
        )

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes of temporaries of the largest step: streams, index scores and one attention block's keys."""
        from deepinfer.ops.attention import ATTENTION_ROW_BLOCK

        config, item = self.config, self.numerics.accumulate_dtype.itemsize
        keys = (config.sliding_window + config.index_topk) * config.head_dim
        attention = min(limits.rows, ATTENTION_ROW_BLOCK) * keys * 3 * item
        streams = 4 * limits.rows * config.hc_mult * config.hidden_size * item
        scores = limits.rows * limits.context * item * 3
        return attention + streams + scores + self.table.workspace_bytes(limits)

    def allocate_caches(self, num_pages: int, num_slots: int) -> CacheStorage:
        """Poisoned storage; page 0 and slot 0 are included and never handed out."""
        return CacheStorage.allocate(self.layout, num_pages, num_slots, self.device)

    def forward(self, inputs: StepInputs, storage: CacheStorage) -> ForwardResult:
        """Run all rows of a step; see `Graph.forward`."""
        return self.graph.forward(inputs, storage)

    def draft(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: CacheStorage, choose: Choose | None = None
    ) -> DraftResult:
        """Propose a block after each anchor; see `Graph.draft`."""
        return self.graph.draft(anchors, positions, slots, storage, choose)


def load(
    path: Path,
    backend: Backend,
    numerics: Numerics,
    *,
    page_size: int = 128,
    max_draft: int | None = None,
    confidence_temperatures: tuple[float, ...] = (1.0,),
    replay: Literal["compact", "mask"] = "compact",
    fallback: Any = "warn",
    overrides: str = "",
    resolve: Callable[[str], Backend] | None = None,
    progress: Callable[[int], None] | None = None,
) -> DeepseekV41:
    """Open, validate and load a checkpoint.

    Raises:
        ConfigError, CheckpointError: the checkpoint is not valid; nothing was read then.
        CapabilityError: the backend cannot do what the numerics or settings ask.
    """
    checkpoint = Checkpoint.open(path)
    config = parse_config(checkpoint.config)
    table = KernelTable.bind(
        all_contracts(), backend, numerics, fallback=fallback, overrides=overrides, resolve=resolve
    )
    with torch.no_grad():
        return DeepseekV41(
            checkpoint,
            config,
            backend,
            table,
            numerics,
            page_size=page_size,
            max_draft=max_draft,
            confidence_temperatures=confidence_temperatures,
            replay=replay,
            progress=progress,
        )


def build(
    path: Path, backend: Backend, settings: Settings, resolve: Callable[[str], Backend] | None = None
) -> DeepseekV41:
    """Factory of the model descriptor: load with the process's settings; `resolve` gives other backends by name."""
    model = load(
        path,
        backend,
        settings.numerics(),
        page_size=settings.page_size,
        max_draft=settings.use_nextn_decode,
        confidence_temperatures=settings.confidence_temperatures,
        replay="mask" if settings.yoco_prefill_truncation_mode == "mask" else "compact",
        fallback=settings.fallback,
        overrides=settings.ops,
        resolve=resolve,
    )
    if settings.yoco_prefill_truncation_mode != "off":
        _check_replay(model, settings)
    return model


def _check_replay(model: DeepseekV41, settings: Settings) -> None:
    """Decode rows must find a full window among the kept rows, also when rows past a boundary are taken back."""
    window, rows = model.config.sliding_window, model.traits.max_drafts + 1
    least = window + 2 * rows
    if settings.yoco_prefill_keep_tokens < least:
        raise ConfigError(
            f"{settings.yoco_prefill_keep_tokens} kept tokens are too few for DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE="
            f"{settings.yoco_prefill_truncation_mode}; use at least {least} (the window of {window} and "
            f"2 x {rows} rows that may be taken back)",
            field="yoco_prefill_keep_tokens",
        )

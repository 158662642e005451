"""The V4.1 graph: rows of one step through the layers, over a kernel table (spec/model 2.1, appendix A)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheStorage
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.weights import LayerWeights, ModelWeights
from deepinfer.ops.attention import Projected
from deepinfer.ops.compress import EntryCache
from deepinfer.ops.draft import Choose, DraftResult
from deepinfer.ops.handles import Mixes, Selection, accumulate_dtype
from deepinfer.ops.hyper_connection import initial_mixes
from deepinfer.ops.replay import clip_window
from deepinfer.ops.rope import plain_frequencies, yarn_frequencies
from deepinfer.ops.step import StepInputs

__all__ = ["ForwardResult", "Graph"]


@dataclass(frozen=True)
class ForwardResult:
    """What a forward pass leaves.

    Attributes:
        logits: [R, V] accumulate dtype, rows of `sample_rows`; undefined where that is -1.
        hidden: [R, d] normed rows that the head read.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(slots=True)
class _Stack:
    """What is handed from layer to layer within one step.

    Attributes:
        streams: [T, m, d] before the pending branch is spread over them; branch: [T, d] of the last sub-layer.
        mixes: of the last sub-layer. selection: newest published one. blocks: of the candidate source.
    """

    streams: Tensor
    branch: Tensor | None
    mixes: Mixes
    selection: Selection | None = None
    blocks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Angles:
    """cos and sin per row: plain (window-only layers), compressed layers at p, and per ratio at a group's start."""

    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    group_start: dict[int, tuple[Tensor, Tensor]]

    def of(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Angles of the queries of a layer of this ratio."""
        return self.compressed if ratio else self.plain


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that run and their angles."""

    step: StepInputs
    angles: _Angles


class Graph:
    """The text model bound to one kernel table; holds weights, no state.

    Args:
        config: of the checkpoint. weights: laid out by the table's backend. kernels: a bound `KernelTable`.
        replay: what steps with `keep_from` do in the consumer half, `compact` (only kept rows) or `mask` (all rows,
            same visibility).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Any,
        *,
        replay: Literal["compact", "mask"] = "compact",
    ) -> None:
        self.config, self.weights, self.replay = config, weights, replay
        device, self._dtype = weights.embedding.device, weights.embedding.dtype
        scaling = config.rope_scaling
        rotated = config.qk_rope_head_dim
        self._plain = plain_frequencies(rotated, config.rope_theta).to(device)
        self._compressed = (
            plain_frequencies(rotated, config.compress_rope_theta)
            if scaling is None
            else yarn_frequencies(
                rotated,
                config.compress_rope_theta,
                scaling.factor,
                scaling.beta_fast,
                scaling.beta_slow,
                scaling.original_max_position_embeddings,
            )
        ).to(device)
        self._ratios = sorted({layer.role.ratio for layer in weights.layers if layer.role.is_kv_source})
        # Bound once: a step looks nothing up by name.
        self._embedding, self._rope_angles = kernels.embedding, kernels.rope_angles
        self._expand, self._boundary = kernels.hyper_connection_expand, kernels.hyper_connection_boundary
        self._head, self._lm_head = kernels.hyper_connection_head, kernels.lm_head
        self._engram_hash, self._engram_inject = kernels.engram_hash, kernels.engram_inject
        self._project, self._compress = kernels.qkv_project, kernels.compress_entries
        self._index_select, self._attend = kernels.index_select, kernels.sparse_attention
        self._attention_output, self._commit_window = kernels.attention_output, kernels.commit_window
        self._moe, self._stream_mean = kernels.moe_block, kernels.stream_mean
        self._keep_rows, self._take_rows = kernels.keep_rows, kernels.take_rows
        self._draft_main_keys, self._draft_block = kernels.draft_main_keys, kernels.draft_block

    def forward(self, step: StepInputs, storage: CacheStorage) -> ForwardResult:
        """Run all rows of a step, fill caches and draft rings, and compute the logits of `sample_rows`.

        Args:
            step: rows, -1 for padding. storage: written in place.
        """
        rows = _Rows(step, self._angles(step.positions))
        stack = self._embed(step)
        features: list[Tensor] = []
        featured = rows
        for layer in self.weights.layers:
            rows = self._layer(layer, rows, storage, stack, features)
            featured = rows if layer.role.is_dspark_target else featured
        step = rows.step
        if self.weights.draft is not None:
            rings = storage.rings[len(self.weights.layers) :]
            main, angles = torch.cat(features, dim=-1), featured.angles.plain
            self._draft_main_keys(main, featured.step, rings, self.weights.draft, *angles)
        norm, eps = self.weights.norm, self.config.rms_norm_eps
        _, hidden = self._head(stack.streams, stack.branch, stack.mixes, step.sample_rows, norm, eps)
        return ForwardResult(self._lm_head(hidden, self.weights.head), hidden)

    def draft(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: CacheStorage, choose: Choose | None = None
    ) -> DraftResult:
        """Draft one block after each sequence's newly sampled token; leaves no trace in the caches.

        Args:
            anchors: [S] int64 sampled tokens. positions: [S] int64 of the last accepted rows. slots: [S] int64.
            choose: takes each draft from its logits; None: the largest logit.
        """
        if self.weights.draft is None:
            raise RuntimeError("this checkpoint has no draft stages")
        rings = storage.rings[len(self.weights.layers) :]
        return self._draft_block(anchors, positions, slots, rings, self.weights.draft, self._plain, choose)

    def _angles(self, positions: Tensor) -> _Angles:
        compressed = self._rope_angles(positions, self._compressed)
        starts = {
            ratio: compressed
            if ratio == 1
            else self._rope_angles((positions + 1 - ratio).clamp(min=-1), self._compressed)
            for ratio in self._ratios
        }
        return _Angles(self._rope_angles(positions, self._plain), compressed, starts)

    def _embed(self, step: StepInputs) -> _Stack:
        embedded = self._embedding(step.token_ids, self.weights.embedding)
        if step.embed_override is not None and step.embed_override_mask is not None:
            embedded = torch.where(step.embed_override_mask[:, None], step.embed_override, embedded)
        streams = embedded[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        rows, accumulate = embedded.shape[0], accumulate_dtype(embedded.dtype)
        return _Stack(streams, None, initial_mixes(rows, self.config.hc_mult, accumulate, embedded.device))

    def _layer(
        self, layer: LayerWeights, rows: _Rows, storage: CacheStorage, stack: _Stack, features: list[Tensor]
    ) -> _Rows:
        """One layer; returns the rows that go on, fewer than came in where a replayed prompt is cut."""
        step = rows.step
        if layer.engram is not None:
            if stack.branch is not None:
                stack.streams = self._expand(stack.streams, stack.branch, stack.mixes)
                stack.branch = None
            live = (step.token_ids >= 0) & ~step.is_image
            ids = self._engram_hash(step.token_ids, step.history, live, layer.engram_hash)
            stack.streams = self._engram_inject(stack.streams, ids, live, layer.engram)
        stack.streams, normed, mixes = self._boundary(
            stack.streams, stack.branch, stack.mixes, layer.attention_boundary
        )
        projected = self._project(normed, layer.attention, *rows.angles.of(layer.role.ratio))
        cache = storage.entry_caches[layer.role.kv_source] if layer.role.kv_source is not None else None
        if layer.compressor is not None:
            starts = rows.angles.group_start[layer.role.ratio]
            self._compress(projected.latent, projected.gate, self._dtype, step, cache, layer.compressor, *starts)
        if layer.role.layer == self.config.boundary and step.keep_from is not None:
            rows, projected, mixes = self._cut(rows, projected, mixes, stack)
        if layer.role.is_dspark_target and self.weights.draft is not None:
            features.append(self._stream_mean(stack.streams))
        stack.branch = self._attention(layer, projected, cache, rows, storage, stack)
        stack.streams, normed, stack.mixes = self._boundary(stack.streams, stack.branch, mixes, layer.ffn_boundary)
        stack.branch = self._moe(normed, layer.moe, rows.step.is_image, rows.step.slots >= 0)
        return rows

    def _cut(self, rows: _Rows, projected: Projected, mixes: Mixes, stack: _Stack) -> tuple[_Rows, Projected, Mixes]:
        """Enter the consumer half of a replayed prompt: entries of all rows are stored, only kept rows go on.

        In mode `mask` all rows go on with the same visibility; it is the oracle of `compact`.
        """
        if self.replay == "mask":
            return _Rows(clip_window(rows.step), rows.angles), projected, mixes
        index, step = self._keep_rows(rows.step)
        stack.streams = self._take_rows(stack.streams, index)
        # Entries are stored, so the compressor's inputs stay behind.
        projected = dataclasses.replace(projected, latent=None, gate=None)
        taken = self._take_rows(projected, index), self._take_rows(mixes, index)
        return _Rows(step, self._angles(step.positions)), *taken

    def _attention(
        self,
        layer: LayerWeights,
        projected: Projected,
        cache: EntryCache | None,
        rows: _Rows,
        storage: CacheStorage,
        stack: _Stack,
    ) -> Tensor:
        role, weights, step = layer.role, layer.attention, rows.step
        cos, sin = rows.angles.of(role.ratio)
        if layer.index is not None:
            stack.selection, stack.blocks = self._index_select(
                projected.index_query, projected.index_weights, step, cache, layer.index, cos, sin, stack.blocks
            )
        ring = storage.rings[role.layer]
        selection = stack.selection if role.ratio else None
        attended = self._attend(projected.query, projected.window_rows, ring, step, weights, selection, cache)
        self._commit_window(ring, projected.window_rows, step.slots, step.commit_rows)
        return self._attention_output(attended, weights, cos, sin)

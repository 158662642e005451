"""From checkpoint tensors to the weights of the graph: fused groups for the backend, plain parameters for core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.backend.backend import Backend, Placement, Shard, WeightGroup, WeightKind, WeightPart
from deepinfer.backend.numerics import Numerics
from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.models.deepseek_v41.engram_map import EngramMap
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.models.deepseek_v41.topology import LayerRole, Topology
from deepinfer.ops.attention import AttentionWeights
from deepinfer.ops.compress import CompressorWeights
from deepinfer.ops.draft import DraftWeights, StageWeights
from deepinfer.ops.engram import EngramHash, EngramWeights
from deepinfer.ops.hyper_connection import HyperConnectionWeights
from deepinfer.ops.indexer import IndexParameters
from deepinfer.ops.moe import MoeWeights
from deepinfer.ops.quant import FP4_BLOCK32, RowFormat, plain_format

__all__ = ["LayerWeights", "ModelWeights", "load_weights", "weight_groups"]


@dataclass(frozen=True)
class LayerWeights:
    """Everything that one backbone layer owns; None where its role has no such part."""

    role: LayerRole
    attention: AttentionWeights
    attention_boundary: HyperConnectionWeights
    ffn_boundary: HyperConnectionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None
    index: IndexParameters | None
    engram: EngramWeights | None
    engram_hash: EngramHash | None


@dataclass(frozen=True)
class ModelWeights:
    """Weights of the whole text model.

    Attributes:
        layers, embedding, norm, head: of the backbone. draft: None where the checkpoint has no draft stages.
        placements: what the backend laid out where. parameter_bytes: bytes of the plain parameters that core holds.
    """

    layers: tuple[LayerWeights, ...]
    embedding: Tensor
    norm: Tensor
    head: Any
    draft: DraftWeights | None
    placements: tuple[Placement, ...]
    parameter_bytes: int

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: the backend's groups and the plain parameters."""
        return self.parameter_bytes + sum(entry.nbytes for entry in self.placements if entry.memory == "device")


def weight_groups(config: ModelConfig) -> dict[str, WeightGroup]:
    """The groups that a backend lays out, by name: projections that share their input are fused (spec/model 5.6)."""
    specs = expected_tensors(config)
    groups: dict[str, WeightGroup] = {}

    def add(name: str, kind: WeightKind, *tensors: str, plain_rows: bool = False) -> None:
        suffixes = ("",) if kind in ("bf16", "float32") else (".weight", ".scale")
        names = [tensor + suffix for tensor in tensors for suffix in suffixes]
        parts = tuple(WeightPart(part, specs[part].shape, specs[part].dtype) for part in names)
        groups[name] = WeightGroup(name, kind, parts, plain_rows)

    for role in Topology.from_config(config).layers:
        _layer_groups(add, config, role)
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}"
        _block_groups(add, prefix, config.dspark_n_routed_experts)
        add(f"{prefix}.q_b", "fp8_block32", f"{prefix}.attn.wq_b")
    if config.num_nextn_predict_layers:
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        add("draft.main_proj", "fp8_block32", "mtp.0.main_proj")
        add("draft.markov_head", "bf16", f"{last}.markov_head.head.weight")
    add("head", "bf16", "head.weight")
    return groups


Add = Callable[..., None]


def _block_groups(add: Add, prefix: str, experts: int) -> None:
    attention, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    add(f"{prefix}.qkv_a", "fp8_block32", f"{attention}.wq_a", f"{attention}.wkv")
    add(f"{prefix}.wo_a", "fp8_block32", f"{attention}.wo_a", plain_rows=True)
    add(f"{prefix}.wo_b", "fp8_block32", f"{attention}.wo_b")
    add(f"{prefix}.hc_attn_fn", "float32", f"{prefix}.hc_attn_fn")
    add(f"{prefix}.hc_ffn_fn", "float32", f"{prefix}.hc_ffn_fn")
    add(f"{prefix}.gate", "bf16", f"{ffn}.gate.weight")
    names = [f"{ffn}.experts.{expert}.{part}" for expert in range(experts) for part in ("w1", "w3", "w2")]
    add(f"{prefix}.experts", "fp4_experts", *names)
    add(f"{prefix}.shared_gate_up", "fp8_block32", f"{ffn}.shared_experts.w1", f"{ffn}.shared_experts.w3")
    add(f"{prefix}.shared_down", "fp8_block32", f"{ffn}.shared_experts.w2")


def _layer_groups(add: Add, config: ModelConfig, role: LayerRole) -> None:
    prefix = f"layers.{role.layer}"
    attention = f"{prefix}.attn"
    _block_groups(add, prefix, config.n_routed_experts)
    index_query = [f"{attention}.indexer.wq_b"] if role.is_index_source else []
    add(f"{prefix}.q_b", "fp8_block32", f"{attention}.wq_b", *index_query)
    side = []
    if role.is_kv_source:
        side.append(f"{attention}.compressor.wkv.weight")
        if role.ratio > 1:
            side.append(f"{attention}.compressor.wgate.weight")
        add(f"{prefix}.index_key", "bf16", f"{attention}.indexer.wk.weight")
    if role.is_index_source:
        side.append(f"{attention}.indexer.weights_proj.weight")
        add(f"{prefix}.side", "bf16", *side)
    if role.has_engram:
        add(f"{prefix}.engram_table", "fp8_rows", f"{prefix}.engram.embed")
        add(f"{prefix}.engram_wkv", "fp8_block32", f"{prefix}.engram.wkv")


class _Assembly:
    """Handles and plain parameters of one checkpoint, put together layer by layer."""

    def __init__(
        self,
        config: ModelConfig,
        layout: CacheLayout,
        numerics: Numerics,
        handles: Mapping[str, Any],
        plain: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.config, self.layout, self.numerics = config, layout, numerics
        self.handles, self.raw, self.device = handles, plain, device
        self.parameter_bytes = 0

    def parameter(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        value = self.raw[name].to(device=self.device, dtype=dtype)
        self.parameter_bytes += value.nbytes
        return value

    def boundary(self, prefix: str, part: str, quantise: bool) -> HyperConnectionWeights:
        return HyperConnectionWeights(
            fn=self.handles[f"{prefix}.hc_{part}_fn"],
            base=self.parameter(f"{prefix}.hc_{part}_base"),
            scale=self.parameter(f"{prefix}.hc_{part}_scale"),
            norm=self.parameter(f"{prefix}.{part}_norm.weight"),
            iterations=self.config.hc_sinkhorn_iters,
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
            quantise=quantise,
        )

    def attention(self, prefix: str, role: LayerRole | None) -> AttentionWeights:
        config = self.config
        indexes = role is not None and role.is_index_source
        compresses = role is not None and role.is_kv_source
        return AttentionWeights(
            qkv_a=self.handles[f"{prefix}.qkv_a"],
            q_b=self.handles[f"{prefix}.q_b"],
            side=self.handles.get(f"{prefix}.side"),
            q_norm=self.parameter(f"{prefix}.attn.q_norm.weight"),
            kv_norm=self.parameter(f"{prefix}.attn.kv_norm.weight"),
            wo_a=self.handles[f"{prefix}.wo_a"],
            wo_b=self.handles[f"{prefix}.wo_b"],
            sink=self.parameter(f"{prefix}.attn.attn_sink"),
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            q_rank=config.q_lora_rank,
            groups=config.o_groups,
            index_heads=config.index_n_heads if indexes else 0,
            index_dim=config.index_head_dim if indexes else 0,
            latent_rows=config.head_dim if compresses else 0,
            gate_rows=config.head_dim if compresses and role is not None and role.ratio > 1 else 0,
            window=config.sliding_window,
            window_format=self.layout.window_format,
            norm_eps=config.rms_norm_eps,
            quantise=self.numerics.activation_quant,
        )

    def moe(self, prefix: str, top_k: int) -> MoeWeights:
        return MoeWeights(
            gate=self.handles[f"{prefix}.gate"],
            bias=self.parameter(f"{prefix}.ffn.gate.bias"),
            image_bias=self.parameter(f"{prefix}.ffn.gate.bias_vl"),
            experts=self.handles[f"{prefix}.experts"],
            shared_gate_up=self.handles[f"{prefix}.shared_gate_up"],
            shared_down=self.handles[f"{prefix}.shared_down"],
            top_k=top_k,
            scale=self.config.routed_scaling_factor,
            limit=self.config.swiglu_limit,
            quantise=self.numerics.activation_quant,
        )

    def compressor(self, role: LayerRole) -> CompressorWeights | None:
        if not role.is_kv_source:
            return None
        prefix = f"layers.{role.layer}"
        return CompressorWeights(
            norm=self.parameter(f"{prefix}.attn.compressor.norm.weight"),
            key=self.handles[f"{prefix}.index_key"],
            key_norm=self.parameter(f"{prefix}.attn.indexer.k_norm.weight"),
            norm_eps=self.config.rms_norm_eps,
        )

    def index(self, role: LayerRole) -> IndexParameters | None:
        if not role.is_index_source:
            return None
        config, width = self.config, self.config.index_head_dim
        quantised = self.numerics.cache_quant
        return IndexParameters(
            top_k=config.index_topk,
            scale=width**-0.5 * config.index_n_heads**-0.5,
            is_candidate_source=role.is_candidate_source,
            uses_candidates=role.uses_candidates,
            candidate_blocks=config.candidate_topk_blocks,
            block_size=config.candidate_block_size,
            query_format=RowFormat(FP4_BLOCK32, width)
            if quantised
            else plain_format(width, self.numerics.compute_dtype),
        )

    def engram(self, role: LayerRole, engram_map: EngramMap) -> tuple[EngramWeights | None, EngramHash | None]:
        if not role.has_engram:
            return None, None
        prefix = f"layers.{role.layer}"
        row = engram_map.layer_ids.index(role.layer)
        gate = self.parameter(f"{prefix}.engram.q_weight") * self.parameter(f"{prefix}.engram.k_weight")
        weights = EngramWeights(
            table=self.handles[f"{prefix}.engram_table"],
            projection=self.handles[f"{prefix}.engram_wkv"],
            gate=gate,
            norm_eps=self.config.rms_norm_eps,
            quantise=self.numerics.activation_quant,
        )

        def constant(values: Any) -> Tensor:
            return torch.from_numpy(values.copy()).to(self.device)

        constants = EngramHash(
            token_map=constant(engram_map.token_map),
            multipliers=constant(engram_map.multipliers[row]),
            primes=constant(engram_map.primes[row].reshape(-1)),
            offsets=constant(engram_map.offsets[row]),
            pad=engram_map.pad,
        )
        return weights, constants

    def layer(self, role: LayerRole, engram_map: EngramMap) -> LayerWeights:
        prefix = f"layers.{role.layer}"
        engram, engram_hash = self.engram(role, engram_map)
        quantise = self.numerics.activation_quant
        return LayerWeights(
            role=role,
            attention=self.attention(prefix, role),
            attention_boundary=self.boundary(prefix, "attn", quantise),
            ffn_boundary=self.boundary(prefix, "ffn", quantise),
            moe=self.moe(prefix, self.config.num_experts_per_tok),
            compressor=self.compressor(role),
            index=self.index(role),
            engram=engram,
            engram_hash=engram_hash,
        )

    def draft(self, embedding: Tensor) -> DraftWeights | None:
        config = self.config
        if not config.num_nextn_predict_layers:
            return None
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        quantise = self.numerics.activation_quant
        stages = tuple(
            StageWeights(
                attention=self.attention(prefix, None),
                attention_boundary=self.boundary(prefix, "attn", quantise),
                ffn_boundary=self.boundary(prefix, "ffn", quantise),
                moe=self.moe(prefix, config.dspark_num_experts_per_tok),
            )
            for prefix in (f"mtp.{stage}" for stage in range(config.num_nextn_predict_layers))
        )
        return DraftWeights(
            main_proj=self.handles["draft.main_proj"],
            main_norm=self.parameter("mtp.0.main_norm.weight"),
            stages=stages,
            norm=self.parameter(f"{last}.norm.weight"),
            embedding=embedding,
            head=self.handles["head"],
            markov_embedding=self.parameter(f"{last}.markov_head.embed.weight", self.numerics.compute_dtype),
            markov_head=self.handles["draft.markov_head"],
            confidence=self.parameter(f"{last}.confidence_head.proj.weight").flatten(),
            block_size=config.dspark_block_size,
            noise_token=config.dspark_noise_token_id,
            temperature=torch.ones(config.dspark_block_size, device=self.device),
            norm_eps=config.rms_norm_eps,
            quantise=quantise,
        )


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    topology: Topology,
    layout: CacheLayout,
    backend: Backend,
    numerics: Numerics,
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
) -> ModelWeights:
    """Read a validated checkpoint and lay it out on the device, one group at a time.

    Raises:
        CheckpointError: files and config do not match; nothing was read then.
    """
    specs = expected_tensors(config)
    checkpoint.validate(specs)
    groups = weight_groups(config)
    placements = backend.plan_weights(list(groups.values()), Shard(), numerics)
    handles: dict[str, Any] = {}
    for placement in placements:
        names = [part.name for part in placement.group.parts]
        if placement.memory == "mmap":
            raw = {name: checkpoint.mmap(name) for name in names}
        else:
            raw = checkpoint.read(names, progress=progress)
        handles[placement.group.name] = backend.load(placement, raw)
    grouped = {part.name for group in groups.values() for part in group.parts}
    plain = checkpoint.read([name for name in specs if name not in grouped and _is_text(name)], progress=progress)
    assembly = _Assembly(config, layout, numerics, handles, plain, device)
    engram_map = EngramMap.build(config, checkpoint.path)
    embedding = assembly.parameter("embed.weight", numerics.compute_dtype)
    layers = tuple(assembly.layer(role, engram_map) for role in topology.layers)
    norm, draft = assembly.parameter("norm.weight"), assembly.draft(embedding)
    return ModelWeights(layers, embedding, norm, handles["head"], draft, tuple(placements), assembly.parameter_bytes)


def _is_text(name: str) -> bool:
    return not name.startswith(("vision.", "aligner.", "image_"))

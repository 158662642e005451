"""Who owns and who reads what: sources of keys, selections and candidates per layer (spec/model 1.6, 2.1, 3.8)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.models.deepseek_v41.config import ModelConfig

__all__ = ["LayerRole", "Topology"]


@dataclass(frozen=True)
class LayerRole:
    """What one backbone layer owns and whose state it reads.

    Attributes:
        kv_source: layer whose compressed keys are read; None at ratio 0.
        index_source: layer whose selection is read; None at ratio 0.
        uses_candidates: this layer selects, and only inside the blocks kept by the candidate source below it.
        is_dspark_target: the streams that enter its attention feed the drafter.
    """

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    uses_candidates: bool
    has_engram: bool
    is_dspark_target: bool

    @property
    def kind(self) -> str:
        """`window`, `full` (own keys and selection), `reindex` (own selection) or `reuse`."""
        if self.ratio == 0:
            return "window"
        if self.is_kv_source:
            return "full"
        return "reindex" if self.is_index_source else "reuse"


@dataclass(frozen=True)
class Topology:
    """Roles of all backbone layers; layers `0 .. boundary-1` are the producer half, the rest the consumer half."""

    layers: tuple[LayerRole, ...]
    boundary: int
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    num_stages: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> Topology:
        """Derive the roles from a valid config."""
        candidate = config.candidate_source_layer_id
        roles = []
        kv_source: int | None = None
        index_source: int | None = None
        for layer in range(config.num_hidden_layers):
            is_index_source = layer in config.index_source_layer_ids
            kv_source = layer if layer in config.kv_source_layer_ids else kv_source
            index_source = layer if is_index_source else index_source
            roles.append(
                LayerRole(
                    layer=layer,
                    ratio=config.compress_ratios[layer],
                    kv_source=kv_source,
                    index_source=index_source,
                    is_kv_source=layer in config.kv_source_layer_ids,
                    is_index_source=is_index_source,
                    is_candidate_source=layer == candidate,
                    uses_candidates=is_index_source and candidate is not None and layer > candidate,
                    has_engram=layer in config.engram_layer_ids,
                    is_dspark_target=layer in config.dspark_target_layer_ids,
                )
            )
        return cls(
            layers=tuple(roles),
            boundary=config.boundary,
            kv_sources=config.kv_source_layer_ids,
            index_sources=config.index_source_layer_ids,
            num_stages=config.num_nextn_predict_layers,
        )

from __future__ import annotations

from typing import Any

from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.topology import Topology


def test_released_topology(raw_release: dict[str, Any]) -> None:
    topology = Topology.from_config(parse_config(raw_release))
    assert topology.boundary == 20
    assert topology.num_stages == 3
    kinds = "".join({"window": "S", "full": "F", "reindex": "I", "reuse": "r"}[role.kind] for role in topology.layers)
    assert kinds == "SS" + "Frrrrr" * 3 + "Frrr" + "Irrr" * 4
    by_layer = topology.layers
    assert [role.kv_source for role in by_layer[:4]] == [None, None, 2, 2]
    assert (by_layer[13].kv_source, by_layer[13].index_source) == (8, 8)
    assert (by_layer[39].kv_source, by_layer[39].index_source) == (20, 36)
    assert [role.layer for role in by_layer if role.uses_candidates] == [24, 28, 32, 36]
    assert [role.layer for role in by_layer if role.is_candidate_source] == [20]
    assert [role.layer for role in by_layer if role.has_engram] == [1, 14]
    assert [role.layer for role in by_layer if role.is_dspark_target] == [37, 38, 39]


def test_tiny_topology(raw: dict[str, Any]) -> None:
    topology = Topology.from_config(parse_config(raw))
    assert [role.kind for role in topology.layers] == [
        "window",
        "full",
        "reuse",
        "full",
        "full",
        "reuse",
        "reindex",
        "reuse",
    ]
    assert topology.kv_sources == (1, 3, 4)
    assert topology.index_sources == (1, 3, 4, 6)


def test_without_candidates_nothing_uses_them(raw: dict[str, Any]) -> None:
    raw["text_config"]["candidate_source_layer_id"] = None
    topology = Topology.from_config(parse_config(raw))
    assert not any(role.uses_candidates or role.is_candidate_source for role in topology.layers)

"""A model that costs little, for tests of what goes on around a model."""

from __future__ import annotations

import copy
from pathlib import Path

from deepinfer.checkpoint.presets import preset_config
from deepinfer.checkpoint.synthetic import write_checkpoint

__all__ = ["WINDOW", "write_loop_model"]

WINDOW = 8
"""Positions that its window layers see."""


def write_loop_model(folder: str | Path) -> Path:
    """Write a checkpoint like the preset `tiny` with six narrower layers and one draft stage: every kind of layer.

    Args:
        folder: must not exist yet, or be empty.

    Raises:
        CheckpointError: the folder has content or cannot be written.
    """
    raw = copy.deepcopy(preset_config("tiny"))
    raw["text_config"].update(
        num_hidden_layers=6,
        hidden_size=128,
        num_attention_heads=4,
        moe_intermediate_size=32,
        sliding_window=WINDOW,
        hc_sinkhorn_iters=4,
        compress_ratios=[0, 2, 2, 1, 1, 1, 0],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3,
        engram_layer_ids=[1],
        engram_num_embeddings=[6126],
        dspark_target_layer_ids=[5],
        num_nextn_predict_layers=1,
    )
    return write_checkpoint(folder, raw)

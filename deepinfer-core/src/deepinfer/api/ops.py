"""What a kernel implements: contracts, the handles that large ops exchange and the structures that they receive."""

from __future__ import annotations

from deepinfer.ops.attention import AttentionWeights, Projected
from deepinfer.ops.compress import CompressorWeights, EntryCache
from deepinfer.ops.contract import CONTRACTS, Determinism, OpContract, Sample, SampleSize, Tolerance
from deepinfer.ops.draft import DraftResult, DraftWeights, StageWeights
from deepinfer.ops.engram import EngramHash, EngramWeights
from deepinfer.ops.handles import (
    DenseWeight,
    EngramTable,
    ExpertWeights,
    Mixes,
    Rows,
    Selection,
    accumulate_dtype,
)
from deepinfer.ops.hyper_connection import HyperConnectionWeights, initial_mixes
from deepinfer.ops.indexer import IndexParameters, visible_entries
from deepinfer.ops.moe import MoeWeights, gated_activation
from deepinfer.ops.quant import FP4_BLOCK16, FP4_BLOCK32, FP8_BLOCK32, RowFormat, round_rows
from deepinfer.ops.sample_inputs import RawWeight, RowsInput
from deepinfer.ops.step import PlanTensors, SlotRecords, StepInputs

__all__ = [
    "CONTRACTS",
    "FP4_BLOCK16",
    "FP4_BLOCK32",
    "FP8_BLOCK32",
    "AttentionWeights",
    "CompressorWeights",
    "DenseWeight",
    "Determinism",
    "DraftResult",
    "DraftWeights",
    "EngramHash",
    "EngramTable",
    "EngramWeights",
    "EntryCache",
    "ExpertWeights",
    "HyperConnectionWeights",
    "IndexParameters",
    "Mixes",
    "MoeWeights",
    "OpContract",
    "PlanTensors",
    "Projected",
    "RawWeight",
    "RowFormat",
    "Rows",
    "RowsInput",
    "Sample",
    "SampleSize",
    "Selection",
    "SlotRecords",
    "StageWeights",
    "StepInputs",
    "Tolerance",
    "accumulate_dtype",
    "gated_activation",
    "initial_mixes",
    "round_rows",
    "visible_entries",
]

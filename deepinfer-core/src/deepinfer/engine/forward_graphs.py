"""Forward passes replayed from captured graphs, one per row bucket (design 8)."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.ops.step import StepInputs

if TYPE_CHECKING:
    from deepinfer.backend.runtime import DeviceRuntime
    from deepinfer.engine.loader import ServedModel

__all__ = ["ForwardGraphs"]

MOST_ROWS = 256
"""Larger steps run long enough on the device for the host to launch their kernels one by one."""

OF_SEQUENCES = ("sample_starts", "sample_counts", "seq_slots", "seq_positions")
OF_SAMPLES = ("sample_rows", "sample_sequences", "sample_positions")

_logger = logging.getLogger("deepinfer.engine")


class _Bucket:
    """Inputs of one row bucket at a fixed place, and the graph that reads them once it is captured."""

    def __init__(self, inputs: StepInputs) -> None:
        rows, device = inputs.token_ids.shape[0], inputs.token_ids.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        padded = dict.fromkeys(OF_SAMPLES, none.new_full((rows,), -1))
        # The pass reads nothing of the sequences; if it did, it would find nothing here and fail.
        places: dict[str, Any] = dict.fromkeys(OF_SEQUENCES, none)
        places |= {name: value.clone() for name, value in (padded | self._of_rows(inputs)).items()}
        self.inputs = replace(inputs, **places)
        self.graph: Any = None
        self.logits: Tensor | None = None

    def fill(self, inputs: StepInputs) -> None:
        """Bring a step's inputs to their place; samples that it does not have are padding."""
        for name, value in self._of_rows(inputs).items():
            getattr(self.inputs, name).copy_(value)
        count = inputs.sample_rows.shape[0]
        for name in OF_SAMPLES:
            place = getattr(self.inputs, name)
            place[:count].copy_(getattr(inputs, name))
            place[count:].fill_(-1)

    @staticmethod
    def _of_rows(inputs: StepInputs) -> dict[str, Tensor]:
        kept = {*OF_SEQUENCES, *OF_SAMPLES, "page_table"}
        values = {item.name: getattr(inputs, item.name) for item in fields(inputs) if item.name not in kept}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class ForwardGraphs:
    """Runs a model's forward passes: the first of a row bucket kernel by kernel, later ones as one launch.

    Args:
        model: what to run. storage: its caches. runtime: of the device, which has graphs.
    """

    def __init__(self, model: ServedModel, storage: Any, runtime: DeviceRuntime) -> None:
        self._model, self._storage, self._runtime = model, storage, runtime
        self._buckets: dict[int, _Bucket] = {}
        self._broken = False
        self.replays = self.passes = 0
        """Replayed passes, and all of them."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [R, V] of the sampled rows, valid until the next pass of the same bucket."""
        self.passes += 1
        rows, sampled = inputs.token_ids.shape[0], inputs.sample_rows.shape[0]
        special = inputs.keep_from is not None or inputs.embed_override is not None
        if self._broken or special or rows > MOST_ROWS or sampled > rows:
            return self._model.forward(inputs, self._storage).logits
        bucket = self._buckets.get(rows)
        if bucket is None:
            bucket = self._buckets[rows] = _Bucket(inputs)
            bucket.fill(inputs)
            # Compiles what the graph will hold.
            return self._model.forward(bucket.inputs, self._storage).logits[:sampled]
        bucket.fill(inputs)
        if bucket.graph is None and not self._capture(bucket):
            return self._model.forward(bucket.inputs, self._storage).logits[:sampled]
        self.replays += 1
        self._runtime.replay(bucket.graph)
        assert bucket.logits is not None
        return bucket.logits[:sampled]

    def _capture(self, bucket: _Bucket) -> bool:
        def run() -> None:
            bucket.logits = self._model.forward(bucket.inputs, self._storage).logits

        try:
            bucket.graph = self._runtime.capture(run)
        except Exception as error:
            self._broken = True
            _logger.warning("steps run kernel by kernel: the forward pass cannot be captured (%s)", error)
            return False
        return True

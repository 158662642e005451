"""Launches, bytes and FLOPs of a decode step of the released model on the Ascend backend, counted without its memory.

Every tensor is a shape (fake tensors), so the forty layers need no device and no weights; operators of torch_npu answer
with their own Meta kernels. Run it in the environment of `nox -s ascend`, with the simulated runtime in place:

    DEEPINFER_TEST_ASCEND_SIM=FOLDER PYTHONPATH=tests python benchmarks/ascend_step.py --output ascend.json

A launch is a call that computes, so views do not count. Its bytes are those of its operands and results, each once;
of a table that is looked into, or of experts that are chosen from, only what is read. The floor of an operation is what
one kernel for it must read at least: the weights that it touches, as the checkpoint stores them, of experts those that
can be hit. Caches and activations are small beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ascend_sim import plugin  # noqa: F401 - starts the simulated device

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cuda_step import RandomCheckpoint, decoding, watched
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer.api.backend import Numerics
from deepinfer.api.ops import DenseWeight, EngramTable
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.ops import quant
from deepinfer_ascend.backend import AscendBackend
from deepinfer_ascend.handles import PAIR, MxExperts

CONFIG = Path(__file__).parent.parent / "tests" / "core" / "models" / "data" / "v41_flash_config.json"
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
LOOKUPS = {"aten.index.Tensor", "aten.index_select.default", "aten.gather.default", "aten.embedding.default"}
MATRIX_PRODUCTS = {"aten.mm.default", "aten.bmm.default", "aten.matmul.default", "npu.npu_quant_matmul.default"}
GROUPED = "npu.npu_grouped_matmul.default"
REST = "beside the layers"
CARDS = {"950DT": 4.0e12, "950PR": 1.6e12}
"""Announced bytes a second."""


class ShapedCheckpoint(RandomCheckpoint):
    """Tensors of the released shapes without content."""

    def _tensor(self, spec: Any) -> Tensor:
        return torch.empty(spec.shape, dtype=DTYPES.get(spec.dtype, torch.uint8))


class ShapedBackend(AscendBackend):
    """Lays out weights without looking at their codes."""

    def load(self, placement: Any, raw: Mapping[str, Tensor]) -> Any:
        """As the backend does it, but for experts and for FP8 weights that become values."""
        parts = placement.group.parts
        if placement.group.plain_rows:
            code, scale = (torch.empty(part.shape, dtype=torch.bfloat16, device="npu") for part in parts)
            return DenseWeight(code, quantised=True, scales=(scale.to(torch.uint8),))
        if placement.group.kind != "fp4_experts":
            return super().load(placement, raw)
        count, (inner, hidden) = len(parts) // 6, (parts[0].shape[0], 2 * parts[0].shape[1])

        def pair(terms: int, outputs: int) -> tuple[Tensor, Tensor]:
            codes = torch.empty(count, terms, outputs, dtype=torch.float8_e4m3fn, device="npu")
            return codes, torch.empty(count, terms // PAIR, outputs, 2, dtype=torch.uint8, device="npu")

        (up, up_scales), (down, down_scales) = pair(hidden, 2 * inner), pair(inner, hidden)
        return MxExperts(up, down, up_scales, down_scales)


def nbytes(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class Count(TorchDispatchMode):
    """Counts what reaches the device, by operation of the graph.

    Args:
        share: of the experts of a layer that its rows can hit.
        weights: of the model.
    """

    def __init__(self, share: float, weights: Any) -> None:
        super().__init__()
        self.share, self.current = share, REST
        self.weights, self.touched = stored_bytes(weights, share), set[int]()
        self.launches: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.floor: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "npu" for tensor in (*operands, *results)) and not is_view(function):
            self._add(str(function), args, operands, results)
        return result

    def _add(self, name: str, args: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        op, out = self.current, nbytes(results)
        if name not in LOOKUPS:
            self.touched |= {memory(tensor) for tensor in operands} & self.weights.keys()
        self.launches[op] += 1
        self.kernels[name] += 1
        if name in LOOKUPS:
            self.bytes[op] += 2 * out + nbytes(args[1:])
        elif name == GROUPED:
            (rows,), (weight,) = args[0], args[1]
            self.bytes[op] += out + nbytes(rows) + int(self.share * (nbytes(operands) - nbytes(rows)))
            self.flops[op] += 2 * rows.shape[0] * weight.shape[-2] * weight.shape[-1]
        else:
            self.bytes[op] += out + nbytes(operands)
        if name in MATRIX_PRODUCTS:
            self.flops[op] += 2 * args[0].shape[-1] * results[0].numel()

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same operation, whose launches are counted under its name."""

        def call(*args: Any) -> Any:
            self.current, self.touched = op, set()
            result = function(*args)
            self.current = REST
            self.calls[op] += 1
            self.floor[op] += int(sum(self.weights[key] for key in self.touched))
            return result

        return call


def stored_bytes(value: Any, share: float) -> dict[int, float]:
    """Bytes that a step must read of each weight in a value, by the identity of its memory."""
    if isinstance(value, EngramTable):
        return {}  # Only looked into.
    if isinstance(value, MxExperts):
        # Codes lie in memory as FP8, twice what the checkpoint's FP4 takes; FP8 that became values likewise.
        codes, scales = (value.gate_up, value.down), (value.gate_up_scales, value.down_scales)
        parts = [(tensor, share / 2) for tensor in codes] + [(tensor, share) for tensor in scales]
        return {memory(tensor): factor * nbytes(tensor) for tensor, factor in parts}
    if isinstance(value, DenseWeight) and value.scales is not None:
        return {memory(value.values): nbytes(value.values) / 2 + nbytes(value.scales)}
    if isinstance(value, Tensor):
        return {memory(value): nbytes(value)}
    items = value if isinstance(value, (tuple, list)) else ()
    if is_dataclass(value):
        items = [getattr(value, item.name) for item in fields(value)]
    return {key: size for item in items for key, size in stored_bytes(item, share).items()}


def memory(tensor: Tensor) -> int:
    """What views of one tensor have in common."""
    return tensor.untyped_storage()._cdata


def is_view(function: Any) -> bool:
    """Whether a call launches nothing."""
    reads = any(value.alias_info is not None and not value.alias_info.is_write for value in function._schema.arguments)
    return reads or str(function).startswith(("prim.", "aten.detach", "aten.empty"))


def build_model(table: KernelTable, backend: AscendBackend) -> DeepseekV41:
    """The released model as shapes; the n-gram memory's token map is the identity, which changes no size."""
    raw = json.loads(CONFIG.read_text())
    raw["text_config"]["engram_compressed_vocab_size"] = raw["text_config"]["vocab_size"]
    config = parse_config(raw)
    checkpoint: Any = ShapedCheckpoint(expected_tensors(config), torch.device("cpu"))
    return DeepseekV41(checkpoint, config, backend, table, table.numerics, page_size=128, max_draft=0)


def measure(model: DeepseekV41, rows: int, context: int) -> dict[str, Any]:
    """Counts of one decode step of `rows` sequences."""
    batch, config = decoding(model, rows, context), model.config
    hit = min(rows * config.num_experts_per_tok, config.n_routed_experts)
    count = Count(hit / config.n_routed_experts, model.weights)
    with watched(model.graph, count.wrap), count:
        batch.step()
    names = sorted(count.launches, key=lambda op: -count.bytes[op])
    kept = ("calls", "launches", "bytes", "flops", "floor")
    parts = {op: {name: getattr(count, name)[op] for name in kept} for op in names}
    total = {name: sum(part[name] for part in parts.values()) for name in kept[1:]}
    seconds = {card: {"now": total["bytes"] / speed, "floor": total["floor"] / speed} for card, speed in CARDS.items()}
    kernels = dict(count.kernels.most_common())
    return {"rows": rows, "context": context, "experts_hit": hit, "total": total, "seconds": seconds, "parts": parts,
            "kernels": kernels}  # fmt: skip


def main() -> None:
    """Count and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("npu", 0)
    for table_of in (quant._e2m1_table, quant._e8m0_table):
        table_of(device)  # Constants that are kept; a shape of them must not be.
    backend = ShapedBackend()
    table = KernelTable.bind(all_contracts(), backend, Numerics(), fallback="allow")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(table, backend)
        report = {"layers": len(model.weights.layers), "torch": torch.__version__, "cards": CARDS,
                  "steps": [measure(model, rows, options.context) for rows in options.rows]}  # fmt: skip
    text = json.dumps(report, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()

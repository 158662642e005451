"""Time of a decode step at released widths on one NVIDIA GPU: captured whole, and operation by operation.

The model is the preset `wide` (one layer of each kind) with the released number of experts and random data in the
stored formats. Step and parts are medians of replays; each part replays all calls of one operation in a step, so that
its weights are as cold as in the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.backend import Numerics
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.checkpoint.presets import preset_config
from deepinfer.checkpoint.reader import ReadStats
from deepinfer.models.deepseek_v41.config import parse_config
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.ops.step import PlanTensors, SlotRecords
from deepinfer.plugins.selection import select_backend

REPLAYS = 40
GRAPH_OPS = {
    "_embedding": "embedding",
    "_rope_angles": "rope_angles",
    "_expand": "hyper_connection_expand",
    "_boundary": "hyper_connection_boundary",
    "_head": "hyper_connection_head",
    "_lm_head": "lm_head",
    "_engram_hash": "engram_hash",
    "_engram_inject": "engram_inject",
    "_project": "qkv_project",
    "_compress": "compress_entries",
    "_index_select": "index_select",
    "_attend": "sparse_attention",
    "_attention_output": "attention_output",
    "_commit_window": "commit_window",
    "_moe": "moe_block",
    "_stream_mean": "stream_mean",
    "_draft_main_keys": "draft_main_keys",
}


class RandomCheckpoint:
    """Random tensors in the stored formats, made on the device when they are read."""

    def __init__(self, specs: Mapping[str, Any], device: torch.device) -> None:
        self.specs, self.device = specs, device
        self.path, self.stats = Path(), ReadStats()
        self.generator = torch.Generator(device).manual_seed(0)

    def validate(self, specs: Mapping[str, Any]) -> None:
        """Every wanted tensor can be made."""

    def read(self, names: Sequence[str], progress: Callable[[int], None] | None = None) -> dict[str, Tensor]:
        """Tensors whose products have about unit size."""
        return {name: self._tensor(self.specs[name]) for name in names}

    def mmap(self, name: str) -> Tensor:
        """The same for a group that stays in its files."""
        return self._tensor(self.specs[name])

    def _tensor(self, spec: Any) -> Tensor:
        draw = {"generator": self.generator, "device": self.device}
        if spec.dtype == "F8_E4M3":
            return (64 * torch.randn(spec.shape, **draw)).clamp(-448, 448).to(torch.float8_e4m3fn)
        if spec.dtype in ("I8", "U8"):
            return torch.randint(0, 256, spec.shape, dtype=torch.uint8, **draw)
        if spec.dtype == "F8_E8M0":
            return torch.randint(112, 115, spec.shape, dtype=torch.uint8, **draw)
        values = torch.randn(spec.shape, **draw) * (0.02 if len(spec.shape) > 1 else 0.1)
        values = values + (len(spec.shape) == 1)
        return values.to(torch.bfloat16) if spec.dtype == "BF16" else values


@dataclass
class Decoding:
    """A batch that decodes: every replay moves its records on by one token."""

    model: DeepseekV41
    records: SlotRecords
    plan: PlanTensors
    storage: Any
    rows: int

    def step(self) -> Tensor:
        """One whole step on the device; returns its tokens."""
        table, records, traits = self.model.table, self.records, self.model.traits
        inputs = table.expand_plan(
            records, self.plan, self.rows, self.rows, self.model.layout.ring_length, traits.ngram_size
        )
        logits = self.model.forward(inputs, self.storage).logits
        slots = inputs.seq_slots.clamp(min=0)
        draws = (records.seed[slots], inputs.sample_positions + 1, records.completion[slots])
        filters = (records.temperature[slots], records.top_k[slots], records.top_p[slots])
        tokens, status = table.sample_step(logits, *filters, *draws)
        fed = inputs.token_ids[inputs.sample_rows.clamp(min=0)]
        accepted, last = table.verify_coupled(
            fed, tokens, status, inputs.sample_sequences, inputs.sample_starts, inputs.sample_counts
        )
        table.commit_step(records, inputs, last, inputs.sample_counts - accepted)
        return last


def build_model(experts: int, vocab: int) -> tuple[DeepseekV41, dict[str, str]]:
    """The model and what its reachable operations are bound to."""
    raw = preset_config("wide")
    text = raw.get("text_config", raw)
    text["n_routed_experts"], text["vocab_size"] = experts, vocab
    if text.get("engram_layer_ids"):
        text["engram_compressed_vocab_size"] = vocab
    config = parse_config(raw)
    backend, _ = select_backend("nvidia")
    numerics = Numerics()
    table = KernelTable.bind(all_contracts(), backend, numerics, fallback="allow")
    device = backend.runtime().device
    checkpoint: Any = RandomCheckpoint(expected_tensors(config), device)
    with torch.no_grad():
        model = DeepseekV41(checkpoint, config, backend, table, numerics, page_size=128, max_draft=0)
    return model, {binding.op: binding.kind for binding in table.bindings() if binding.reachable}


def decoding(model: DeepseekV41, rows: int, context: int) -> Decoding:
    """`rows` sequences of about `context` tokens with random caches."""
    device, page = model.device, model.traits.page_size
    generator = torch.Generator(device).manual_seed(rows)
    pages_each = -(-(context + 256) // page)
    storage = model.allocate_caches(rows * pages_each + 1, rows + 1)
    _fill_caches(model, storage, generator)
    records = SlotRecords.allocate(rows + 1, pages_each, 0, 16, device)
    records.length[1:] = context - torch.arange(rows, device=device)
    records.next_token[1:] = torch.randint(0, 1000, (rows,), generator=generator, device=device)
    records.history.random_(0, 1000, generator=generator)
    order = torch.randperm(rows * pages_each, generator=generator, device=device) + 1
    records.page_table[1:] = order.view(rows, pages_each).to(torch.int32)

    def none(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ones = torch.ones(rows, dtype=torch.int64, device=device)
    plan = PlanTensors(
        slots=torch.arange(1, rows + 1, device=device),
        row_counts=ones,
        is_prefill=ones == 0,
        samples=ones == 1,
        **{name: none(0) for name in ("host_tokens", "page_slots", "page_indices", "page_ids", "released_slots")},
        **{f"admitted_{name}": none(0) for name in ("slots", "lengths", "seed")},
        admitted_tokens=none(0, 3),
        **{f"admitted_{name}": none(0, dtype=torch.float32) for name in ("temperature", "top_p")},
        **{f"admitted_{name}": none(0, dtype=torch.int32) for name in ("top_k", "completion")},
        keep_from=none(0),
    )
    return Decoding(model, records, plan, storage, rows)


def _fill_caches(model: DeepseekV41, storage: Any, generator: torch.Generator) -> None:
    """Random codes of both signs with scales near 1/16, in every row format of the caches."""
    width = model.config.head_dim
    for part in (storage.pages, storage.slots):
        part.random_(0x30, 0x38, generator=generator)
    for ring in storage.rings:
        codes = 120 * torch.randn(*ring.shape[:-1], width, generator=generator, device=ring.device)
        ring[..., :width] = codes.clamp(-440, 440).to(torch.float8_e4m3fn).view(torch.uint8)
        ring[..., width:].random_(118, 122, generator=generator)
    for cache in storage.entry_caches.values():
        codes = cache.entry_format.data_bytes
        cache.entries[..., :codes].random_(0, 256, generator=generator)
        cache.entries[..., codes:].random_(0x20, 0x34, generator=generator)
        codes = cache.entries_per_page * cache.index_format.data_bytes
        cache.index_keys[:, :codes].random_(0, 256, generator=generator)
        cache.index_keys[:, codes:].random_(120, 126, generator=generator)


def capture(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run once, then record."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times[3:])


@contextmanager
def watched(graph: Any, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put `wrap(op, function)` in the place of every operation of a graph."""
    originals = {name: getattr(graph, name) for name in GRAPH_OPS}
    for name, op in GRAPH_OPS.items():
        setattr(graph, name, wrap(op, originals[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(graph, name, function)


def recorded_calls(batch: Decoding) -> dict[str, list[Callable[[], Any]]]:
    """Every call of the graph's operations in one eager step, ready to be made again."""
    calls: dict[str, list[Callable[[], Any]]] = defaultdict(list)

    def recording(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[op].append(lambda: function(*args))
            return function(*args)

        return call

    with watched(batch.model.graph, recording):
        batch.step()
    return calls


def experts_hit(batch: Decoding) -> list[int]:
    """Distinct experts of each layer in one eager step."""
    hits: list[int] = []
    graph = batch.model.graph
    original, route = graph._moe, batch.model.table.route

    def moe(rows: Any, weights: Any, is_image: Tensor, live: Tensor) -> Tensor:
        logits = batch.model.table.linear_accumulate(rows, weights.gate)
        ids, _ = route(logits, weights.bias, weights.image_bias, is_image, weights.top_k, weights.scale)
        hits.append(int(ids.unique().numel()))
        return original(rows, weights, is_image, live)

    graph._moe = moe
    try:
        batch.step()
    finally:
        graph._moe = original
    return hits


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of large copies, read and written; launched one by one, since a copy in a graph is slower."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times)


def byte_floor(batch: Decoding, hits: Sequence[int]) -> int:
    """Bytes of weights that a step without drafts must read; caches and activations are small beside them."""
    total = 0
    config = batch.model.config
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 17 // 32
    for placement in batch.model.weights.placements:
        drafts = placement.group.name.startswith(("mtp.", "draft."))
        if not drafts and placement.group.kind not in ("fp4_experts", "fp8_rows"):
            total += placement.nbytes
    return total + expert * sum(hits)


def measure(model: DeepseekV41, rows: int, context: int, bandwidth: float, parts: bool) -> dict[str, Any]:
    """One row of the table."""
    batch = decoding(model, rows, context)
    started = time.perf_counter()
    batch.step()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"rows": rows, "context": context, "first_step_s": time.perf_counter() - started}
    hits = experts_hit(batch)
    floor = byte_floor(batch, hits)
    result |= {"experts_hit": hits, "floor_bytes": floor, "floor_us": 1e6 * floor / bandwidth}
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        batch.step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    result["eager_us"] = 1e6 * (time.perf_counter() - started)
    result["step_us"] = replay_time(capture(batch.step))
    if parts:
        times = {}
        for op, calls in recorded_calls(batch).items():
            graph = capture(lambda calls=calls: [call() for call in calls])
            times[op] = {"calls": len(calls), "us": replay_time(graph)}
        result["parts"] = times
    return result


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with torch.inference_mode():
        model, bindings = build_model(options.experts, options.vocab)
        bandwidth = copy_bandwidth(model.device)
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "layers": len(model.weights.layers),
            "copy_bytes_per_s": bandwidth,
            "triton": metadata.version("triton"),
            "bindings": bindings,
            "steps": [],
        }
        for rows in options.rows:
            found = measure(model, rows, options.context, bandwidth, parts=True)
            report["steps"].append(found)
            parts = sorted(found["parts"].items(), key=lambda item: -item[1]["us"])
            print(
                f"{rows} rows: step {found['step_us']:.0f} us, floor {found['floor_us']:.0f} us,"
                f" eager {found['eager_us']:.0f} us; "
                + ", ".join(f"{op} {part['us']:.0f}/{part['calls']}" for op, part in parts),
                flush=True,
            )
            if options.output:
                options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

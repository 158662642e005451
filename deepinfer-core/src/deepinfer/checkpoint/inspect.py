"""What a checkpoint holds and needs: config, topology, coverage, sizes, memory per device."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.backend.numerics import Numerics
from deepinfer.checkpoint.checkpoint import Checkpoint, expectation_problems
from deepinfer.checkpoint.formats import scale_values
from deepinfer.checkpoint.tensor_spec import TensorSpec
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.models.deepseek_v41.config import ModelConfig, parse_config
from deepinfer.models.deepseek_v41.engram_map import EngramMap
from deepinfer.models.deepseek_v41.tensors import expected_tensors
from deepinfer.models.deepseek_v41.topology import Topology

__all__ = ["CheckpointReport", "DeviceNeed", "inspect_checkpoint", "part_of"]

DEVICE_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes per device when experts (and device-resident Engram tables) are spread over `devices` of them.

    Attributes:
        weights: stored bytes of everything but Engram tables.
        engram_table: a device's share where tables live on the devices; 0 where they stay in host memory.
    """

    devices: int
    weights: int
    engram_table: int


@dataclass(frozen=True)
class CheckpointReport:
    """Everything that `deepinfer checkpoint inspect` prints.

    Attributes:
        sizes: bytes and number of tensors by part of the model, expected.
        problems: what `Checkpoint.validate` would refuse, and a tokenizer that does not fit the config.
        page_bytes, slot_bytes: cache bytes per page and per sequence.
        needs: weights per device.
    """

    path: Path
    config: ModelConfig
    topology: Topology
    num_shards: int
    num_expected: int
    num_found: int
    sizes: dict[str, tuple[int, int]]
    problems: tuple[str, ...]
    page_size: int
    page_bytes: int
    slot_bytes: int
    needs: tuple[DeviceNeed, ...]

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all expected tensors."""
        return sum(size for size, _ in self.sizes.values())

    def cache_bytes(self, sequences: int, tokens: int) -> int:
        """Pages and slots of `sequences` sequences of `tokens` tokens each."""
        pages = -(-tokens // self.page_size)
        return sequences * (pages * self.page_bytes + self.slot_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "path": str(self.path),
            "config": dataclasses.asdict(self.config),
            "topology": {
                "boundary": self.topology.boundary,
                "num_stages": self.topology.num_stages,
                "layers": [dataclasses.asdict(role) | {"kind": role.kind} for role in self.topology.layers],
            },
            "coverage": {
                "shards": self.num_shards,
                "expected": self.num_expected,
                "found": self.num_found,
                "problems": list(self.problems),
            },
            "sizes": {part: {"bytes": size, "tensors": count} for part, (size, count) in self.sizes.items()}
            | {"total": {"bytes": self.total_bytes, "tensors": self.num_expected}},
            "memory": {
                "page_size": self.page_size,
                "page_bytes": self.page_bytes,
                "slot_bytes": self.slot_bytes,
                "per_device": [dataclasses.asdict(need) for need in self.needs],
            },
        }


def inspect_checkpoint(
    path: str | Path, *, numerics: Numerics | None = None, page_size: int = 128, max_draft: int = 5
) -> CheckpointReport:
    """Report on the folder at `path`; only headers, config and tokenizer are read.

    Raises:
        CheckpointError, ConfigError: there is no checkpoint, or its config is not valid. Anything wrong with the
            files is in `.problems`.
    """
    # the cache room is above this one; only this report needs it
    from deepinfer.cache.layout import CacheLayout

    checkpoint = Checkpoint.open(path)
    config = parse_config(checkpoint.config)
    topology = Topology.from_config(config)
    expected = expected_tensors(config)
    problems = [*checkpoint.index.problems, *expectation_problems(checkpoint.index.tensors, expected)]
    problems += _tokenizer_problems(config, checkpoint.path)
    layout = CacheLayout.build(config, topology, numerics or Numerics(), page_size, max_draft)
    return CheckpointReport(
        path=checkpoint.path,
        config=config,
        topology=topology,
        num_shards=len(checkpoint.index.shards),
        num_expected=len(expected),
        num_found=sum(name in checkpoint.index.tensors for name in expected),
        sizes=_sizes(expected.values()),
        problems=tuple(problems),
        page_size=page_size,
        page_bytes=layout.page_bytes,
        slot_bytes=layout.slot_bytes,
        needs=_needs(config, list(expected.values())),
    )


def scan_payload(checkpoint: Checkpoint, names: list[str], batch_bytes: int = 1 << 30) -> list[str]:
    """Read every tensor of `names`, in batches, and say which scales hold a byte that no release has."""
    problems: list[str] = []
    batch: list[str] = []
    pending = 0
    for position, name in enumerate(names):
        batch.append(name)
        pending += checkpoint.location(name).entry.nbytes
        if pending < batch_bytes and position + 1 < len(names):
            continue
        for key, tensor in checkpoint.read(batch).items():
            if checkpoint.location(key).entry.dtype == "F8_E8M0":
                try:
                    scale_values(tensor, key)
                except CheckpointError as error:
                    problems.append(str(error))
        batch, pending = [], 0
    return problems


def part_of(spec: TensorSpec) -> str:
    """Part of the model that a tensor belongs to, as size tables name it."""
    name = spec.name
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    stage = "draft " if name.startswith("mtp.") else ""
    if ".engram." in name:
        return "engram tables" if ".engram.embed." in name else "engram"
    if ".experts." in name:
        return f"{stage}routed experts"
    for mark, part in (
        (".shared_experts.", "shared experts"),
        (".ffn.gate.", "router"),
        (".hc_", "hyper-connections"),
        (".indexer.", "indexer"),
        (".compressor.", "compressor"),
        (".attn.", "attention"),
    ):
        if mark in name:
            return f"{stage}{part}"
    if name.startswith("mtp.") and not name.endswith("norm.weight"):
        return "draft heads"
    if name in ("embed.weight", "head.weight"):
        return "embedding and head"
    return f"{stage}norms"


def _sizes(specs: Any) -> dict[str, tuple[int, int]]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for spec in specs:
        entry = totals[part_of(spec)]
        entry[0] += spec.nbytes
        entry[1] += 1
    return {part: (size, count) for part, (size, count) in sorted(totals.items(), key=lambda item: -item[1][0])}


def _needs(config: ModelConfig, specs: list[TensorSpec]) -> tuple[DeviceNeed, ...]:
    """Experts are spread, everything else of the text model is on every device; vision weights are not loaded."""
    tables = sum(spec.nbytes for spec in specs if part_of(spec) == "engram tables")
    backbone = draft = shared = 0
    for spec in specs:
        part = part_of(spec)
        if part == "routed experts":
            backbone += spec.nbytes
        elif part == "draft routed experts":
            draft += spec.nbytes
        elif part not in ("engram tables", "vision"):
            shared += spec.nbytes
    needs = []
    for devices in DEVICE_COUNTS:
        if devices > config.n_routed_experts:
            break
        weights = shared + _share(backbone, config.n_routed_experts, devices)
        weights += _share(draft, config.dspark_n_routed_experts, devices)
        needs.append(DeviceNeed(devices, weights, -(-tables // devices)))
    return tuple(needs)


def _share(total: int, experts: int, devices: int) -> int:
    """Bytes of the device with the most experts."""
    return total // experts * -(-experts // devices)


def _tokenizer_problems(config: ModelConfig, folder: Path) -> list[str]:
    if not (folder / "tokenizer.json").is_file():
        return ["tokenizer.json is missing: text prompts are not possible"]
    try:
        EngramMap.build(config, folder)
    except (CheckpointError, ConfigError) as error:
        return [str(error)]
    return []

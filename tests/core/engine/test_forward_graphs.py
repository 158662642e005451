"""Forward passes from captured graphs give what running them gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.cpu.runtime import CpuRuntime
from deepinfer.engine.build import has_graphs
from deepinfer.engine.forward_graphs import MOST_ROWS, ForwardGraphs
from deepinfer.ops.step import StepInputs
from deepinfer.settings import Settings


class RecordingRuntime(CpuRuntime):
    """A capture is the call itself, made when it is replayed."""

    captures = 0

    def capture(self, function: Callable[[], Any], stream: Any = None) -> Callable[[], Any]:
        self.captures += 1
        return function

    def replay(self, graph: Callable[[], Any], stream: Any = None) -> None:
        graph()


class Model:
    """Logits tell the token and position of the sampled row, and how often the storage was written."""

    def forward(self, inputs: StepInputs, storage: list[int]) -> Any:
        storage[0] += 1
        rows = inputs.sample_rows.clamp(min=0)
        return SimpleNamespace(logits=torch.stack((inputs.token_ids[rows], inputs.positions[rows]), dim=1).float())


def _inputs(rows: int, sampled: int, seed: int) -> StepInputs:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=generator)

    row_fields = ("token_ids", "positions", "slots", "first_positions", "first_rows", "sequences")
    return StepInputs(
        **{name: ids(rows) for name in (*row_fields, "window_low", "commit_rows", "last_positions")},
        **{name: ids(3) for name in ("sample_starts", "sample_counts", "seq_slots", "seq_positions")},
        history=ids(rows, 3),
        is_image=torch.zeros(rows, dtype=torch.bool),
        embed_override=None,
        embed_override_mask=None,
        sample_rows=torch.arange(sampled),
        sample_sequences=torch.arange(sampled),
        sample_positions=ids(sampled),
        page_table=torch.zeros(4, 4, dtype=torch.int32),
    )


@pytest.fixture
def graphs() -> ForwardGraphs:
    return ForwardGraphs(Model(), [0], RecordingRuntime())


def _same(graphs: ForwardGraphs, inputs: StepInputs) -> None:
    wanted = Model().forward(inputs, [0]).logits
    before = graphs._storage[0]
    assert torch.equal(graphs.forward(inputs), wanted)
    assert graphs._storage[0] == before + 1, "a pass must run exactly once"


def test_first_pass_of_a_bucket_runs_and_later_ones_are_replayed(graphs: ForwardGraphs) -> None:
    for seed, (rows, sampled) in enumerate(((8, 8), (8, 2), (4, 4), (8, 0), (4, 1), (8, 8))):
        _same(graphs, _inputs(rows, sampled, seed))
    assert (graphs.passes, graphs.replays, graphs._runtime.captures) == (6, 4, 2)


def test_steps_that_a_graph_cannot_serve_run_as_they_are(graphs: ForwardGraphs) -> None:
    few = _inputs(8, 8, 1)
    for inputs in (replace(few, keep_from=few.slots), _inputs(MOST_ROWS + 1, 3, 2), _inputs(4, 5, 3)):
        for _ in range(3):
            _same(
                graphs, inputs if inputs.sample_rows.shape[0] < 5 else replace(inputs, sample_rows=few.sample_rows % 4)
            )
    assert graphs.replays == 0


def test_failed_capture_is_reported_once_and_steps_go_on(
    graphs: ForwardGraphs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[[], Any], stream: Any = None) -> None:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(graphs._runtime, "capture", refuse)
    for seed in range(4):
        _same(graphs, _inputs(8, 8, seed))
    assert graphs.replays == 0
    assert [record.message for record in caplog.records] == [
        "steps run kernel by kernel: the forward pass cannot be captured (operation not permitted)"
    ]


@pytest.mark.parametrize(("able", "eager", "wanted"), [(True, False, True), (True, True, False), (False, False, False)])
def test_graphs_are_used_where_the_backend_has_them_unless_switched_off(able: bool, eager: bool, wanted: bool) -> None:
    backend = SimpleNamespace(capabilities=lambda: SimpleNamespace(graphs=able))
    loaded: Any = SimpleNamespace(backend=backend)
    assert has_graphs(loaded, Settings(enforce_eager=eager)) is wanted

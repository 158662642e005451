"""What happens inside: streams, sub-layer outputs, routing, selections, mixes and n-gram gates of every layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.driver import Driver
from support.golden import Prompt
from support.recorder import Recorder, recording_graph
from torch import Tensor

RECORDED = (
    "embedding",
    "hyper_connection_expand",
    "hyper_connection_head",
    "stream_mean",
    "route",
    "select_topk",
    "candidate_blocks",
    "mixes_from_logits",
    "engram_gate",
    "engram_hash",
)


@functools.cache
def _record(prompt: Prompt, dtype: torch.dtype, mode: str) -> Recorder:
    model = prompt.golden.model(dtype, mode)
    graph, recorder = recording_graph(model, *RECORDED)
    driver = Driver(model, slots=1, pages=-(-prompt.length // model.layout.page_size), graph=graph)
    driver.admit(1)
    logits = driver.prefill(1, prompt.ids)
    plain = Driver(model, slots=1, pages=-(-prompt.length // model.layout.page_size))
    plain.admit(1)
    torch.testing.assert_close(logits, plain.prefill(1, prompt.ids), rtol=0, atol=1e-4)
    return recorder


def _positions(prompt: Prompt) -> Tensor:
    return torch.from_numpy(prompt["positions"]).long()


def _compare(prompt: Prompt, mode: str, name: str, ours: Callable[[Recorder], Tensor]) -> None:
    """Off: 1e-4 absolute and relative. On: the prompt's tolerance, in float32 or, after a rounding flip, in float64."""
    recorded = prompt[f"{mode}.{name}"].astype(np.float64)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if mode == "off" else {"rtol": 1e-3, "atol": prompt.tolerance(mode)}

    def check(dtype: torch.dtype) -> None:
        got = ours(_record(prompt, dtype, mode)).double().numpy()
        np.testing.assert_allclose(got, recorded, **tolerance, err_msg=f"{prompt.key} {mode} {name}")

    if mode == "off":
        check(torch.float32)
        return
    try:
        check(torch.float32)
    except AssertionError:
        check(torch.float64)


@pytest.mark.recorded("hidden")
def test_streams(prompt: Prompt, mode: str) -> None:
    layers, rows = prompt.golden.model(torch.float32, mode).config.num_hidden_layers, _positions(prompt)

    def streams(recorder: Recorder) -> Tensor:
        calls = recorder.calls["hyper_connection_expand"]
        assert len(calls) == 2 * layers
        embedded = recorder.calls["embedding"][0].result
        first = embedded[:, None].expand(-1, calls[0].result.shape[1], -1)
        return torch.stack([values[rows] for values in (first, *(call.result for call in calls[1::2]))])

    _compare(prompt, mode, "hidden", streams)


@pytest.mark.parametrize(("name", "offset"), [("attn_out", 0), ("ffn_out", 1)])
@pytest.mark.recorded("attn_out")
def test_sublayer_outputs(prompt: Prompt, mode: str, name: str, offset: int) -> None:
    rows = _positions(prompt)

    def branches(recorder: Recorder) -> Tensor:
        return torch.stack([call.args[1][rows] for call in recorder.calls["hyper_connection_expand"][offset::2]])

    _compare(prompt, mode, name, branches)


@pytest.mark.recorded("taps")
def test_draft_inputs(prompt: Prompt, mode: str) -> None:
    rows = _positions(prompt)
    _compare(
        prompt, mode, "taps", lambda found: torch.cat([call.result[rows] for call in found.calls["stream_mean"]], -1)
    )


@pytest.mark.recorded("final")
def test_final_rows(prompt: Prompt, mode: str) -> None:
    rows = _positions(prompt)
    _compare(prompt, mode, "final", lambda found: found.calls["hyper_connection_head"][0].result[1][rows])


@pytest.mark.recorded("moe_ids")
def test_routing(prompt: Prompt, mode: str) -> None:
    rows = _positions(prompt)
    calls = _record(prompt, torch.float32, mode).calls["route"]
    ids = torch.stack([call.result[0][rows] for call in calls])
    np.testing.assert_array_equal(ids.numpy(), prompt[f"{mode}.moe_ids"])
    _compare(
        prompt, mode, "moe_weights", lambda found: torch.stack([call.result[1][rows] for call in found.calls["route"]])
    )


def _sources(prompt: Prompt, mode: str) -> dict[int, int]:
    """Index of the call by index source layer."""
    topology = prompt.golden.model(torch.float32, mode).topology
    return {layer: order for order, layer in enumerate(topology.index_sources)}


@pytest.mark.recorded("topk.")
def test_selected_entries(prompt: Prompt, mode: str) -> None:
    rows, calls = _positions(prompt), _record(prompt, torch.float32, mode).calls["select_topk"]
    sources, different = _sources(prompt, mode), 0
    assert len(calls) == len(sources) == len(prompt.names(f"{mode}.topk."))
    for layer, order in sources.items():
        ours, recorded = calls[order].result[rows].numpy(), prompt[f"{mode}.topk.{layer}"]
        different += int((ours != recorded).any(1).sum())
    assert different <= (0 if mode == "off" else prompt.measured[mode]["topk_set_diffs"])


@pytest.mark.recorded("index_score.")
def test_index_scores(prompt: Prompt, mode: str) -> None:
    rows = _positions(prompt)
    for layer, order in _sources(prompt, mode).items():
        recorded = prompt[f"{mode}.index_score.{layer}"]

        def scores(found: Recorder, order: int = order, width: int = recorded.shape[1]) -> Tensor:
            given = found.calls["select_topk"][order].args[0][rows]
            assert bool((given[:, width:] == -torch.inf).all())
            return given[:, :width]

        _compare(prompt, mode, f"index_score.{layer}", scores)


@pytest.mark.recorded("candidate_blocks.")
def test_candidate_blocks(prompt: Prompt, mode: str) -> None:
    names = prompt.names(f"{mode}.candidate_blocks.")
    calls = _record(prompt, torch.float32, mode).calls["candidate_blocks"]
    assert len(calls) == len(names) == 1
    recorded = prompt[names[0]]
    blocks = calls[0].result[_positions(prompt)]
    ours = np.stack([np.isin(np.arange(recorded.shape[1]), row) for row in blocks.numpy()])
    np.testing.assert_array_equal(ours, recorded)


@pytest.mark.recorded("mhc.")
def test_hyper_connection_mixes(prompt: Prompt, mode: str) -> None:
    names = prompt.names(f"{mode}.mhc.")
    rows = _positions(prompt)
    for name in names:
        _, _, layer, sublayer, part = name.split(".")
        order = 2 * int(layer) + (sublayer == "ffn")
        _compare(
            prompt,
            mode,
            name.removeprefix(f"{mode}."),
            lambda found, order=order, part=part: getattr(found.calls["mixes_from_logits"][order].result, part)[rows],
        )


@pytest.mark.recorded("engram_gate.")
def test_ngram_gates(prompt: Prompt, mode: str) -> None:
    rows = _positions(prompt)
    layers = prompt.golden.model(torch.float32, mode).config.engram_layer_ids
    for order, layer in enumerate(layers):

        def gate(found: Recorder, order: int = order) -> Tensor:
            call = found.calls["engram_gate"][order]
            streams, key_value = call.args[0].double(), call.args[1].double()
            value = key_value[:, None, -streams.shape[-1] :]
            # out = streams + gate * value: project the change onto the value.
            return (((call.result.double() - streams) * value).sum(-1) / value.square().sum(-1))[rows]

        _compare(prompt, mode, f"engram_gate.{layer}", gate)


def test_ngram_rows(prompt: Prompt) -> None:
    calls = _record(prompt, torch.float32, "off").calls["engram_hash"]
    ours = torch.stack([call.result for call in calls], dim=1)
    np.testing.assert_array_equal(ours.numpy(), prompt["engram_ids"])

"""Which compressed entries a row attends to (spec/model 7.3, 7.4), seen at the ops of a recording graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from support.driver import Driver
from support.models import GOLDEN_SLOW, property_model, random_tokens
from support.recorder import Call, Recorder, recording_graph
from torch import Tensor

from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.models.deepseek_v41.spec import DeepseekV41

pytestmark = pytest.mark.parametrize("name", GOLDEN_SLOW)

RECORDED = ("select_topk", "candidate_blocks", "index_select", "sparse_attention", "index_scores")


@dataclass(frozen=True)
class Seen:
    """Per index source layer, over all rows of a sequence: entries [T, k]; blocks of the candidate source [T, b]."""

    entries: dict[int, Tensor]
    blocks: Tensor | None


def _run(model: DeepseekV41, tokens: list[int], chunks: list[int]) -> tuple[Seen, Recorder]:
    graph, recorder = recording_graph(model, *RECORDED)
    driver = Driver(model, slots=1, pages=-(-len(tokens) // model.layout.page_size), graph=graph)
    driver.admit(1)
    driver.prefill(1, tokens, chunks)
    sources = model.topology.index_sources
    calls = recorder.calls["select_topk"]
    entries = {
        layer: torch.cat([call.result for call in calls[order :: len(sources)]]) for order, layer in enumerate(sources)
    }
    found = [call.result for call in recorder.calls["candidate_blocks"]]
    return Seen(entries, torch.cat(found) if found else None), recorder


def _length(model: DeepseekV41) -> int:
    """More entries than the candidate blocks hold, so that both levels restrict."""
    return model.config.candidate_topk_blocks * model.config.candidate_block_size * 2 + 7


def _visible(model: DeepseekV41, layer: int, rows: int) -> Tensor:
    return (torch.arange(rows) + 1) // model.topology.layers[layer].ratio


def test_counts_and_order(name: str) -> None:
    model = property_model(name)
    tokens, k = random_tokens(model, _length(model), 1), model.config.index_topk
    seen, _ = _run(model, tokens, [])
    for layer, entries in seen.entries.items():
        visible = _visible(model, layer, len(tokens))
        assert torch.equal((entries >= 0).sum(1), visible.clamp(max=k)), layer
        assert bool((entries < visible[:, None]).all())
        for row, count in zip(entries, visible.clamp(max=k).tolist(), strict=True):
            chosen = row[:count]
            assert bool((chosen[1:] > chosen[:-1]).all())
            assert bool((row[count:] == -1).all())


def test_everything_is_chosen_while_it_fits(name: str) -> None:
    model = property_model(name)
    tokens, k = random_tokens(model, _length(model), 2), model.config.index_topk
    seen, _ = _run(model, tokens, [5, 9])
    for layer, entries in seen.entries.items():
        for row, visible in zip(entries, _visible(model, layer, len(tokens)).tolist(), strict=True):
            if visible <= k:
                assert row.tolist() == [*range(visible), *[-1] * (k - visible)]


@pytest.mark.parametrize("chunk", [1, 3, 8, 31])
def test_selection_does_not_depend_on_chunks(name: str, chunk: int) -> None:
    model = property_model(name)
    length = _length(model) if chunk > 1 else 40
    tokens = random_tokens(model, length, 3)
    once, _ = _run(model, tokens, [])
    split, _ = _run(model, tokens, [chunk] * (length // chunk))
    for layer, entries in once.entries.items():
        assert torch.equal(split.entries[layer], entries), layer
    if once.blocks is not None:
        assert split.blocks is not None
        assert torch.equal(split.blocks, once.blocks)


def test_entries_of_earlier_chunks_are_found(name: str) -> None:
    model = property_model(name)
    tokens, chunk = random_tokens(model, _length(model), 4), model.layout.page_size
    seen, _ = _run(model, tokens, [chunk] * (len(tokens) // chunk))
    rows = torch.arange(len(tokens))
    starts = rows - rows % chunk
    for layer, entries in seen.entries.items():
        older = (entries >= 0) & (entries < (starts // model.topology.layers[layer].ratio)[:, None])
        far = starts >= 2 * chunk
        assert float(older[far].any(1).float().mean()) > 0.9, layer
        if layer <= min(model.topology.index_sources):
            # Some row far behind reaches an entry of the very first chunk.
            assert bool((entries[far] // (chunk // model.topology.layers[layer].ratio) == 0).any())


def test_reuse_layers_attend_to_their_source(name: str) -> None:
    model = property_model(name)
    _, recorder = _run(model, random_tokens(model, 50, 5), [])
    published = {
        layer: call.result[0]
        for layer, call in zip(model.topology.index_sources, recorder.calls["index_select"], strict=True)
    }
    attended: list[Call] = recorder.calls["sparse_attention"]
    assert len(attended) == model.config.num_hidden_layers
    for role, call in zip(model.topology.layers, attended, strict=True):
        selection = call.args[5]
        if role.index_source is None:
            assert selection is None
        else:
            assert selection is published[role.index_source]


def test_restricted_layers_stay_inside_the_candidate_blocks(name: str) -> None:
    model = property_model(name)
    tokens, size = random_tokens(model, _length(model), 6), model.config.candidate_block_size
    seen, _ = _run(model, tokens, [20])
    assert seen.blocks is not None
    restricted = [role.layer for role in model.topology.layers if role.uses_candidates and role.is_index_source]
    assert restricted
    for row in range(len(tokens)):
        blocks = seen.blocks[row][seen.blocks[row] >= 0]
        visible = (row + 1) // model.topology.layers[restricted[0]].ratio
        assert blocks.numel() == min(model.config.candidate_topk_blocks, -(-visible // size))
        assert (visible - 1) // size in blocks.tolist()
        for layer in restricted:
            chosen = seen.entries[layer][row]
            assert bool(torch.isin(chosen[chosen >= 0] // size, blocks).all())


def test_ample_candidate_blocks_restrict_nothing(name: str) -> None:
    model = property_model(name)
    tokens = random_tokens(model, _length(model), 7)

    def entries(**changes: object) -> list[Tensor]:
        layers = tuple(
            layer
            if layer.index is None
            else dataclasses.replace(layer, index=dataclasses.replace(layer.index, **changes))
            for layer in model.weights.layers
        )
        recorder = Recorder(model.table, ("select_topk",))
        graph = Graph(model.config, dataclasses.replace(model.weights, layers=layers), recorder)
        driver = Driver(model, slots=1, pages=-(-len(tokens) // model.layout.page_size), graph=graph)
        driver.admit(1)
        driver.prefill(1, tokens)
        return [call.result for call in recorder.calls["select_topk"]]

    ample = entries(candidate_blocks=len(tokens))
    unrestricted = entries(uses_candidates=False)
    assert all(torch.equal(left, right) for left, right in zip(ample, unrestricted, strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(entries(), unrestricted, strict=True))


def test_entries_beyond_the_visible_ones_have_no_score(name: str) -> None:
    model = property_model(name)
    tokens = random_tokens(model, 40, 8)
    _, recorder = _run(model, tokens, [])
    for layer, call in zip(model.topology.index_sources, recorder.calls["index_scores"], strict=True):
        visible = _visible(model, layer, len(tokens))
        numbers = torch.arange(call.result.shape[1])
        assert bool((torch.isfinite(call.result) == (numbers < visible[:, None])).all()), layer

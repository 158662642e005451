"""Logits, greedy continuations and drafts against the recorded ones, over caches, in float32 and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.golden import GoldenSet, Prompt
from support.golden_runs import distance, greedy_run, judge, prompt_logits


def _logits_distance(prompt: Prompt, mode: str) -> float:
    run = greedy_run(prompt, torch.float32, mode)
    return distance(run.logits[torch.from_numpy(prompt["logits_rows"]).long()], prompt[f"{mode}.logits"])


def _exact_ids(golden: GoldenSet, mode: str) -> dict[str, bool]:
    return {
        prompt.key: greedy_run(prompt, torch.float32, mode).ids == prompt[f"{mode}.greedy"].tolist()
        for prompt in golden.prompts
    }


def test_float32_logits_of_prompts(golden: GoldenSet, mode: str) -> None:
    distances = {prompt.key: _logits_distance(prompt, mode) for prompt in golden.prompts}
    judge(golden, mode, distances, _exact_ids(golden, mode))


def test_float64_logits_of_the_last_row(prompt: Prompt, mode: str) -> None:
    logits = prompt_logits(prompt, torch.float64, mode)[-1]
    assert logits.dtype is torch.float64
    assert distance(logits, prompt[f"{mode}.last_logits_f64"]) <= 1e-5


def test_greedy_ids_one_by_one_over_the_caches(prompt: Prompt, mode: str) -> None:
    assert greedy_run(prompt, torch.float32, mode).ids == prompt[f"{mode}.greedy"].tolist()


def test_float64_greedy_ids(prompt: Prompt, mode: str) -> None:
    ids = greedy_run(prompt, torch.float64, mode).ids
    assert ids == prompt[f"{mode}.greedy"][: len(ids)].tolist()


def test_logits_that_chose_the_greedy_tokens(golden: GoldenSet, mode: str) -> None:
    distances = {}
    for prompt in golden.prompts:
        choosing = greedy_run(prompt, torch.float32, mode).choosing
        best = choosing.gather(1, torch.from_numpy(prompt[f"{mode}.greedy_top5_ids"]).long())
        distances[prompt.key] = max(
            distance(best, prompt[f"{mode}.greedy_top5_logits"]),
            distance(choosing[-1], prompt[f"{mode}.greedy_last_logits"]),
        )
    judge(golden, mode, distances, _exact_ids(golden, mode))


@pytest.mark.parametrize("chunk", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_prompts_in_chunks(golden: GoldenSet, mode: str, chunk: int) -> None:
    distances, exact = {}, {}
    for prompt in golden.prompts:
        whole = prompt.length <= chunk
        run = greedy_run(prompt, torch.float32, mode, 0 if whole else chunk)
        rows = torch.from_numpy(prompt["logits_rows"]).long()
        distances[prompt.key] = distance(run.logits[rows], prompt[f"{mode}.logits"])
        exact[prompt.key] = run.ids == prompt[f"{mode}.greedy"].tolist()
    judge(golden, mode, distances, exact)
    assert all(exact.values()), exact


def test_top5_of_every_choice(prompt: Prompt) -> None:
    choosing = greedy_run(prompt, torch.float32, "off").choosing
    recorded = prompt["off.greedy_top5_logits"]
    # The order within the five is only fixed where neighbours are further apart than twice the tolerance.
    clear = (recorded[:, :-1] - recorded[:, 1:] > 2 * prompt.tolerance("off")).all(1)
    ids = choosing.topk(5).indices.numpy()
    np.testing.assert_array_equal(ids[clear, :4], prompt["off.greedy_top5_ids"][clear, :4])


def test_drafts(golden: GoldenSet, mode: str) -> None:
    distances = dict.fromkeys((prompt.key for prompt in golden.prompts), 0.0)
    seen = 0
    for prompt in golden.prompts:
        for step in prompt.draft_steps:
            draft, name = greedy_run(prompt, torch.float32, mode).drafts[step], f"{mode}.draft{step}"
            assert [draft.first_position, draft.anchor] == prompt[f"{name}.pos"].tolist(), name
            assert draft.ids.tolist() == prompt[f"{name}.ids"].tolist(), (prompt.key, name)
            gap = max(
                distance(draft.logits, prompt[f"{name}.logits"]),
                distance(draft.confidence_logits, prompt[f"{name}.conf_logit"]),
            )
            distances[prompt.key] = max(distances[prompt.key], gap)
            seen += 1
    assert seen
    judge(golden, mode, distances, _exact_ids(golden, mode))


def test_float64_confidences(golden: GoldenSet, mode: str) -> None:
    for prompt in golden.prompts:
        for step in prompt.draft_steps:
            draft = greedy_run(prompt, torch.float64, mode).drafts[step]
            assert distance(draft.confidence_logits, prompt[f"{mode}.draft{step}.conf_logit_f64"]) <= 1e-5
            assert draft.ids.tolist() == prompt[f"{mode}.draft{step}.ids"].tolist()


def test_a_draft_pass_leaves_no_trace(golden: GoldenSet, mode: str) -> None:
    drafts = [
        draft
        for prompt in golden.prompts
        if prompt.draft_steps
        for draft in greedy_run(prompt, torch.float32, mode).drafts.values()
    ]
    assert drafts
    assert all(draft.left_no_trace for draft in drafts)


def test_modes_differ_so_that_the_quantisers_are_seen(prompt: Prompt) -> None:
    off, on = (prompt_logits(prompt, torch.float32, mode) for mode in ("off", "on"))
    assert float((off - on).abs().max()) > 0.1

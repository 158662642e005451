"""Straight-line runs of golden prompts, each made once per process, and the rules that judge them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from support.driver import Driver
from support.golden import GoldenSet, Prompt

__all__ = ["DraftRun", "GreedyRun", "distance", "greedy_run", "judge", "prompt_logits"]

STEPS = 24


@dataclass(frozen=True)
class DraftRun:
    """One draft pass and whether it left the caches as they were."""

    ids: Tensor
    logits: Tensor
    confidence_logits: Tensor
    first_position: int
    anchor: int
    left_no_trace: bool


@dataclass(frozen=True)
class GreedyRun:
    """A prompt and its continuation, one token at a time over the caches.

    Attributes:
        logits: [len, V] of the prompt. ids: the 24 tokens (fewer in float64). choosing: [24, V] logits that chose each of them.
        drafts: by number of greedy tokens that were run.
    """

    logits: Tensor
    ids: list[int]
    choosing: Tensor
    drafts: dict[int, DraftRun]


@functools.cache
def greedy_run(prompt: Prompt, dtype: torch.dtype, mode: str, chunk: int = 0) -> GreedyRun:
    """Prefill (whole, or in chunks), then 24 greedy tokens with draft passes where the set has them.

    In float64 the continuation ends with the last draft pass.
    """
    steps = STEPS if dtype is torch.float32 else max(prompt.draft_steps, default=0) + 1
    model = prompt.golden.model(dtype, mode)
    pages = -(-(prompt.length + STEPS + 2) // model.layout.page_size)
    driver = Driver(model, slots=1, pages=pages)
    driver.admit(1)
    logits = driver.prefill(1, prompt.ids, [chunk] * (prompt.length // chunk) if chunk else ())
    choosing, ids, drafts = [logits[-1]], [int(logits[-1].argmax())], {}
    for step in range(steps):
        if step in prompt.draft_steps:
            drafts[step] = _draft(driver, ids[-1], prompt.length + step)
        if step == steps - 1:
            break
        choosing.append(driver.decode(1))
        ids.append(int(choosing[-1].argmax()))
    return GreedyRun(logits, ids, torch.stack(choosing), drafts)


def _draft(driver: Driver, anchor: int, position: int) -> DraftRun:
    before = driver.storage.slots.clone(), driver.storage.pages.clone()
    result = driver.draft(1, anchors=[anchor])
    after = driver.storage.slots, driver.storage.pages
    same = all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    return DraftRun(result.ids[0], result.logits[0], result.confidence_logits[0], position, anchor, same)


def prompt_logits(prompt: Prompt, dtype: torch.dtype, mode: str) -> Tensor:
    """Logits of all rows of a prompt that is run whole: [len, V]."""
    return greedy_run(prompt, dtype, mode).logits


def distance(ours: Tensor | np.ndarray, recorded: np.ndarray) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    ours = ours.double().numpy() if isinstance(ours, Tensor) else np.asarray(ours, np.float64)
    assert ours.shape == recorded.shape
    gap = np.abs(ours - recorded.astype(np.float64)).max(initial=0.0)
    return float(gap) if np.isfinite(gap) else float("inf")


def judge(golden: GoldenSet, mode: str, distances: dict[str, float], exact: dict[str, bool]) -> None:
    """The README's rule: all prompts within tolerance; with quantisers on, a quarter may meet a rounding flip.

    A prompt that meets one needs exact greedy ids and a float64 run within 1e-5 of the recorded float64 logits.
    """
    failed = {prompt.key for prompt in golden.prompts if not distances[prompt.key] <= prompt.tolerance(mode)}
    allowed = 0 if mode == "off" else len(golden.prompts) * 2 // 9
    assert len(failed) <= allowed, {key: distances[key] for key in failed}
    for prompt in golden.prompts:
        if prompt.key in failed:
            assert exact[prompt.key], f"{prompt.key}: distance {distances[prompt.key]} and other greedy ids"
            logits = prompt_logits(prompt, torch.float64, mode)[-1]
            assert distance(logits, prompt[f"{mode}.last_logits_f64"]) <= 1e-5, prompt.key

"""The recorded drafts inside running engines: batched, chunked, behind rejections, behind preemption."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.golden import GoldenSet, Prompt
from torch import Tensor

from deepinfer.conformance.scripted import ScriptedDrafts
from deepinfer.engine.build import build_engine
from deepinfer.engine.loader import load_model
from deepinfer.ops.step import SlotRecords
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import load_settings

VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked, preempted": {"max_prefill_chunk": 16, "preempt_every": 4},
    "synchronous, few at a time": {"zero_overhead_scheduling": False, "max_num_seqs": 2},
}


@dataclass
class Watched:
    """Keeps what the model drafts, and proposes each prompt's recorded continuation instead.

    A wrong draft stands wherever a block would otherwise pass a recorded place, so every one of them is reached, behind
    blocks that were accepted and blocks that were refused.
    """

    model: Any
    prompts: tuple[Prompt, ...]
    mode: str
    seen: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    storage: Any = None

    def __call__(self, anchors: Tensor, positions: Tensor, slots: Tensor, records: SlotRecords) -> ScriptedDrafts:
        drafts = self.model.draft(anchors, positions, slots, self.storage)
        ids = torch.full_like(drafts.ids, -1)
        for row, (slot, position, anchor) in enumerate(
            zip(slots.tolist(), positions.tolist(), anchors.tolist(), strict=True)
        ):
            if slot < 0 or anchor < 0:
                continue
            number = int(records.seed[slot])
            self.seen[number, position + 1] = drafts.ids[row].tolist()
            ids[row] = torch.tensor(self.propose(self.prompts[number], position))
        return ScriptedDrafts(ids, drafts.confidences)

    def propose(self, prompt: Prompt, position: int) -> list[int]:
        """Five drafts behind the token after `position`."""
        ahead = [place for step in prompt.draft_steps if (place := self.place(prompt, step)) > position + 1]
        said = prompt[f"{self.mode}.greedy"].tolist()
        known = said[position + 2 - prompt.length :][:5]
        drafts = known + [-1] * (5 - len(known))
        stop = min(ahead, default=position + 7) - position - 2
        if stop < len(known):
            drafts[stop] = (drafts[stop] + 1) % 500
        return drafts

    def place(self, prompt: Prompt, step: int) -> int:
        """Position of the first row of a recorded draft block."""
        return int(prompt[f"{self.mode}.draft{step}.pos"][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_of_running_engines(golden: GoldenSet, mode: str, variant: str) -> None:
    options = {"max_num_seqs": 9, **VARIANTS[variant]}
    arguments = {name: options.pop(name) for name in ("max_prefill_chunk", "preempt_every") if name in options}
    settings = load_settings(
        accelerator="cpu",
        compute_dtype="float32",
        activation_quant=False,
        cache_quant=mode == "on",
        max_model_len=640,
        page_size=16,
        use_nextn_decode=5,
        **options,
    )
    loaded = load_model(golden.path, settings)
    watched = Watched(loaded.model, golden.prompts, mode)
    core = build_engine(loaded, settings, num_pages=200, poison_released=True, drafter=watched, **arguments).core
    watched.storage = core.runner.storage
    params = SamplingParams(temperature=0, ignore_eos=True)
    running = [
        core.add(prompt.key, np.array(prompt.ids, np.int64), params, seed=number, max_tokens=24)
        for number, prompt in enumerate(golden.prompts)
    ]
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()
    for prompt, generation in zip(golden.prompts, running, strict=True):
        assert generation.token_ids == prompt[f"{mode}.greedy"].tolist(), prompt.key
    compared = 0
    for number, prompt in enumerate(golden.prompts):
        for step in prompt.draft_steps:
            found = watched.seen[number, watched.place(prompt, step)]
            assert found == prompt[f"{mode}.draft{step}.ids"].tolist(), (prompt.key, step)
            compared += 1
    assert compared > 5
    assert core.stats.accepted_drafts > 50
    assert core.stats.verified_drafts > core.stats.accepted_drafts
    assert core.stats.preemptions > 0 or "preempted" not in variant
    core.close()

"""The engine on the real graph with the tiny checkpoint: same bits whatever runs beside a request."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.engine.core import EngineCore
from deepinfer.engine.runner import ModelRunner
from deepinfer.errors import CheckpointError, InvalidRequest
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.scheduler import Scheduler

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "batch_invariant": True,
    "max_model_len": 160,
    "page_size": 16,
    "poison_released": True,
}
PROMPTS = [
    [7],
    list(range(20, 37)),
    [(11 * i) % 480 + 3 for i in range(40)],
    [(7 * i * i) % 480 + 3 for i in range(33)],
    [9, 9, 9, 9],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, seed=2, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2**63 + 5, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **OPTIONS) as llm:
        yield llm
        llm._core.scheduler.assert_idle()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [
        llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def tokens(llm: LLM, order: list[int]) -> list[list[int]]:
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert all(out.error is None for out in outputs)
    return [out.outputs[0].token_ids for out in outputs]


def settle(llm: LLM) -> None:
    """Wait until the device has heard of everything that was released."""
    done = threading.Event()
    llm._core.executor.run(done.set)
    assert done.wait(60)


def test_alone_together_and_in_any_order(llm: LLM, alone: list[list[int]]) -> None:
    assert [len(ids) for ids in alone] == [7, 7, 7, 7, 3]
    assert tokens(llm, [0, 1, 2, 3, 4]) == alone
    assert tokens(llm, [4, 2, 0, 3, 1]) == [alone[i] for i in (4, 2, 0, 3, 1)]
    assert tokens(llm, [2, 2, 2]) == [alone[2]] * 3


@pytest.mark.parametrize(
    "limits",
    [
        {"max_prefill_chunk": 1, "max_num_seqs": 2},
        {"max_prefill_chunk": 7, "max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"max_num_batched_tokens": 40, "page_size": 64, "max_num_seqs": 5},
        {"num_pages": 10, "max_num_seqs": 1},
    ],
)
def test_no_limit_changes_a_bit(llm: LLM, tiny: Path, alone: list[list[int]], limits: dict[str, Any]) -> None:
    with LLM(tiny, **{**OPTIONS, **limits}) as other:
        assert other.numerics_id == llm.numerics_id
        assert tokens(other, [0, 1, 2, 3, 4]) == alone
        other._core.scheduler.assert_idle()


def test_padding_rows_change_nothing(llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm._core.scheduler
    padded = dataclasses.replace(scheduler.config, row_bucket=lambda rows: -(-rows // 16) * 16 + 16)
    monkeypatch.setattr(scheduler, "config", padded)
    assert tokens(llm, [0, 1, 2, 3, 4]) == alone


def test_poison_of_everything_unowned_is_never_read(llm: LLM, alone: list[list[int]]) -> None:
    """What nobody owns nor caches is poisoned, so what a request reads it has written itself or found by its key."""
    storage, scheduler = llm._core.runner.storage, llm._core.scheduler
    tokens(llm, [0, 1, 2, 3, 4])
    scheduler.assert_idle()
    settle(llm)
    written = (storage.pages != 0xFF).any(1)
    assert int(written.sum()) == scheduler.pages.num_cached > 0
    assert bool((storage.slots[: scheduler.slots.num_slots] == 0xFF).all())
    scheduler.prefix.clear()
    settle(llm)
    assert bool((storage.pages == 0xFF).all())


def test_a_reused_slot_gives_the_same_logits(tiny: Path, alone: list[list[int]]) -> None:
    """H2: another request in the same slot leaves nothing behind."""
    with LLM(tiny, **{**OPTIONS, "max_num_seqs": 1, "poison_released": False}) as single:
        for _ in range(2):
            assert tokens(single, [1, 2, 0]) == [alone[1], alone[2], alone[0]]


def test_several_engines_in_one_process(llm: LLM, tiny: Path, alone: list[list[int]]) -> None:
    with LLM(tiny, **OPTIONS) as other:
        assert tokens(other, [1]) == tokens(llm, [1]) == [alone[1]]


def test_bad_requests_beside_good_ones(llm: LLM, alone: list[list[int]]) -> None:
    image = 510
    prompts: list[Any] = [PROMPTS[0], [3, image], [512], [], [5] * 160, [6], [6], PROMPTS[1]]
    params: list[Any] = [PARAMS[0], *[None] * 4, {"temperature": float("nan")}, {"max_tokens": -1}, PARAMS[1]]
    outputs = llm.generate(prompts, params)
    messages = [str(out.error) for out in outputs]
    assert messages[1].startswith(f"prompt_token_ids: id {image} at index 1 stands for an image")
    assert messages[2] == "prompt_token_ids: id 512 at index 0 is outside the vocabulary 0..511"
    assert messages[3].startswith("prompt: the prompt is empty")
    assert messages[4].startswith("prompt: 160 tokens leave no room for output in the context of 160 tokens")
    assert messages[5].startswith("temperature: nan is not")
    assert messages[6].startswith("max_tokens: -1 is not")
    assert all(isinstance(out.error, InvalidRequest) for out in outputs[1:7])
    assert [outputs[0].outputs[0].token_ids, outputs[7].outputs[0].token_ids] == alone[:2]


def test_an_unknown_model_path() -> None:
    with pytest.raises(CheckpointError, match=r"no model '\./nowhere'"):
        LLM("./nowhere", accelerator="cpu")


def test_drafting_fills_the_records_and_changes_no_token(llm: LLM, alone: list[list[int]]) -> None:
    model = llm._loaded.model
    traits = model.traits
    config = SchedulerConfig(2, 32, 160, traits.page_size, history_width=traits.ngram_size - 1)
    runner = ModelRunner(model, num_pages=30, num_slots=3, max_pages=config.max_pages, num_drafts=traits.max_drafts)
    core = EngineCore(runner, Scheduler(config, PagePool(30), SlotPool(3)))
    generation = core.add("a", np.array(PROMPTS[1]), PARAMS[1], seed=1, max_tokens=7)
    core.step()
    slot = generation.request.slot
    records = runner.records
    assert int(records.next_token[slot]) == generation.token_ids[0]
    assert int(records.draft_count[slot]) == traits.max_drafts == records.drafts.shape[1]
    drafts = records.drafts[slot]
    assert bool(((drafts >= 0) & (drafts < traits.vocab_size)).all())
    assert bool(torch.isfinite(records.confidences[slot]).all())
    while core.num_unfinished:
        core.step()
    assert generation.token_ids == alone[1]
    core.scheduler.assert_idle()

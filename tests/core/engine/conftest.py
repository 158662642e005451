"""A small deterministic model whose tokens depend on everything that it must find in pages, slots and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.reader import ReadStats
from deepinfer.engine.build import build_engine
from deepinfer.engine.loader import LoadedModel
from deepinfer.models.traits import ModelTraits
from deepinfer.ops import cache, grammar_mask, logits, metadata, rejection, sampling, verification
from deepinfer.ops.step import StepInputs
from deepinfer.settings import Settings

VOCAB = 37
EOS = 1
IMAGE = 5
NGRAM = 3
PAGE = 4
RING = 6
STATES = 8
SLOT_BYTES = STATES * 16
MODULUS = 1_000_003


def chain(state: int, token: int, position: int) -> int:
    """The model's memory of everything up to a position."""
    return (state * 31 + token * 7 + position) % MODULUS


def logits_of(state: int) -> Tensor:
    """Logits after a state: float32 [VOCAB]."""
    generator = torch.Generator().manual_seed(state)
    return 3 * torch.randn(VOCAB, generator=generator)


@dataclass
class Storage:
    """Pages hold tokens, slots a ring of (position, state) of the last positions; 0xFF bytes read as -1."""

    pages: Tensor
    slots: Tensor

    def poison(self, slot: int, pages: Tensor) -> None:
        self.slots[slot] = 0xFF
        self.pages[pages] = 0xFF


class FakeModel:
    """Implements `ServedModel`; raises where it meets poison or wrong metadata."""

    device = torch.device("cpu")

    def __init__(self, context: int = 64) -> None:
        self.traits = ModelTraits(
            vocab_size=VOCAB,
            context=context,
            eos_token_ids=frozenset({EOS}),
            image_token_id=IMAGE,
            ngram_size=NGRAM,
            max_drafts=0,
            page_size=PAGE,
            page_bytes=PAGE * 8,
            slot_bytes=SLOT_BYTES,
            ring_length=RING,
            weight_bytes=1000,
            resume_slack=STATES - 1,
        )
        ops = SimpleNamespace(
            expand_plan=metadata.expand_plan,
            commit_step=metadata.commit_step,
            verify_coupled=verification.verify_coupled,
            copy_blocks=cache.copy_blocks,
            apply_filters=sampling.apply_filters,
            sample_rows=sampling.sample_rows,
            add_bias=logits.add_bias,
            apply_penalties=logits.apply_penalties,
            apply_token_mask=grammar_mask.apply_token_mask,
            forbid_tokens=logits.forbid_tokens,
            force_tokens=logits.force_tokens,
            count_tokens=logits.count_tokens,
            token_logprobs=logits.token_logprobs,
        )
        for name in (
            "add_bias",
            "apply_penalties",
            "forbid_tokens",
            "force_tokens",
            "count_tokens",
            "token_logprobs",
        ):
            setattr(ops, name, getattr(logits, name))
        ops.draw_drafts, ops.judge_drafts = rejection.draw_drafts, rejection.judge_drafts
        ops.sample_step = sampling.sample_step(ops)
        ops.draft_step, ops.judge_step = rejection.draft_step(ops), rejection.judge_step(ops)
        self.table = ops
        self.load_stats = ReadStats()
        self.fail_on: Callable[[list[int]], bool] = lambda slots: False
        self.poison_logits: Callable[[int], bool] = lambda state: False
        self.rows_seen: list[int] = []

    def workspace_bytes(self, limits: Any) -> int:
        return limits.rows * 8

    def allocate_caches(self, num_pages: int, num_slots: int) -> Storage:
        return Storage(
            torch.full((num_pages, PAGE * 8), 0xFF, dtype=torch.uint8),
            torch.full((num_slots, SLOT_BYTES), 0xFF, dtype=torch.uint8),
        )

    def forward(self, inputs: StepInputs, storage: Storage) -> Any:
        pages, slots = storage.pages.view(torch.int64).numpy(), storage.slots.view(torch.int64).numpy()
        table, history, first = inputs.page_table.numpy(), inputs.history.numpy(), inputs.first_positions.numpy()
        self.rows_seen.append(int((inputs.slots >= 0).sum()))
        slots = slots.reshape(slots.shape[0], STATES, 2)
        states: dict[int, int] = {}
        after: list[int] = []
        rows = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.slots.tolist(), strict=True)
        for row, (token, position, slot) in enumerate(rows):
            if slot < 0:
                assert token == position == -1
                after.append(-1)
                continue
            assert slot > 0
            assert 0 <= token < VOCAB
            if position == first[row]:
                previous, state = (-1, 0) if position == 0 else slots[slot, (position - 1) % STATES].tolist()
                assert previous == position - 1, "the slot belongs to another position"
            else:
                state = states[slot]
            page = table[slot, position // PAGE]
            assert page > 0, "no page was granted"
            pages[page, position % PAGE] = token
            for distance in range(1, NGRAM):
                before = position - distance
                expected = -1
                if before >= 0:
                    expected = pages[table[slot, before // PAGE], before % PAGE]
                    assert expected >= 0, "read poison from a page"
                assert history[row, distance - 1] == expected
            states[slot] = chain(state, token, position)
            slots[slot, position % STATES] = position, states[slot]
            after.append(states[slot])
        if self.fail_on(inputs.seq_slots.tolist()):  # in the middle: caches are written, records are not
            raise RuntimeError("kernel fell over")
        found = torch.full((inputs.sample_rows.shape[0], VOCAB), torch.nan)
        for index, row in enumerate(inputs.sample_rows.tolist()):
            if row >= 0:
                found[index] = torch.nan if self.poison_logits(after[row]) else logits_of(after[row])
        return SimpleNamespace(logits=found)

    def draft(self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: Storage, choose: Any) -> Any:
        pytest.fail("the fake has no drafter; an engine over it must bring one")


class DraftingModel(FakeModel):
    """A fake whose drafter reads the caches: it knows the target's logits, mixed with others by `fault` 0 .. 1."""

    def __init__(self, *, num_drafts: int = 5, fault: float = 0.0) -> None:
        super().__init__()
        self.traits = dataclasses.replace(self.traits, max_drafts=num_drafts)
        self.fault = fault

    def draft(self, anchors: Tensor, positions: Tensor, slots: Tensor, storage: Storage, choose: Any) -> Any:
        states = storage.slots.view(torch.int64).view(storage.slots.shape[0], STATES, 2)
        live = [row for row in range(slots.shape[0]) if slots[row] >= 0 and anchors[row] >= 0]
        state = {}
        for row in live:
            position = int(positions[row])
            found, before = states[int(slots[row]), position % STATES].tolist()
            assert found == position, "the caches are behind or past the accepted rows"
            state[row] = chain(before, int(anchors[row]), position + 1)
        drawn = []
        for k in range(self.traits.max_drafts):
            rows = torch.zeros(slots.shape[0], VOCAB)
            for row in live:
                rows[row] = (1 - self.fault) * logits_of(state[row]) + self.fault * logits_of(state[row] + 1)
            drawn.append(rows.argmax(-1) if choose is None else choose(rows, k))
            for row in live:
                state[row] = chain(state[row], int(drawn[-1][row]), int(positions[row]) + 2 + k)
        ids = torch.stack(drawn, 1)
        # As in the model a confidence knows the drafts before its own.
        known = torch.where(ids[:, :-1] % 2 == 0, 0.05, 0.95)
        return SimpleNamespace(ids=ids, confidences=torch.cat([torch.full((ids.shape[0], 1), 0.75), known], 1))


def naive(prompt: list[int], params: Any, limit: int, seed: int) -> tuple[list[int], str]:
    """One request alone, straight from the definitions."""
    state = 0
    for position, token in enumerate(prompt):
        state = chain(state, token, position)
    length, out = len(prompt), []
    while True:
        row = logits_of(state)[None]
        temperature = torch.tensor([params.temperature], dtype=torch.float32)
        scaled = sampling.apply_filters(
            row,
            temperature,
            torch.tensor([params.top_k], dtype=torch.int32),
            torch.tensor([params.top_p], dtype=torch.float32),
        )
        signed = seed - 2**64 if seed >= 2**63 else seed
        position = torch.tensor([length + len(out)])
        zero = torch.zeros(1, dtype=torch.int32)
        token = int(sampling.sample_rows(scaled, temperature, torch.tensor([signed]), position, zero))
        out.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return out, "stop"
        if len(out) == limit:
            return out, "length"
        state = chain(state, token, length + len(out) - 1)


@pytest.fixture
def fake_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def drafting_model() -> type[DraftingModel]:
    return DraftingModel


@pytest.fixture
def make_engine() -> Callable[..., Any]:
    """Build an engine around a fake model."""

    def make(
        model: FakeModel,
        *,
        num_pages: int | None = None,
        max_prefill_chunk: int | None = None,
        preempt_every: int = 0,
        drafter: Any = None,
        executor: Any = None,
        **settings: Any,
    ) -> Any:
        given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "use_nextn_decode": 0, **settings}
        return build_engine(
            LoadedModel(model, numerics_id="fake"),
            Settings(**given),
            num_pages=num_pages,
            max_prefill_chunk=max_prefill_chunk,
            poison_released=True,
            preempt_every=preempt_every,
            drafter=drafter,
            executor=executor,
        ).core

    return make


@pytest.fixture
def fake_rules() -> SimpleNamespace:
    """The fake model's definition: `chain` and `logits_of`."""
    return SimpleNamespace(chain=chain, logits_of=logits_of)


@pytest.fixture
def naive_model() -> Callable[..., tuple[list[int], str]]:
    return naive

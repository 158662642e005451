"""`expand_plan` and `commit_step` against loops over rows, and the way from a NumPy plan to the device."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.engine.runner import history_length, pack_plan
from deepinfer.ops.contract import CONTRACTS
from deepinfer.ops.metadata import commit_step, expand_plan
from deepinfer.ops.step import PlanTensors, SlotRecords, StepInputs
from deepinfer.scheduler.plan import SamplingRows, StepPlan


def loop_expand(
    records: SlotRecords, plan: PlanTensors, row_bucket: int, sample_bucket: int, ring_length: int, ngram_size: int
) -> Any:
    """What the contract says, one row at a time, in plain Python."""
    size = records.history.shape[1]
    for slots in (plan.released_slots, plan.admitted_slots):
        for slot in (s for s in slots.tolist() if s >= 0):
            records.length[slot] = records.draft_count[slot] = 0
            records.next_token[slot] = -1
            for name in ("drafts", "history", "page_table"):
                getattr(records, name)[slot] = -1
            records.confidences[slot] = 0
    for index, slot in enumerate(plan.admitted_slots.tolist()):
        if slot < 0:
            continue
        length = int(plan.admitted_lengths[index])
        records.length[slot] = length
        for name in ("temperature", "top_p", "top_k", "seed", "completion"):
            getattr(records, name)[slot] = getattr(plan, f"admitted_{name}")[index]
        for back, token in enumerate(reversed(plan.admitted_tokens[index].tolist()), start=1):
            if length - back >= 0:
                records.history[slot, (length - back) % size] = token
    for slot, index, page in zip(
        plan.page_slots.tolist(), plan.page_indices.tolist(), plan.page_ids.tolist(), strict=True
    ):
        if slot >= 0:
            records.page_table[slot, index] = page
    nothing: dict[str, Any] = dict.fromkeys(
        ("token_ids", "positions", "slots", "first_positions", "first_rows", "sequences", "window_low", "commit_rows"),
        -1,
    )
    unsampled = dict.fromkeys(("sample_rows", "sample_sequences", "sample_positions"), -1)
    rows: list[dict[str, Any]] = []
    sequences: list[dict[str, Any]] = []
    sampled: list[dict[str, Any]] = []
    host = iter(plan.host_tokens.tolist())
    for sequence, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.row_counts.tolist(), strict=True)):
        first_row, first = len(rows), int(records.length[slot])
        known: dict[int, int] = {p: int(records.history[slot, p % size]) for p in range(max(0, first - size), first)}
        prefill, live = bool(plan.is_prefill[sequence]), count if slot >= 0 else 0
        if not prefill and live:
            live = min(count, 1 + int(records.draft_count[slot])) if records.next_token[slot] >= 0 else 0
        starts = len(sampled)
        for offset in range(count):
            if offset >= live:
                rows.append(dict(nothing, history=[-1] * (ngram_size - 1)))
                sampled += [dict(unsampled)] * bool(plan.samples[sequence] and not prefill)
                continue
            position = first + offset
            if prefill:
                token = next(host)
            else:
                token = int(records.next_token[slot] if offset == 0 else records.drafts[slot, offset - 1])
            history = [known.get(position - back, -1) if position >= back else -1 for back in range(1, ngram_size)]
            known[position] = token
            if plan.samples[sequence] and (not prefill or offset == count - 1):
                entry = {"sample_rows": len(rows), "sample_sequences": sequence, "sample_positions": position}
                sampled.append(entry)
            rows.append(
                {
                    "token_ids": token,
                    "positions": position,
                    "slots": slot,
                    "first_positions": first,
                    "first_rows": first_row,
                    "sequences": sequence,
                    "history": history,
                    "window_low": 0,
                    "commit_rows": position % ring_length if offset >= live - ring_length else -1,
                }
            )
        sequences.append(
            {
                "sample_starts": starts,
                "sample_counts": sum(entry["sample_rows"] >= 0 for entry in sampled[starts:]),
                "seq_slots": slot if live else -1,
                "seq_positions": first + live - 1 if live else -1,
            }
        )
    rows += [dict(nothing, history=[-1] * (ngram_size - 1))] * (row_bucket - len(rows))
    sampled += [dict(unsampled)] * (sample_bucket - len(sampled))
    return rows, sequences, sampled


def column(table: list[dict[str, Any]], name: str) -> list[Any]:
    return [entry[name] for entry in table]


@pytest.mark.parametrize("size", ["tiny", "odd", "real"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_expand_plan(size: Any, seed: int) -> None:
    for sample in CONTRACTS["expand_plan"].samples(size, torch.Generator().manual_seed(seed)):
        expected = copy.deepcopy(sample.kwargs)
        poison = {name: value[0].clone() for name, value in vars(sample.kwargs["records"]).items()}
        inputs = expand_plan(**sample.kwargs)
        rows, sequences, sampled = loop_expand(**expected)
        for name in (
            "token_ids",
            "positions",
            "slots",
            "first_positions",
            "first_rows",
            "sequences",
            "window_low",
            "commit_rows",
            "history",
        ):
            assert getattr(inputs, name).tolist() == column(rows, name), (sample.label, name)
        for name in ("sample_starts", "sample_counts", "seq_slots", "seq_positions"):
            assert getattr(inputs, name).tolist() == column(sequences, name), (sample.label, name)
        for name in ("sample_rows", "sample_sequences", "sample_positions"):
            assert getattr(inputs, name).tolist() == column(sampled, name), (sample.label, name)
        assert not inputs.is_image.any()
        assert inputs.embed_override is None
        records = sample.kwargs["records"]
        assert inputs.page_table is records.page_table
        for name, value in vars(records).items():
            assert torch.equal(value, getattr(expected["records"], name)), (sample.label, name)
            assert torch.equal(value[0], poison[name]), "slot 0 was written"


def loop_commit(
    records: SlotRecords, inputs: StepInputs, tokens: Any, rejected: Any, drafts: Any, confidences: Any
) -> None:
    size = records.history.shape[1]
    for index, slot in enumerate(inputs.seq_slots.tolist()):
        if slot < 0:
            continue
        sampled = int(inputs.sample_counts[index]) > 0
        records.length[slot] = int(inputs.seq_positions[index]) + 1 - (0 if rejected is None else int(rejected[index]))
        records.next_token[slot] = tokens[index] if sampled else -1
        records.drafts[slot], records.confidences[slot], records.draft_count[slot] = -1, 0, 0
        if drafts is not None and sampled:
            records.drafts[slot, : drafts.shape[1]] = drafts[index]
            records.confidences[slot, : drafts.shape[1]] = confidences[index]
            records.draft_count[slot] = int((drafts[index] >= 0).sum())
    for token, position, slot in zip(
        inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.slots.tolist(), strict=True
    ):
        if slot >= 0:
            records.history[slot, position % size] = token


@pytest.mark.parametrize("size", ["tiny", "odd", "real"])
def test_commit_step(size: Any) -> None:
    for sample in CONTRACTS["commit_step"].samples(size, torch.Generator().manual_seed(7)):
        expected = copy.deepcopy(sample.kwargs)
        commit_step(**sample.kwargs)
        loop_commit(**expected)
        for name, value in vars(sample.kwargs["records"]).items():
            assert torch.equal(value, getattr(expected["records"], name)), (sample.label, name)


def test_fewer_drafts_than_the_record_holds() -> None:
    records = SlotRecords.allocate(3, 2, 4, 16)
    sample = next(
        s
        for s in CONTRACTS["commit_step"].samples("tiny", torch.Generator().manual_seed(1))
        if s.label == "one decode row"
    )
    records.drafts[:] = 9
    inputs = sample.kwargs["inputs"]
    inputs.seq_slots[:] = 1
    commit_step(records, inputs, torch.tensor([5]), None, torch.tensor([[7, -1]]), torch.tensor([[0.5, 0.0]]))
    assert records.drafts[1].tolist() == [7, -1, -1, -1]
    assert records.confidences[1].tolist() == [0.5, 0, 0, 0]
    assert records.draft_count[1] == 1


def test_history_survives_long_and_short_chunks() -> None:
    """However a text is cut into steps, every row sees the same ids before it."""
    text = list(range(10, 40))
    seen = []
    for cuts in ([30], [1] * 30, [7, 1, 1, 12, 9], [17, 13]):
        records = SlotRecords.allocate(2, 1, 0, history_length(4, 0))
        rows: list[Any] = []
        start = 0
        for cut in cuts:
            plan = StepPlan(
                step=0,
                slots=np.array([1], np.int32),
                row_counts=np.array([cut], np.int32),
                is_prefill=np.array([True]),
                host_tokens=np.array(text[start : start + cut], np.int64),
                samples=np.array([False]),
                row_bucket=cut + 2,
            )
            inputs = expand_plan(records, pack_plan(plan, torch.from_numpy), plan.row_bucket, 0, 8, 4)
            rows += inputs.history[:cut].tolist()
            commit_step(records, inputs, torch.full((1,), -1))
            start += cut
        seen.append(rows)
        assert records.length[1] == 30
    assert seen[0][0] == [-1, -1, -1]
    assert seen[0][5] == [14, 13, 12]
    assert all(rows == seen[0] for rows in seen)


def test_pack_plan_keeps_every_value() -> None:
    plan = StepPlan(
        step=3,
        slots=np.array([2, 1], np.int32),
        row_counts=np.array([1, 3], np.int32),
        is_prefill=np.array([False, True]),
        host_tokens=np.array([5, 6, 7], np.int64),
        samples=np.array([True, False]),
        row_bucket=4,
        page_slots=np.array([1], np.int32),
        page_indices=np.array([0], np.int32),
        page_ids=np.array([9], np.int32),
        admitted_slots=np.array([1, 3], np.int32),
        admitted_lengths=np.array([0, 4], np.int32),
        admitted_tokens=np.array([[-1, -1], [8, 9]], np.int64),
        admitted_sampling=SamplingRows(
            np.array([0.7, 1e-6], np.float32),
            np.array([-1, 5], np.int32),
            np.array([0.1, 1], np.float32),
            np.array([2**64 - 1, 3], np.uint64).view(np.int64),
            np.array([0, 1], np.int32),
        ),
        released_slots=np.array([3], np.int32),
    )
    packed = pack_plan(plan, torch.from_numpy)
    for name in (
        "slots",
        "row_counts",
        "is_prefill",
        "host_tokens",
        "samples",
        "page_slots",
        "page_indices",
        "page_ids",
        "admitted_slots",
        "admitted_lengths",
        "admitted_tokens",
        "released_slots",
    ):
        assert getattr(packed, name).tolist() == getattr(plan, name).tolist()
    sampling = plan.admitted_sampling
    for name in ("temperature", "top_k", "top_p", "seed", "completion"):
        assert np.array_equal(getattr(packed, f"admitted_{name}").numpy(), getattr(sampling, name))
    assert packed.admitted_temperature.dtype is packed.admitted_top_p.dtype is torch.float32
    assert packed.admitted_seed.dtype is torch.int64


def test_history_length_covers_rows_in_flight() -> None:
    assert history_length(4, 0) == 16
    assert history_length(4, 5) == 16
    assert history_length(4, 8) == 32
    assert history_length(1, 0) == 16

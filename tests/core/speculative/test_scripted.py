"""The scripted drafter is right as often as it says, and at the same places in any company."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer.conformance.scripted import ScriptedDrafter

LENGTH = 400


def records(*seeds: int) -> Any:
    """Records of slots 1, 2, ..."""
    return SimpleNamespace(seed=torch.tensor([0, *seeds]))


def draft(drafter: ScriptedDrafter, seeds: list[int], position: int, slots: list[int] | None = None) -> Any:
    count = len(seeds)
    chosen = torch.arange(1, count + 1) if slots is None else torch.tensor(slots)
    return drafter(torch.full((count,), 3), torch.full((count,), position), chosen, records(*seeds))


def make(acceptance: Any = 0.5, **more: Any) -> ScriptedDrafter:
    outputs = {seed: (2, [(7 * seed + index) % 50 for index in range(LENGTH)]) for seed in range(1, 21)}
    return ScriptedDrafter(3, outputs, acceptance, **more)


def test_acceptance_is_as_given() -> None:
    given = {seed: seed / 20 for seed in range(1, 21)}
    drafter = make(given)
    right = torch.zeros(20, 3)
    rounds = range(1, LENGTH - 4)
    for position in rounds:
        found = draft(drafter, list(given), position)
        truth = torch.tensor([drafter.outputs[seed][1][position : position + 3] for seed in given])
        right += found.ids == truth
    expected = torch.tensor(list(given.values()))[:, None]
    deviation = 5 * (expected * (1 - expected) / len(rounds)).sqrt() + 1e-6
    assert ((right / len(rounds) - expected).abs() < deviation).all()
    assert torch.allclose(found.confidences, expected.expand(20, 3))
    assert math.isclose(float(right[-1].min()), len(rounds))


def test_a_draft_depends_on_request_and_position_alone() -> None:
    drafter = make()
    together = draft(drafter, [4, 9, 2], 30).ids
    assert torch.equal(draft(drafter, [9], 30).ids[0], together[1])
    # One position later the block begins one token later and says the same.
    assert torch.equal(draft(drafter, [9], 31).ids[0, :2], together[1, 1:])


def test_the_end_strangers_and_padding() -> None:
    drafter = make(1.0)
    assert draft(drafter, [1], LENGTH - 1).ids.tolist() == [[drafter.outputs[1][1][LENGTH - 1], 0, 0]]
    assert draft(drafter, [99], 5).ids.tolist() == [[0, 0, 0]]
    padding = drafter(torch.tensor([-1]), torch.tensor([-1]), torch.tensor([-1]), records(1))
    assert padding.ids.tolist() == [[-1, -1, -1]]
    wrong = draft(make(0.0), [1], 10).ids[0].tolist()
    assert all(mine != right for mine, right in zip(wrong, drafter.outputs[1][1][10:13], strict=True))


def test_what_runs_beside_is_called_with_the_same_block() -> None:
    calls: list[Any] = []
    drafter = make(beside=lambda *arguments: calls.append(arguments))
    draft(drafter, [1, 2], 5)
    assert [part.tolist() for part in calls[0]] == [[3, 3], [5, 5], [1, 2]]

"""Pages from budgets, and errors that print the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.build import plan_memory
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.memory_plan import MemoryPlan, MemoryRequest
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.settings import Settings


def request(**changes: int) -> MemoryRequest:
    sizes = {
        "weights": 1000,
        "workspaces": 200,
        "logits": 100,
        "records": 50,
        "slot_bytes": 30,
        "page_bytes": 10,
        "num_slots": 5,
        "min_pages": 4,
        "full_pages": 40,
    }
    return MemoryRequest(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("arguments", "pages"),
    [
        ({}, 41),  # all that is useful, and page 0
        ({"budget": 10_000}, 41),
        ({"budget": 1000 + 200 + 100 + 50 + 150 + 10 * 12}, 12),
        ({"cache_bytes": 150 + 10 * 9}, 9),
        ({"cache_bytes": 150 + 10 * 9, "num_pages": 20}, 21),
        ({"num_pages": 2}, 3),
        ({"budget": 1500 + 10 * 8, "num_pages": 7}, 8),
    ],
)
def test_number_of_pages(arguments: dict[str, Any], pages: int) -> None:
    plan = MemoryPlan.build(request(), **arguments)
    assert plan.num_pages == pages
    assert plan.total == 1500 + 10 * pages


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budget": 1500 + 10 * 4}, "one request of the longest length needs 4 pages, 3 fit; lower max_model_len"),
        ({"budget": 100}, "one request of the longest length needs 4 pages, 0 fit"),
        ({"cache_bytes": 160}, "one request of the longest length needs 4 pages, 0 fit"),
        ({"budget": 1500 + 10 * 4, "num_pages": 9}, "9 pages were asked for, 3 fit"),
        ({"num_pages": 0}, "no page is left to hand out"),
    ],
)
def test_what_does_not_fit(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(CapacityError) as caught:
        MemoryPlan.build(request(), **arguments)
    message = str(caught.value)
    assert message.startswith(text)
    for name in ("weights", "workspaces", "logits and sampling", "draft logits", "slot records", "5 x 30 B", "total"):
        assert name in message
    assert ("allowed" in message) == ("budget" in arguments)


@given(budget=st.integers(0, 3000), cache=st.one_of(st.none(), st.integers(0, 1000)))
def test_a_plan_never_exceeds_its_budget(budget: int, cache: int | None) -> None:
    try:
        plan = MemoryPlan.build(request(), budget=budget, cache_bytes=cache)
    except CapacityError:
        return
    assert plan.total <= budget
    assert cache is None or plan.num_pages * 10 + 150 <= cache
    assert 4 <= plan.num_pages - 1 <= 40


@pytest.mark.parametrize(
    ("rows", "sampled"),
    [
        (None, {0: 8, 1: 16, 5: 48}),
        (30, {0: 8, 1: 16, 5: 30}),  # A step has no more rows than its budget.
    ],
)
def test_drafts_take_logits_of_their_rows_and_of_their_drafter(
    fake_model: Any, rows: int | None, sampled: dict[int, int]
) -> None:
    """Per row 4 bytes a logit at least, with 37 ids; the drafter holds each draft's logits twice."""
    settings = Settings(max_num_seqs=8, max_num_batched_tokens=rows, use_nextn_decode=0)
    plans = {
        drafts: plan_memory(LoadedModel(fake_model, numerics_id="fake"), settings, num_drafts=drafts)[0]
        for drafts in sampled
    }
    for drafts, plan in plans.items():
        request = plan.request
        assert request.drafts == 2 * 8 * drafts * 37 * 4
        more = sampled[drafts] - sampled[0]
        assert request.logits - plans[0].request.logits >= more * 37 * 4
        assert (request.logits == plans[0].request.logits) == (more == 0)
        assert f"{request.drafts / 2**20:,.1f} MiB" in plan.describe()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_pages": "a"}, "num_pages: 'a' is not a positive integer"),
        ({"num_pages": -3}, "num_pages: -3 is not a positive integer"),
        ({"num_pages": True}, "num_pages: True is not a positive integer"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk: 0 is not a positive integer"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(fake_model: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(LoadedModel(fake_model, numerics_id="fake"), Settings(), **arguments)
    assert str(caught.value) == text


def test_pages_of_another_size_than_the_loaded_ones_are_refused(fake_model: Any) -> None:
    size = fake_model.traits.page_size
    loaded = LoadedModel(fake_model, numerics_id="fake")
    plan_memory(loaded, Settings(page_size=size))
    with pytest.raises(ConfigError, match=f"page_size: {2 * size} differs from the pages of {size} tokens"):
        plan_memory(loaded, Settings(page_size=2 * size))

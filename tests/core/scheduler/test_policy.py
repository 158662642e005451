"""A scheduling policy of one's own: named in the settings, followed by queue, rows and preemption."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.errors import ConfigError
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.policy import Policy, PriorityOrder, load_policy
from deepinfer.scheduler.request import FinishReason, Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.settings import load_settings

PAGE = Path(__file__).parents[3] / "docs" / "loop.md"


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy of the documentation, importable."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    module = ModuleType("shortest")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "shortest", module)
    monkeypatch.setenv("DEEPINFER_SCHEDULING_POLICY", "shortest:ShortestFirst")
    return load_settings().scheduling_policy


def make(policy: Policy, **limits: Any) -> Scheduler:
    given = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 40, "page_size": 4, **limits}
    config = SchedulerConfig(**given)
    return Scheduler(config, PagePool(9), SlotPool(config.max_num_seqs + 1), policy=policy)


def test_the_documented_policy_orders_queue_rows_and_preemption(shortest: str) -> None:
    policy = load_policy(shortest)
    assert isinstance(policy, Policy)
    scheduler = make(policy)
    for name, length in (("long", 12), ("short", 2), ("middle", 5)):
        scheduler.add(Request(name, np.arange(length), 20))
    assert [item.request_id for item in policy] == ["short", "middle", "long"]
    step = scheduler.plan()
    assert step is not None
    assert [item.request_id for item in step.requests] == ["short", "middle"]
    scheduler.complete(0)
    scheduler.preempt_worst()
    assert [item.request_id for item in policy] == ["middle", "long"], "the longer of the running ones gave way"
    for name in ("long", "short", "middle"):
        scheduler.abort(name)
    scheduler.assert_idle()


def test_every_request_ends_under_it(shortest: str) -> None:
    scheduler = make(load_policy(shortest), host_bytes=0)
    items = [Request(str(length), np.arange(length), 6) for length in (9, 3, 14, 1, 7)]
    for item in items:
        scheduler.add(item)
    ended = []
    while scheduler.has_work():
        step = scheduler.plan()
        assert step is not None
        scheduler.complete(step.plan.step)
        for item, samples in zip(step.requests, step.plan.samples.tolist(), strict=True):
            item.output += [7] * samples
            if len(item.output) == item.max_tokens:
                scheduler.finish(item, FinishReason.LENGTH)
                ended.append(item.request_id)
    assert sorted(ended) == sorted(item.request_id for item in items)
    scheduler.assert_idle()


def test_without_a_name_it_is_priority_and_arrival() -> None:
    assert isinstance(load_policy(load_settings().scheduling_policy), PriorityOrder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere:Policy", "'nowhere:Policy' is no `module:factory` that can be called: ModuleNotFoundError"),
        ("math", "'math' is no `module:factory` that can be called: AttributeError"),
        ("builtins:dict", "'builtins:dict' gives a dict, which lacks push, peek, remove, rank"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_reason(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(name)
    assert str(caught.value).startswith(f"scheduling_policy: {text}")

"""When a plan copies the state of a decoding sequence into a snapshot."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.prefix import root_key
from deepinfer.cache.reuse import PrefixCache
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler


@pytest.mark.parametrize(("slack", "copies"), [(5, True), (4, False)])
def test_rows_past_the_end_of_a_page_are_bounded(slack: int, copies: bool) -> None:
    """The first decode step reaches the page's end at 4 for sure, and may write up to position 8: five rows past it."""
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=40,
        page_size=4,
        num_drafts=5,
        lookahead=5,
        resume_slack=slack,
    )
    pages = PagePool(20)
    prefix = PrefixCache(root_key(b"", "", 4, ""), 4, pages, first_snapshot=2, num_snapshots=3)
    scheduler = Scheduler(config, pages, SlotPool(2), prefix=prefix)
    scheduler.add(Request("a", np.arange(3), 30))
    prompt, decode = scheduler.plan(), scheduler.plan()
    assert prompt is not None
    assert decode is not None
    assert (prompt.plan.row_counts.tolist(), decode.plan.row_counts.tolist()) == ([3], [6])
    assert prompt.plan.snapshot_copies.size == 0
    assert (decode.plan.snapshot_copies[:, 0].tolist() == decode.plan.slots.tolist()) == copies
    scheduler.abort("a")
    scheduler.complete(1)
    scheduler.assert_idle()

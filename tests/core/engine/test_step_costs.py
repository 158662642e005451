"""Step costs: measured once before an engine serves, kept, found again, and never in the way of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.conformance.scripted import ScriptedDrafter
from deepinfer.errors import ConfigError
from deepinfer.sampling.params import SamplingParams

DRAFTS = 2


class OtherDrafter(ScriptedDrafter):
    """Takes times of its own."""


@pytest.fixture
def make(fake_model: Any, make_engine: Any, tmp_path: Path) -> Any:
    def build(drafter: Any = None, **options: Any) -> Any:
        given = {"max_num_seqs": 3, "decode_perf_cache_dir": tmp_path / "costs", **options}
        return make_engine(
            fake_model,
            drafter=ScriptedDrafter(DRAFTS, {}, 0.5) if drafter is None else drafter,
            use_nextn_decode=DRAFTS,
            enable_mtp_varlen=True,
            **given,
        )

    return build


def test_costs_are_measured_once_and_kept(make: Any, fake_model: Any, tmp_path: Path) -> None:
    core = make()
    assert max(fake_model.rows_seen) == 3 * (1 + DRAFTS)
    (path,) = (tmp_path / "costs").iterdir()
    measured = path.read_bytes()
    core.scheduler.assert_idle()
    core.close()
    fake_model.rows_seen.clear()
    make().close()
    assert not fake_model.rows_seen
    assert path.read_bytes() == measured
    make(max_num_seqs=2).close()
    assert max(fake_model.rows_seen) == 2 * (1 + DRAFTS)
    make(OtherDrafter(DRAFTS, {}, 0.5)).close()
    assert len(list((tmp_path / "costs").iterdir())) == 3, "whatever changes the time of a step is part of the key"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_measured_engines_say_what_others_say(make: Any, naive_model: Any, asynchronous: bool) -> None:
    """The slots and pages that were measured with are served as if nobody had used them."""
    prompts = [[7, 9, 11], [8] * 9, [30]]
    params = SamplingParams(temperature=0.7, ignore_eos=True)
    expected = [naive_model(prompt, params, 12, seed)[0] for seed, prompt in enumerate(prompts)]
    outputs = {seed: (len(prompt), expected[seed]) for seed, prompt in enumerate(prompts)}
    core = make(ScriptedDrafter(DRAFTS, outputs, {0: 0.9, 1: 0.2, 2: 0.6}), zero_overhead_scheduling=asynchronous)
    running = [
        core.add(str(seed), np.array(prompt), params, seed=seed, max_tokens=12) for seed, prompt in enumerate(prompts)
    ]
    while core.num_unfinished:
        core.step()
    assert [generation.token_ids for generation in running] == expected
    core.scheduler.assert_idle()
    core.close()


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"max_model_len": 20}, "max_model_len", "a context of 20 tokens is too short to time decode steps; give 25"),
        (
            {"num_pages": 7, "max_model_len": 25},
            "cache_memory",
            "7 cache pages are too few to time decode steps; give 8",
        ),
    ],
)
def test_too_small_to_measure(make: Any, options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(**options)
    assert caught.value.field == field

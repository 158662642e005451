"""Speculation as a user has it: settings, one boundary, drafts drawn as the target draws, rejection, statistics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.conformance.scripted import ScriptedDrafter
from deepinfer.engine.build import build_engine
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.metrics import metrics_text
from deepinfer.errors import ConfigError
from deepinfer.models.traits import number_of_drafts
from deepinfer.settings import Settings

PROMPT = [7, 8, 9]
ONE = torch.tensor([1])
WANTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.9},
    "greedy penalties": {"frequency_penalty": 2.0, "temperature": 0},
    "bans": {"banned_token_ids": [*range(12)], "logit_bias": {13: 3.0, 14: -100}},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": [*range(6, 25)]},
    "forced": {"golden_token_ids": [9, -1, 9, 30, -1, 31, 6], "temperature": 0.5},
}


def ask(model: Any, wanted: dict[str, dict[str, Any]], *, drafter: Any = None, **options: Any) -> tuple[Any, Any]:
    """The generations of requests that run together, by name, and their engine."""
    arguments = {name: options.pop(name) for name in ("preempt_every", "max_prefill_chunk") if name in options}
    settings = Settings(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})
    loaded = LoadedModel(model, Path(), None, "fake")
    core = build_engine(loaded, settings, poison_released=True, drafter=drafter, **arguments).core
    found = {}
    for index, (name, item) in enumerate(wanted.items()):
        given = {"temperature": 1.0, "seed": 50 + index, "max_tokens": 20, "ignore_eos": True, "logprobs": 1, **item}
        params = SamplingParams(**given)
        prompt = np.array(PROMPT, np.int64)
        found[name] = core.add(name, prompt, params, seed=params.seed, max_tokens=params.max_tokens)
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()
    core.close()
    return found, core


def said(generations: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (item.token_ids, item.logprobs, item.finish_reason, item.stop_reason, item.error)
        for name, item in generations.items()
    }


# ---- settings ------------------------------------------------------------------------------------------------------


def test_number_of_drafts() -> None:
    """H12: more than the checkpoint was trained for is refused with the number to use; fewer are allowed."""
    assert [number_of_drafts(asked, 5) for asked in (None, 0, 3, 5)] == [5, 0, 3, 5]
    assert [number_of_drafts(asked, 0) for asked in (None, 0)] == [0, 0]
    with pytest.raises(ConfigError, match=r"^use_nextn_decode: 7 drafts .* blocks of 5; use a value from 0 to 5$"):
        number_of_drafts(7, 5)
    with pytest.raises(
        ConfigError, match="1 drafts per step were asked for, the checkpoint has no draft stages; use 0"
    ):
        number_of_drafts(1, 0)


def test_lengths_through_the_public_api(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", "tiny")
    options = {"accelerator": "cpu", "batch_invariant": True, "max_model_len": 64, "num_threads": 1}
    for wrong, text in ((7, "blocks of 5; use a value from 0 to 5"), (-1, ">= 0")):
        with pytest.raises(ConfigError, match=text):
            LLM(path, use_nextn_decode=wrong, **options)
    with pytest.raises(ConfigError, match="2 temperatures are listed, the checkpoint drafts blocks of 5; give one"):
        LLM(path, dflash_confidence_head_temperature="1,2", **options)
    said = {}
    for drafts in (None, 0, 3):
        with LLM(path, use_nextn_decode=drafts, **options) as llm:
            assert llm._core.runner.num_drafts == (5 if drafts is None else drafts)
            params = SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            said[drafts] = output.outputs[0].token_ids
            assert (output.metrics.num_drafts_verified > 0) is (drafts != 0)
            assert (llm.stats.speculation is None) is (drafts == 0)
    assert said[None] == said[0] == said[3]


def test_confidences_have_their_temperature(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", "tiny")
    options = {"accelerator": "cpu", "max_model_len": 64, "num_threads": 1, "max_num_seqs": 1}
    for text, expected in (("2", [2.0] * 5), ("1,2,3,4,0.5", [1.0, 2.0, 3.0, 4.0, 0.5])):
        with LLM(path, dflash_confidence_head_temperature=text, **options) as llm:
            assert llm._loaded.model.weights.draft.temperature.tolist() == expected


# ---- one boundary --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("end", range(1, 14))
def test_every_kind_of_end_at_every_place_of_a_block(fake_model: Any, end: int, asynchronous: bool) -> None:
    """H13: with all drafts accepted, tokens, logprobs, reasons and usage are those without drafts."""
    letters = {"allowed_token_ids": [1, *range(6, 32)]}
    free = ask(fake_model, {"free": letters}, use_nextn_decode=0)[0]["free"].token_ids
    kinds: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": end},
        "stop id": {"stop_token_ids": [free[end - 1]], "seed": 50},
        "stop id, not before": {"stop_token_ids": [1, *range(6, 28)], "min_tokens": end - 1},
        "EOS": {"golden_token_ids": [*free[: end - 1], 1], "ignore_eos": False},
    }
    wanted = {name: {**letters, **item} for name, item in kinds.items()}
    plain = ask(fake_model, wanted, use_nextn_decode=0)[0]
    outputs = {item.request.sampling.seed: (len(PROMPT), item.token_ids + free) for item in plain.values()}
    outputs[50] = (len(PROMPT), free)
    options = {"use_nextn_decode": 5, "zero_overhead_scheduling": asynchronous}
    drafted = ask(fake_model, wanted, drafter=ScriptedDrafter(5, outputs, 1.0), **options)[0]
    assert said(drafted) == said(plain)
    for name, item in drafted.items():
        count = len(item.token_ids)
        assert count == item.metrics.num_generated_tokens == len(item.logprobs), name
        # All of what came after the first token came in blocks of six.
        assert item.metrics.num_steps <= 2 + -(-(count - 1) // 6) + asynchronous, name
    assert [len(drafted[name].token_ids) for name in ("length", "EOS")] == [end, end]


# ---- drafting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_drafter_that_knows_the_target_is_always_right(
    drafting_model: Callable[..., Any], asynchronous: bool
) -> None:
    """Drafts have the target's noise, filters, penalties, bans, minimum lengths and forced tokens of their places."""
    plain = ask(drafting_model(), WANTED, use_nextn_decode=0)[0]
    drafted, core = ask(drafting_model(), WANTED, zero_overhead_scheduling=asynchronous)
    assert said(drafted) == said(plain)
    for name, item in drafted.items():
        assert item.metrics.num_drafts_accepted == item.metrics.num_drafts_verified > 0, name
    assert core.speculation.accepted.tolist() == core.speculation.verified.tolist()


@pytest.mark.parametrize("engine", [{}, {"preempt_every": 2}, {"max_prefill_chunk": 1, "preempt_every": 5}])
def test_wrong_drafts_change_nothing(drafting_model: Callable[..., Any], engine: dict[str, Any]) -> None:
    plain = ask(drafting_model(), WANTED, use_nextn_decode=0)[0]
    drafted, core = ask(drafting_model(fault=0.4), WANTED, **engine)
    assert said(drafted) == said(plain)
    assert 0 < core.speculation.accepted.sum() < core.speculation.verified.sum()


class SteadyCosts:
    """Steps whose time grows by a hundredth a row, whatever the clock says."""

    def seconds(self, rows: Any, sequences: int) -> Any:
        return 0.3 + 0.01 * rows

    def observe(self, rows: int, sequences: int, seconds: float) -> None:
        pass


# ---- rejection -----------------------------------------------------------------------------------------------------


def test_rejection_without_doubt_accepts_everything(drafting_model: Callable[..., Any]) -> None:
    """Where drafter and target agree, p / q is 1: also under filters, penalties and bans."""
    drafted, core = ask(drafting_model(), WANTED, draft_verification="rejection")
    assert core.speculation.accepted.tolist() == core.speculation.verified.tolist()
    assert {item.error for item in drafted.values()} == {None}


@pytest.mark.parametrize("fault", [0.0, 0.4])
def test_greedy_rejection_says_what_is_said_without_drafts(drafting_model: Callable[..., Any], fault: float) -> None:
    greedy = {name: {**item, "temperature": 0} for name, item in WANTED.items()}
    plain = ask(drafting_model(), greedy, use_nextn_decode=0)[0]
    assert said(ask(drafting_model(fault=fault), greedy, draft_verification="rejection")[0]) == said(plain)


def tally(outputs: list[list[int]], rules: Any, *, scripted: bool) -> tuple[Any, Any]:
    """Tokens by how much more the model likes them than the drafter: expected and found, of all but the first tokens."""
    edges = np.log([0.4, 0.75, 1.0, 1.5, 3.0])
    expected, found = np.zeros((2, edges.size + 1))
    for tokens in outputs:
        state = 0
        for position, token in enumerate(PROMPT):
            state = rules.chain(state, token, position)
        for place, token in enumerate(tokens):
            target = rules.logits_of(state).double().log_softmax(-1)
            # A script that knows no output proposes 1.
            drafted = torch.full((37,), -30.0).index_fill(0, ONE, 0.0)
            if not scripted:
                drafted = (0.5 * rules.logits_of(state) + 0.5 * rules.logits_of(state + 1)).double().log_softmax(-1)
            group = np.searchsorted(edges, (target - drafted).numpy())
            if place:
                expected += np.bincount(group, target.exp().numpy(), minlength=expected.size)
                found[group[token]] += 1
            state = rules.chain(state, token, len(PROMPT) + place)
    return expected, found


@pytest.mark.parametrize(
    "drafter", ["scripted", "model", "model, chosen lengths", "model, chosen lengths, synchronous"]
)
def test_rejection_keeps_the_distribution_in_a_running_engine(
    drafting_model: Callable[..., Any], fake_rules: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of 900 outputs: how often do tokens come that the drafter likes less or more than the model does?

    Summed over many contexts a wrong rule shows there, and nowhere as clearly. The drafter's confidences tell much about
    its drafts, so lengths chosen by what comes later would show too.
    """
    script = ScriptedDrafter(3, {}, 0.0) if drafter == "scripted" else None
    options = {"draft_verification": "rejection", "max_num_seqs": 30, "max_num_batched_tokens": 200}
    options["zero_overhead_scheduling"] = "synchronous" not in drafter
    if "chosen" in drafter:
        options |= {"enable_mtp_varlen": True}
        monkeypatch.setattr("deepinfer.engine.build.step_costs", lambda *_: SteadyCosts())
    wanted = {str(seed): {"seed": seed, "max_tokens": 6, "logprobs": None} for seed in range(900)}
    model = drafting_model(num_drafts=3, fault=0.5)
    outputs, core = ask(model, wanted, drafter=script, use_nextn_decode=3, **options)
    expected, found = tally([item.token_ids for item in outputs.values()], fake_rules, scripted=script is not None)
    some = expected > 0
    statistic = float(((found - expected)[some] ** 2 / expected[some]).sum())
    freedom = int(some.sum()) - 1
    # Every draw has its own probabilities, which narrows the spread of a chi-square with so many degrees of freedom.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert 0 < core.speculation.accepted.sum() < core.speculation.verified.sum()
    if "chosen" in drafter:
        first, second, _ = core.speculation.verified.tolist()
        assert 0 < second < 0.9 * first


# ---- what one sees -------------------------------------------------------------------------------------------------


def test_counts_by_position(fake_model: Any) -> None:
    """The drafter is right at every place, so that every block but the last ones stands."""
    wanted = {"one": {"max_tokens": 19}}
    plain = ask(fake_model, wanted, use_nextn_decode=0)[0]["one"].token_ids
    drafter = ScriptedDrafter(3, {50: (len(PROMPT), plain)}, 1.0)
    outputs, core = ask(fake_model, wanted, drafter=drafter, use_nextn_decode=3, zero_overhead_scheduling=False)
    statistics, metrics = core.speculation, outputs["one"].metrics
    # One token from the prompt, then 18 in blocks of 1 + 3; the last block holds two.
    assert (statistics.steps, statistics.sequence_steps, statistics.committed) == (5, 5, 18)
    assert statistics.drafted.tolist() == [5, 5, 5]
    assert statistics.verified.tolist() == statistics.accepted.tolist() == [5, 4, 4]
    assert (metrics.num_drafts_verified, metrics.num_drafts_accepted) == (13, 13)
    assert statistics.reliability.error() == 0
    found = dict(re.findall(r"^(\S+) (\S+)$", metrics_text({"0": core}), re.MULTILINE))
    for name, counts in (("proposed", [5, 5, 5]), ("verified", [5, 4, 4]), ("accepted", [5, 4, 4])):
        for position, count in enumerate(counts):
            assert found[f'deepinfer_drafts_{name}_total{{engine="0",position="{position}"}}'] == str(count)
    assert found['deepinfer_committed_tokens_total{engine="0"}'] == "18"
    assert found['deepinfer_decode_sequence_steps_total{engine="0"}'] == "5"
    assert float(found['deepinfer_confidence_error{engine="0"}']) == 0
    # The script says that it is sure: all drafts are in the last bin.
    for place, count in enumerate([5, 4, 4]):
        cell = f'{{engine="0",position="{place}",below="1"}}'
        assert float(found[f"deepinfer_confidence_drafts_total{cell}"]) == count
        assert float(found[f"deepinfer_confidence_accepted_total{cell}"]) == count


def test_the_memory_plan_knows_of_drafts(drafting_model: Callable[..., Any]) -> None:
    def planned(**options: Any) -> Any:
        loaded = LoadedModel(drafting_model(), Path(), None, "fake")
        settings = Settings(max_num_seqs=4, max_num_batched_tokens=64, **options)
        return build_engine(loaded, settings, num_pages=80).plan.request

    none, coupled, rejection = planned(use_nextn_decode=0), planned(), planned(draft_verification="rejection")
    assert coupled.logits > none.logits
    assert rejection.logits == coupled.logits
    assert rejection.tables - coupled.tables == 5 * 5 * 37 * 4

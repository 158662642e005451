"""Sampling parameters through the whole loop, against a model of one request in NumPy and plain Python."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.one_request import EOS, VOCAB, Letters, expected, make_llm, one

from deepinfer import SamplingParams
from deepinfer.engine.build import build_engine
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.stops import TextStream
from deepinfer.errors import InvalidRequest
from deepinfer.sampling.slots import pack_ids
from deepinfer.settings import Settings

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "min_p": {"min_p": 0.3},
    "filters": {"min_p": 0.05, "top_p": 0.8, "top_k": 9, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.5},
    "rewarded": {"repetition_penalty": 0.6, "presence_penalty": -1.5, "temperature": 0.2},
    "presence": {"presence_penalty": 2.0, "temperature": 0},
    "frequency": {"frequency_penalty": 1.3, "presence_penalty": 0.2, "temperature": 0.3},
    "bias": {"logit_bias": {7: 5.5, 8: -100, 30: 4.25}},
    "allowed": {"allowed_token_ids": [3, 9, 12], "presence_penalty": 0.7},
    "banned": {"banned_token_ids": list(range(20)), "temperature": 0},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": [*range(6, 30)]},
    "forced": {"golden_token_ids": [9, -1, 9, -1, 30], "frequency_penalty": 2.0, "temperature": 0},
    "everything": {
        "min_p": 0.02,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {7: 3, 9: -4},
        "banned_token_ids": [10, 11],
        "golden_token_ids": [-1, 10],
        "min_tokens": 3,
        "ignore_eos": False,
    },
}
PROMPTS = [[7, 8, 9, 7], [20], list(range(6, 32)), [9, 9, 9], [30, 31, 6]]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_request_alone_is_what_its_parameters_say(fake_model: Any, fake_rules: Any, name: str) -> None:
    llm = make_llm(fake_model)
    for prompt in PROMPTS:
        params = SamplingParams(
            **{"temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True, **VARIANTS[name]}
        )
        output = llm.generate(prompt, params)[0].outputs[0]
        assert output.token_ids == expected(fake_rules, prompt, params)
    llm._core.scheduler.assert_idle()


def test_all_kinds_beside_each_other(fake_model: Any, fake_rules: Any) -> None:
    """Every variant with every prompt in one call; slots are reused by other kinds."""
    llm = make_llm(fake_model)
    cases = [(prompt, name) for prompt in PROMPTS for name in VARIANTS]
    params = [
        SamplingParams(
            **{"temperature": 1.0, "seed": i, "max_tokens": 3 + i % 7, "ignore_eos": True, "logprobs": i % 3}
            | VARIANTS[name]
            | ({"min_tokens": 0} if name in ("min_tokens", "everything") else {})
        )
        for i, (_, name) in enumerate(cases)
    ]
    outputs = llm.generate([prompt for prompt, _ in cases], params)
    for (prompt, _), one_params, output in zip(cases, params, outputs, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == expected(fake_rules, prompt, one_params)
    llm._core.scheduler.assert_idle()


def test_nothing_allowed_is_an_error_of_its_own_request(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    params = [
        SamplingParams(allowed_token_ids=[EOS], min_tokens=2, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    ]
    bad, good = llm.generate([[7], [7]], params)
    assert "no token at all is allowed" in str(bad.error)
    assert good.error is None


def test_forced_ids_end_nothing_before_min_tokens(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    forced = {"temperature": 0, "golden_token_ids": [EOS, 9, EOS, 9, EOS], "max_tokens": 9}
    params = [SamplingParams(**forced, min_tokens=least, stop_token_ids=[9]) for least in (0, 1, 2, 3)]
    outputs = [output.outputs[0] for output in llm.generate([[7]] * 4, params)]
    assert [len(output.token_ids) for output in outputs] == [1, 1, 2, 3]
    assert [output.stop_reason for output in outputs] == [None, None, 9, None]
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_values_that_float32_cannot_hold(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    common = {"seed": 3, "max_tokens": 4, "ignore_eos": True}
    best, nucleus = llm.generate([[7], [7]], [{**common, "temperature": 0}, {**common, "top_p": 1e-300}])
    assert nucleus.outputs[0].token_ids == best.outputs[0].token_ids
    # Not banned ids, as an infinite temperature drew them.
    allowed = [8, 9, 10]
    hot = llm.generate([[7]], [{**common, "temperature": 1e300, "allowed_token_ids": allowed}])[0].outputs[0]
    assert set(hot.token_ids) <= set(allowed)
    # Divided by nothing, a positive logit would be infinite and the row unsound.
    rewarded = llm.generate([[7, 8]], [{**common, "temperature": 0, "repetition_penalty": 1e-300}])[0]
    assert rewarded.error is None
    assert len(rewarded.outputs[0].token_ids) == 4


def test_ids_outside_the_vocabulary_are_refused_by_name(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    for field, value in (
        ("allowed_token_ids", [37]),
        ("banned_token_ids", [3, 99]),
        ("golden_token_ids", [40]),
        ("logit_bias", {37: 1.0}),
        ("logprobs", 38),
        ("prompt_logprobs", 38),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([7], {field: value})
        assert caught.value.field == field
        assert "vocabulary" in str(caught.value)
    for both in ({"max_tokens": 3, "max_new_tokens": 3}, {"max_new_tokens": 3, "max_tokens": 3}):
        with pytest.raises(InvalidRequest, match="max_new_tokens: is another name of max_tokens"):
            llm.generate([7], both)
    assert len(llm.generate([7], {"max_new_tokens": 3, "seq_seed": 4, "ignore_eos": True})[0].outputs[0].token_ids) == 3


# ---- stops -----------------------------------------------------------------------------------------------------------


def test_stop_strings_end_text_ids_and_logprobs_together(fake_model: Any) -> None:
    llm = make_llm(fake_model, Letters())
    letters = {"allowed_token_ids": [*range(6, 32)], "logprobs": 0, "max_tokens": 12}
    free = one(llm, "abc", **letters).outputs[0]
    for start in range(12):
        for length in (1, 2, 3):
            stop = free.text[start : start + length]
            at = free.text.find(stop)
            for include in (False, True):
                found = one(llm, "abc", stop=stop, include_stop_str_in_output=include, **letters)
                output = found.outputs[0]
                assert output.token_ids == free.token_ids[: at + len(stop)]
                assert output.text == free.text[: at + len(stop) * include]
                assert output.logprobs == free.logprobs[: at + len(stop)]
                assert (output.finish_reason, output.stop_reason) == ("stop", stop)
                assert found.metrics.num_generated_tokens == at + len(stop)
    never = one(llm, "abc", stop=["0", "1"], **letters).outputs[0]
    assert (never.token_ids, never.text, never.finish_reason) == (free.token_ids, free.text, "length")
    late = one(llm, "abc", stop=[free.text[0]], min_tokens=3, **letters).outputs[0]
    assert len(late.token_ids) >= 3
    assert late.token_ids == free.token_ids[: len(late.token_ids)]


def test_stop_strings_need_a_codec_that_streams(fake_model: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop: stop strings need the text of the output"):
        make_llm(fake_model).generate([7], SamplingParams(stop="a"))


# ---- completions and seeds -------------------------------------------------------------------------------------------


def test_completions_share_a_seed_and_differ_by_their_index(fake_model: Any, fake_rules: Any) -> None:
    llm = make_llm(fake_model, Letters())
    three = one(llm, [7, 8, 9], n=3, prompt_logprobs=1, logprobs=2)
    assert [part.index for part in three.outputs] == [0, 1, 2]
    assert [part.seed for part in three.outputs] == [11, 11, 11]
    params = SamplingParams(seed=11, max_tokens=10, ignore_eos=True)
    assert [part.token_ids for part in three.outputs] == [expected(fake_rules, [7, 8, 9], params, i) for i in range(3)]
    assert len({tuple(part.token_ids) for part in three.outputs}) == 3
    five, two = one(llm, [7, 8, 9], n=5, logprobs=2), one(llm, [7, 8, 9], n=2, logprobs=2)
    assert five.outputs[:3] == three.outputs
    assert two.outputs == three.outputs[:2]
    assert len(three.prompt_logprobs) == 3
    mixed = llm.generate([[7, 8, 9], [20]], [SamplingParams(n=2, seed=1), SamplingParams(n=1, seed=2)])
    assert [len(result.outputs) for result in mixed] == [2, 1]
    assert all(result.finished for result in mixed)
    llm._core.scheduler.assert_idle()


def test_a_seeded_request_does_not_feel_an_unseeded_mate(fake_model: Any) -> None:
    """H5: the output of a seeded request depends on its seed and positions only."""
    llm = make_llm(fake_model)
    seeded = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    alone = llm.generate([7, 8], seeded)[0].outputs[0].token_ids
    for mate in ([9], [9, 10, 11], [20] * 9, [7, 8]):
        first, other = llm.generate([[7, 8], mate], [seeded, SamplingParams(max_tokens=8, ignore_eos=True)])
        assert first.outputs[0].token_ids == alone
        again = SamplingParams(seed=other.outputs[0].seed, max_tokens=8, ignore_eos=True)
        assert llm.generate(mate, again)[0].outputs[0].token_ids == other.outputs[0].token_ids


# ---- several rows a sequence, ahead of the host ----------------------------------------------------------------------


def drafted(fake_model: Any, fake_rules: Any, cases: list[tuple[list[int], SamplingParams]], wrong: int) -> list[Any]:
    """Run with a drafter that knows each request's output, but for every `wrong`-th draft, ahead of the host."""
    truth = {params.seed: (len(prompt), expected(fake_rules, prompt, params)) for prompt, params in cases}

    def draft(anchors: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, records: Any) -> Any:
        ids = torch.full((anchors.shape[0], 4), -1)
        for row, (anchor, position) in enumerate(zip(anchors.tolist(), positions.tolist(), strict=True)):
            length, output = truth.get(int(records.seed[max(int(slots[row]), 0)]), (0, []))
            follow = output[position + 2 - length :][:4] if anchor >= 0 else []
            for place, token in enumerate(follow):
                ids[row, place] = token if (position + place) % wrong else (token + 1) % 5 + 6
        return SimpleNamespace(ids=ids, confidences=torch.zeros(ids.shape))

    settings = Settings(max_num_seqs=3, max_num_batched_tokens=24, use_nextn_decode=4)
    core = build_engine(
        LoadedModel(fake_model, numerics_id="fake_rules"),
        settings,
        poison_released=True,
        drafter=draft,
        preempt_every=5,
    ).core
    running = []
    for index, (prompt, params) in enumerate(cases):
        text = TextStream(Letters(), params) if params.stop_strings else None
        ids, limit = np.array(prompt, np.int64), params.max_tokens
        running.append(core.add(str(index), ids, params, seed=params.seed, max_tokens=limit, text=text))
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()
    assert core.stats.accepted_drafts > 0
    core.close()
    return running


@pytest.mark.parametrize("wrong", [2, 3, 1000])
def test_verify_rows_see_the_drafts_before_them(fake_model: Any, fake_rules: Any, wrong: int) -> None:
    """H14: penalties, bans and forced tokens of verify rows know real ids only; tokens and logprobs as without drafts."""
    cases = []
    for index, name in enumerate(VARIANTS):
        params = {"temperature": 1.0, "seed": index, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
        cases.append((PROMPTS[index % 5], SamplingParams(**params | VARIANTS[name])))
    llm = make_llm(fake_model, zero_overhead_scheduling=False)
    plain = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    for name, case, one_plain, found in zip(
        VARIANTS, cases, plain, drafted(fake_model, fake_rules, cases, wrong), strict=True
    ):
        assert found.token_ids == expected(fake_rules, *case) == one_plain.outputs[0].token_ids, name
        assert found.logprobs == one_plain.outputs[0].logprobs, name
        assert found.cumulative_logprob == one_plain.outputs[0].cumulative_logprob


def test_a_stop_string_ends_inside_an_accepted_block(fake_model: Any, fake_rules: Any) -> None:
    """H13: wherever in a block the stop string ends, text, ids, logprobs and usage agree, as without drafts."""
    given = {"allowed_token_ids": [*range(6, 32)], "logprobs": 0, "max_tokens": 12, "ignore_eos": True}
    free = expected(fake_rules, [7, 8], SamplingParams(seed=4, **given))
    text = Letters().decode(free)
    for start in range(11):
        stop = text[start : start + 2]
        end = text.find(stop) + 2
        params = SamplingParams(seed=4, stop=stop, **given)
        (found,) = drafted(fake_model, fake_rules, [([7, 8], params)], 1000)
        assert found.token_ids == free[:end]
        assert found.text.text == text[: end - 2]
        assert len(found.logprobs) == found.metrics.num_generated_tokens == end
        assert (str(found.finish_reason), found.stop_reason) == ("stop", stop)


def test_a_grammar_mask_comes_after_the_bans_and_spares_other_rows(fake_model: Any) -> None:
    llm = make_llm(fake_model, zero_overhead_scheduling=False)
    sampler = llm._core.runner.sampler
    plain, draw = llm.generate([[7], [8]], SamplingParams(seed=1, max_tokens=6, ignore_eos=True)), sampler.draw
    mask = pack_ids([9, 11, 30], VOCAB)[None]
    admitted: list[int] = []

    def masked(plan: Any, inputs: Any, logits: Any, records: Any, masks: Any = None) -> Any:
        admitted.extend(plan.admitted_slots.tolist())
        rows = np.where(inputs.slots[inputs.sample_rows].numpy() == admitted[0], 0, -1)
        return draw(plan, inputs, logits, records, (mask, rows))

    sampler.draw = masked
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, logprobs=0)
    given = [replace(params, banned_token_ids=[11]), params]
    first, second = llm.generate([[7], [8]], given)
    assert set(first.outputs[0].token_ids) <= {9, 30}
    assert second.outputs[0].token_ids == plain[1].outputs[0].token_ids


def test_completions_share_the_pages_of_their_prompt(fake_model: Any, fake_rules: Any) -> None:
    prompt = list(range(6, 29))
    shared, apart = make_llm(fake_model), make_llm(fake_model, enable_prefix_caching=False)
    seen = {}
    for llm in (apart, shared):
        rows = len(fake_model.rows_seen)
        seen[llm] = one(llm, prompt, n=4, max_tokens=3, prompt_logprobs=0)
        assert [part.index for part in seen[llm].outputs] == [0, 1, 2, 3]
        llm.rows = sum(fake_model.rows_seen[rows:])
        llm._core.scheduler.assert_idle()
    assert seen[shared].outputs == seen[apart].outputs
    assert seen[shared].prompt_logprobs == seen[apart].prompt_logprobs
    # Each of the other three prompts starts at the last page boundary.
    assert apart.rows - shared.rows >= 3 * (len(prompt) - len(prompt) % 4 - 4)


def test_completions_that_wait_for_their_prompt_may_be_aborted(fake_model: Any) -> None:
    core = make_llm(fake_model, zero_overhead_scheduling=False)._core
    prompt = np.arange(6, 30)
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def three() -> list[Any]:
        first = core.add("a", prompt, params, seed=1, max_tokens=4)
        others = [
            core.add(name, prompt, params, seed=1, max_tokens=4, completion=i + 1, leader=first)
            for i, name in enumerate("bc")
        ]
        return [first, *others]

    with pytest.raises(InvalidRequest, match="'b' is already in flight"):
        core.add("b", prompt, params, seed=1, max_tokens=4) if three() else None
    core.abort("b")
    core.step()
    core.abort("a")  # Its follower must not wait for ever.
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()
    generations = three()
    fake_model.fail_on = lambda slots: True
    core.step()
    fake_model.fail_on = lambda slots: False
    while core.num_unfinished:
        core.step()
    reasons = [str(generation.finish_reason) for generation in generations]
    assert reasons[0] == "error"
    assert set(reasons[1:]) <= {"length", "error"}
    core.scheduler.assert_idle()

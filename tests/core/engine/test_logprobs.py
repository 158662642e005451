"""Log-probabilities of outputs and prompts, and scores, against a softmax in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_request import Letters, adjusted, make_llm, one

from deepinfer import LLM, SamplingParams
from deepinfer.engine.loader import LoadedModel
from deepinfer.errors import InvalidRequest
from deepinfer.ops.sampling import apply_filters
from deepinfer.settings import Settings

PROMPTS = [[7, 8, 9, 7], [20], list(range(6, 32)), [9, 9, 9], [30, 31, 6]]


def states(fake_rules: Any, tokens: list[int]) -> list[int]:
    found, state = [], 0
    for position, token in enumerate(tokens):
        state = fake_rules.chain(state, token, position)
        found.append(state)
    return found


def check_place(place: dict[int, Any], logits: np.ndarray, token: int, count: int) -> None:
    wide = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(len(wide)), key=lambda i: (-wide[i], i))
    assert list(place)[:count] == order[:count]
    assert set(place) == {*order[:count], token}
    for token_id, found in place.items():
        assert found.rank == order.index(token_id) + 1
        assert found.logprob == pytest.approx(exact[token_id], abs=3e-6)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_of_the_output(fake_model: Any, fake_rules: Any, mode: str) -> None:
    llm = make_llm(fake_model, Letters())
    params = {"top_k": 8, "temperature": 0.7, "logit_bias": {9: 2.0}, "repetition_penalty": 1.3, "logprobs_mode": mode}
    prompt = [7, 8, 9]
    result = one(llm, prompt, logprobs=4, **params)
    output = result.outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 10
    given = SamplingParams(seed=11, max_tokens=10, ignore_eos=True, **params)
    along = states(fake_rules, [*prompt, *output.token_ids])
    for index, (place, token) in enumerate(zip(output.logprobs, output.token_ids, strict=True)):
        logits = fake_rules.logits_of(along[len(prompt) - 1 + index]).numpy()
        if mode == "processed":
            row = torch.from_numpy(adjusted(logits, prompt, output.token_ids[:index], given))[None]
            filters = (torch.tensor([0.7]), torch.tensor([8], dtype=torch.int32), torch.tensor([1.0]))
            logits = apply_filters(row, *filters)[0].numpy()
        check_place(place, logits, token, 4)
        assert place[token].decoded_token == Letters().decode([token], skip_special=False)
    total = sum(place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    assert result.prompt_logprobs is None
    plain = one(llm, prompt, **params).outputs[0]
    assert (plain.token_ids, plain.logprobs, plain.cumulative_logprob) == (output.token_ids, None, None)


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_prompt_logprobs_do_not_feel_chunks(fake_model: Any, fake_rules: Any, chunk: int | None) -> None:
    settings = Settings(max_num_seqs=4, max_num_batched_tokens=16, use_nextn_decode=0)
    llm = LLM.from_loaded(LoadedModel(fake_model, Path(), None, ""), settings, max_prefill_chunk=chunk)
    params = [
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=count)
        for count in (3, None, 0, 37, 1)
    ]
    outputs = llm.generate(PROMPTS, params)
    for prompt, given, output in zip(PROMPTS, params, outputs, strict=True):
        if given.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        along = states(fake_rules, prompt)
        for position in range(1, len(prompt)):
            logits = fake_rules.logits_of(along[position - 1]).numpy()
            check_place(output.prompt_logprobs[position], logits, prompt[position], given.prompt_logprobs)


def test_scores(fake_model: Any, fake_rules: Any) -> None:
    llm = make_llm(fake_model, Letters())
    prompts, continuations = ["abc", "zz", [20, 21]], ["de", "a", [22, 23, 24]]
    together = llm.score(prompts, continuations)
    assert [score.token_ids for score in together] == [[9, 10], [6], [22, 23, 24]]
    whole = llm.score([[6, 7, 8, 9, 10], [31, 31, 6], [20, 21, 22, 23, 24]])
    for part, score, ids in zip(together, whole, ([6, 7, 8, 9, 10], [31, 31, 6], [20, 21, 22, 23, 24]), strict=True):
        assert score.token_ids == ids[1:]
        assert part.logprobs == score.logprobs[-len(part.logprobs) :]
        assert part.log_likelihood == pytest.approx(sum(part.logprobs))
        rows = torch.stack([fake_rules.logits_of(state) for state in states(fake_rules, ids)[:-1]]).double()
        exact = torch.log_softmax(rows, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert score.logprobs == pytest.approx(exact.tolist(), abs=3e-6)
    greedy = one(llm, [20, 21], temperature=0, max_tokens=4).outputs[0].token_ids
    assert llm.score([[20, 21]], [greedy])[0].is_greedy
    assert not llm.score([[20, 21]], [[*greedy[:-1], (greedy[-1] + 1) % 5 + 6]])[0].is_greedy
    bad, good = llm.score([[99], [7]], [[7], [8]])
    assert isinstance(bad.error, InvalidRequest)
    assert good.error is None
    with pytest.raises(InvalidRequest, match="continuations: 1 continuations for 2 prompts"):
        llm.score([[7], [8]], [[7]])


@pytest.mark.parametrize("scored_rows", [1, 5, 512])
def test_scored_prompts_share_a_bounded_number_of_rows(fake_model: Any, fake_rules: Any, scored_rows: int) -> None:
    llm = make_llm(fake_model, max_num_batched_tokens=64)
    llm._core.scheduler.config = replace(llm._core.scheduler.config, max_scored_rows=scored_rows)
    prompts = [list(range(6, 32)), [7] * 20, [9, 8] * 11]
    widest, forward = 0, fake_model.forward

    def watch(inputs: Any, storage: Any) -> Any:
        nonlocal widest
        widest = max(widest, inputs.sample_rows.shape[0])
        return forward(inputs, storage)

    fake_model.forward = watch
    scores = llm.score(prompts)
    assert widest <= scored_rows + 2 * len(prompts)
    for prompt, score in zip(prompts, scores, strict=True):
        rows = torch.stack([fake_rules.logits_of(state) for state in states(fake_rules, prompt)[:-1]]).double()
        exact = torch.log_softmax(rows, -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert score.logprobs == pytest.approx(exact.tolist(), abs=3e-6)

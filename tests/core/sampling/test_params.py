"""Every refusal names the field, the value and the range."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import InvalidRequest
from deepinfer.sampling.params import SamplingParams


def test_defaults_and_accepted_values() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (1.0, 1.0, -1, 16, None)
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(3),
        max_tokens=None,
        seed=-1,
        stop_token_ids=[np.int32(4), 5],
    )
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 1.0, 3, 2**64 - 1)
    assert params.stop_token_ids == (4, 5)
    assert SamplingParams(stop=[], stop_token_ids=None).stop is None
    assert hash(SamplingParams(seed=2**64 - 1, temperature=0)) == hash(SamplingParams(seed=-1, temperature=0.0))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", float("nan"), "nan is not 0 or a finite number of at least 1e-6"),
        ("temperature", -0.1, "-0.1 is not 0 (greedy) or a finite number of at least 1e-6"),
        ("temperature", 1e-9, "1e-09 is not 0 (greedy) or a finite number of at least 1e-6"),
        ("temperature", float("inf"), "inf is not 0 (greedy) or"),
        ("temperature", "warm", "'warm' is not 0 or a finite number"),
        ("temperature", None, "None is not 0 or a finite number"),
        ("temperature", True, "True is not 0 or a finite number"),
        ("top_p", 0, "0 is not a number in (0, 1]"),
        ("top_p", 1.01, "1.01 is not a number in (0, 1]"),
        ("top_p", float("nan"), "nan is not a number in (0, 1]"),
        ("top_k", 0, "0 is not -1 (all) or an integer in 1..2**31-1"),
        ("top_k", -2, "-2 is not -1 (all) or an integer in 1..2**31-1"),
        ("top_k", 2.0, "2.0 is not -1 (all) or an integer in 1..2**31-1"),
        ("max_tokens", 0, "0 is not an integer in 1..2**31-1, or None"),
        ("max_tokens", -5, "-5 is not an integer in 1..2**31-1, or None"),
        ("max_tokens", 2**31, "2147483648 is not an integer in 1..2**31-1, or None"),
        ("max_tokens", "8", "'8' is not an integer in 1..2**31-1, or None"),
        ("seed", 2**64, "18446744073709551616 is not an integer in -2**63..2**64-1"),
        ("seed", 0.5, "0.5 is not an integer in -2**63..2**64-1"),
        ("n", 0, "0 is not an integer in 1..128"),
        ("n", 129, "129 is not an integer in 1..128"),
        ("stop", ["a", ""], "['a', ''] is not free of empty strings, which would end every text at once"),
        ("stop", "", "[''] is not free of empty strings, which would end every text at once"),
        ("stop", "a\ud800", "['a\\ud800'] is not valid text; a lone surrogate can never be generated"),
        ("stop", 3, "3 is not a string or a list of at most 16 strings"),
        ("stop", ["a", 3], "['a', 3] is not a string or a list of at most 16 strings"),
        ("stop", [str(i) for i in range(17)], "['0', '1', "),
        ("min_p", 1.5, "1.5 is not a number in [0, 1]"),
        ("min_p", -0.1, "-0.1 is not a number in [0, 1]"),
        ("repetition_penalty", 0, "0 is not a number in (0, 2]"),
        ("repetition_penalty", 2.1, "2.1 is not a number in (0, 2]"),
        ("presence_penalty", -2.5, "-2.5 is not a number in [-2, 2]"),
        ("frequency_penalty", float("nan"), "nan is not a number in [-2, 2]"),
        ("logit_bias", {5: 101}, "{5: 101} is not a dict of at most 1024 token ids >= 0 with values in [-100, 100]"),
        ("logit_bias", {-5: 1}, "-5 is not a dict of at most 1024 token ids"),
        ("logit_bias", {"x": 1}, "'x' is not a dict of at most 1024 token ids"),
        ("logit_bias", {"3": 1, 3: 2}, "{3: 2} is not a dict of"),
        ("logit_bias", [3], "[3] is not a dict of"),
        ("logit_bias", dict.fromkeys(range(1025), 0.5), "'a dict of 1025' is not a dict of at most 1024"),
        ("allowed_token_ids", [], "() is not a list that leaves an id which is not banned"),
        ("allowed_token_ids", [1.5], "1.5 is not a list of token ids >= 0"),
        ("banned_token_ids", [-1], "[-1] is not a list of token ids >= 0"),
        ("golden_token_ids", [-2], "[-2] is not a list of token ids >= 0, or -1 where free"),
        ("min_tokens", 17, "17 is not an integer in 0..16 (max_tokens)"),
        ("min_tokens", -1, "-1 is not an integer in 0..16 (max_tokens)"),
        ("first_n_token_no_eos", 17, "17 is not an integer in 0..16 (max_tokens)"),
        ("logprobs", 1001, "1001 is not an integer in 0..1000, True, False or None"),
        ("logprobs", -1, "-1 is not an integer in 0..1000, True, False or None"),
        ("prompt_logprobs", 1.0, "1.0 is not an integer in 0..1000, True, False or None"),
        ("top_logprobs", True, "True is not an integer in 0..1000"),
        ("logprobs_mode", "nice", "'nice' is not 'raw' or 'processed'"),
        ("seq_seed", "a", "'a' is not an integer in -2**63..2**64-1 or None"),
        ("include_stop_str_in_output", 0, "0 is not True or False"),
        ("stop_token_ids", [-1], "[-1] is not a list of token ids >= 0"),
        ("stop_token_ids", ["a"], "'a' is not a list of token ids >= 0"),
        ("stop_token_ids", "ab", "'ab' is not a list of token ids >= 0"),
        ("stop_token_ids", 3, "3 is not a list of token ids >= 0"),
        ("ignore_eos", 1, "1 is not True or False"),
        ("skip_special_tokens", None, "None is not True or False"),
    ],
)
def test_refusals(field: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {text}")


def test_names_of_other_engines_are_folded_into_one() -> None:
    params = SamplingParams(
        seq_seed=-1,
        logprobs=True,
        top_logprobs=3,
        prompt_logprobs=True,
        first_n_token_no_eos=1,
        logit_bias={"7": 1, 3: -2},
        golden_token_ids=np.array([4, -1]),
        stop="end",
        n=2,
    )
    assert (params.seed, params.seq_seed) == (2**64 - 1, None)
    assert (params.logprobs, params.prompt_logprobs, params.min_tokens) == (3, 0, 1)
    assert params.bias == ((3, -2.0), (7, 1.0))
    assert (params.forced, params.stop_strings) == ((4, -1), ("end",))
    assert dataclasses.replace(params) == params
    assert hash(dataclasses.replace(params, n=2)) == hash(params)
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams(top_logprobs=4).logprobs == SamplingParams(logprobs=4).logprobs == 4
    assert SamplingParams(logprobs=True).logprobs == 0
    assert SamplingParams(logprobs=False).logprobs is SamplingParams(stop=[]).stop is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"seed": 1, "seq_seed": 2}, "seq_seed: 2 is not equal to seed=1, of which it is another name"),
        ({"logprobs": 1, "top_logprobs": 2}, "top_logprobs: 2 is not equal to logprobs=1; give one of the two"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens: 4 is not an integer in 0..3 (max_tokens)"),
        ({"allowed_token_ids": [3], "banned_token_ids": [3]}, "allowed_token_ids: (3,) is not a list that leaves"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(text)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(-3, 9), max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(values=st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), JUNK, max_size=4))
def test_whatever_is_given_is_taken_or_refused_by_name(values: dict[str, Any]) -> None:
    refused: InvalidRequest | None = None
    try:
        params = SamplingParams(**values)
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.field in SamplingParams.__dataclass_fields__
        assert str(refused).startswith(f"{refused.field}: ")
        return
    assert dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))
    assert 0 <= params.min_tokens <= (params.max_tokens or 2**31)


def test_frozen_and_closed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]

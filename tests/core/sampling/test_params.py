"""Every refusal names the field, the value and the range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
        ("max_tokens", "8", "'8' is not an integer in 1..2**31-1 or None"),
        ("seed", 2**64, "18446744073709551616 is not an integer in -2**63..2**64-1"),
        ("seed", 0.5, "0.5 is not an integer in -2**63..2**64-1"),
        ("n", 2, "2 is not 1: several completions of one prompt are not served yet"),
        ("n", 0, "0 is not 1: "),
        ("stop", ["\n"], "['\\n'] is not None: stop strings are not served yet; use stop_token_ids"),
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


def test_frozen_and_closed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]

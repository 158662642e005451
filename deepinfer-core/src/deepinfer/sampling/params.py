"""What a request asks of the sampler, validated on construction."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from deepinfer.errors import InvalidRequest

__all__ = ["SamplingParams"]

MAX_INT = 2**31 - 1
MIN_TEMPERATURE = 1e-6
SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request.

    Filters apply in this order: temperature, then top_k and top_p as thresholds on the same distribution after
    temperature (the stricter one wins, ties go to the lower id).

    Attributes:
        temperature: 0 (argmax, ties to the lower id) or a finite value of at least 1e-6.
        top_p: in (0, 1]; keeps the most probable ids up to this mass.
        top_k: -1 (all) or at least 1; keeps this many ids.
        max_tokens: tokens to generate at most, at least 1; None: up to the end of the context.
        seed: integer of up to 64 bits; None draws one, which the output reports.
        n: completions of one prompt; only 1 for now.
        stop: stop strings; not served yet, so only None or an empty list.
        stop_token_ids: ids that end the text like EOS does; `CompletionOutput.stop_reason` says which.
        ignore_eos: go on after EOS.
        skip_special_tokens: leave special tokens out of the text (never out of the ids).

    Raises:
        InvalidRequest: on construction, naming field, value and range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 16
    seed: int | None = None
    n: int = 1
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        temperature = _number("temperature", self.temperature, "0 or a finite number of at least 1e-6")
        if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
            _refuse("temperature", self.temperature, "0 (greedy) or a finite number of at least 1e-6")
        top_p = _number("top_p", self.top_p, "a number in (0, 1]")
        if not 0 < top_p <= 1:
            _refuse("top_p", self.top_p, "a number in (0, 1]")
        top_k = _integer("top_k", self.top_k, "-1 (all) or an integer in 1..2**31-1")
        if top_k != -1 and not 1 <= top_k <= MAX_INT:
            _refuse("top_k", self.top_k, "-1 (all) or an integer in 1..2**31-1")
        if self.max_tokens is not None:
            max_tokens = _integer("max_tokens", self.max_tokens, "an integer in 1..2**31-1 or None")
            if not 1 <= max_tokens <= MAX_INT:
                _refuse("max_tokens", self.max_tokens, "an integer in 1..2**31-1, or None for the rest of the context")
            object.__setattr__(self, "max_tokens", max_tokens)
        if self.seed is not None:
            seed = _integer("seed", self.seed, "an integer in -2**63..2**64-1 or None")
            if not -(SEED_LIMIT // 2) <= seed < SEED_LIMIT:
                _refuse("seed", self.seed, "an integer in -2**63..2**64-1 or None")
            object.__setattr__(self, "seed", seed % SEED_LIMIT)
        if _integer("n", self.n, "1") != 1:
            _refuse("n", self.n, "1: several completions of one prompt are not served yet; send the prompt n times")
        if self.stop:
            _refuse("stop", self.stop, "None: stop strings are not served yet; use stop_token_ids")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        object.__setattr__(self, "top_k", top_k)
        object.__setattr__(self, "stop", None)
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


def _stop_ids(value: Any) -> tuple[int, ...]:
    expected = "a list of token ids >= 0"
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        _refuse("stop_token_ids", value, expected)
    ids = tuple(_integer("stop_token_ids", item, expected) for item in value)
    if any(not 0 <= item <= MAX_INT for item in ids):
        _refuse("stop_token_ids", list(ids), expected)
    return ids


def _number(field: str, value: Any, expected: str) -> float:
    if isinstance(value, bool | str | bytes):
        _refuse(field, value, expected)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        _refuse(field, value, expected)
    if math.isnan(number):
        _refuse(field, value, expected)
    return number


def _integer(field: str, value: Any, expected: str) -> int:
    if isinstance(value, bool):
        _refuse(field, value, expected)
    try:
        return operator.index(value)
    except TypeError:
        _refuse(field, value, expected)


def _refuse(field: str, value: Any, expected: str) -> NoReturn:
    raise InvalidRequest(f"{value!r} is not {expected}", field=field)

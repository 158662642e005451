"""What a request asks of the sampler, validated on construction."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from deepinfer.errors import InvalidRequest
from deepinfer.sampling.structured import StructuredOutput

__all__ = ["ALIASES", "MAX_LOGIT_BIAS", "MAX_LOGPROBS", "LogprobsMode", "SamplingParams"]

MAX_INT = 2**31 - 1
MIN_TEMPERATURE = 1e-6
# Devices hold float32: beyond these a temperature would become infinite and a top_p zero.
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-126
MIN_PENALTY = 1e-30
"""A logit divided by less could become infinite; ids that were seen win by far with either."""
SEED_LIMIT = 2**64
MAX_LOGPROBS = 1000
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_COMPLETIONS = 128

LogprobsMode = Literal["raw", "processed"]

ALIASES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "suppress_tokens": "banned_token_ids",
}
"""Names of other libraries that a dict of parameters may use."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request.

    What changes logits applies in this order: logit_bias, penalties, bans (allowed_token_ids, banned_token_ids,
    min_tokens) and grammar, temperature, then top_k, top_p and min_p as thresholds on the same distribution after
    temperature (the strictest one wins, ties go to the lower id). golden_token_ids replace what was drawn.

    Attributes:
        temperature: 0 (argmax, ties to the lower id) or a finite value of at least 1e-6.
        top_p: in (0, 1]; keeps the most probable ids up to this mass.
        top_k: -1 (all) or at least 1; keeps this many ids.
        min_p: in [0, 1]; drops ids less probable than min_p times the most probable one.
        repetition_penalty: in (0, 2], 1 for none; logits of ids in prompt or output are divided by it where positive
            and multiplied where negative.
        presence_penalty: in [-2, 2]; subtracted from the logits of ids in the output.
        frequency_penalty: in [-2, 2]; subtracted once for every time that the id is in the output.
        logit_bias: id to value in [-100, 100], at most 1,024 of them; kept as a sorted tuple of pairs.
        allowed_token_ids: nothing else may be drawn; None: everything.
        banned_token_ids: these are never drawn.
        max_tokens: tokens to generate at most, at least 1; None: up to the end of the context.
        min_tokens: EOS, stop ids and stop strings end nothing before this many tokens; the ids are not drawn before.
            A grammar that must end earlier ends the request with `GrammarError`; what came before stands.
        seed: integer of up to 64 bits; None draws one, which the output reports.
        n: completions of one prompt, 1..128. Completion i has the same tokens whatever n is.
        stop: a string or up to 16 that end the text; the first one completed wins, and is left out of the text.
        include_stop_str_in_output: leave it in.
        stop_token_ids: ids that end the text like EOS does; `CompletionOutput.stop_reason` says which.
        ignore_eos: go on after EOS.
        skip_special_tokens: leave special tokens out of the text (never out of the ids).
        logprobs: for every token its log-probability and those of this many most probable ids, 0..1000; True means
            `top_logprobs` of them; None or False: none.
        prompt_logprobs: the same for every prompt token but the first, given those before it; True means 0.
        logprobs_mode: "raw": before everything above, at temperature 1; "processed": of the distribution that was
            drawn from. Those of the prompt are always raw.
        golden_token_ids: forced tokens by index in the output, -1 where free; ids beyond its end are free.
        structured_output: the grammar that the output follows, as `StructuredOutput` or a dict of its fields. Where the
            text ends with "stop" by EOS it is complete; a length limit, a stop id or a stop string may cut it.
        so_args: the same as the official engine takes it (`StructuredOutput.from_so_args`); folded into
            `structured_output`.
        top_logprobs: as in `logprobs=True, top_logprobs=5`, or alone; folded into `logprobs`.
        seq_seed: other name of `seed`; folded into it.
        first_n_token_no_eos: no EOS among the first tokens; folded into `min_tokens`.

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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    allowed_token_ids: Iterable[int] | None = None
    banned_token_ids: Iterable[int] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    logprobs_mode: LogprobsMode = "raw"
    golden_token_ids: Iterable[int] | None = None
    structured_output: StructuredOutput | Mapping[str, Any] | None = None
    so_args: Mapping[str, Any] | None = None
    top_logprobs: int = 0
    seq_seed: int | None = None
    first_n_token_no_eos: int = 0

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_lists()
        self._check_limits()
        self._check_seed()
        self._check_logprobs()
        self._check_grammar()

    def _set(self, field: str, check: Callable[[str, Any], Any]) -> None:
        object.__setattr__(self, field, check(field, getattr(self, field)))

    def _check_filters(self) -> None:
        self._set("temperature", _temperature)
        top_p = _numbers("a number in (0, 1]", 0, 1, above=True)
        self._set("top_p", lambda name, value: max(top_p(name, value), MIN_FLOAT32))
        self._set("min_p", _numbers("a number in [0, 1]", 0, 1))
        penalty = _numbers("a number in (0, 2]", 0, 2, above=True)
        self._set("repetition_penalty", lambda name, value: max(penalty(name, value), MIN_PENALTY))
        self._set("presence_penalty", _numbers("a number in [-2, 2]", -2, 2))
        self._set("frequency_penalty", _numbers("a number in [-2, 2]", -2, 2))
        top_k = _integer("top_k", self.top_k, "-1 (all) or an integer in 1..2**31-1")
        if top_k != -1 and not 1 <= top_k <= MAX_INT:
            _refuse("top_k", self.top_k, "-1 (all) or an integer in 1..2**31-1")
        object.__setattr__(self, "top_k", top_k)

    def _check_lists(self) -> None:
        self._set("logit_bias", _bias)
        for field in ("stop_token_ids", "banned_token_ids"):
            self._set(field, lambda name, value: () if value is None else _ids(name, value, 0))
        for field, low in (("allowed_token_ids", 0), ("golden_token_ids", -1)):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _ids(field, getattr(self, field), low))
        if self.allowed_token_ids is not None and not set(self.allowed) - set(
            cast(tuple[int, ...], self.banned_token_ids)
        ):
            _refuse("allowed_token_ids", self.allowed_token_ids, "a list that leaves an id which is not banned")
        self._set("stop", _stop_strings)
        for field in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, field), bool):
                _refuse(field, getattr(self, field), "True or False")

    def _check_limits(self) -> None:
        if self.max_tokens is not None:
            expected = "an integer in 1..2**31-1, or None for the rest of the context"
            object.__setattr__(self, "max_tokens", _within("max_tokens", self.max_tokens, expected, 1, MAX_INT))
        limit = MAX_INT if self.max_tokens is None else self.max_tokens
        for field in ("min_tokens", "first_n_token_no_eos"):
            expected = f"an integer in 0..{limit} (max_tokens)"
            object.__setattr__(self, field, _within(field, getattr(self, field), expected, 0, limit))
        object.__setattr__(self, "min_tokens", max(self.min_tokens, self.first_n_token_no_eos))
        object.__setattr__(self, "first_n_token_no_eos", 0)
        self._set("n", lambda name, value: _within(name, value, "an integer in 1..128", 1, MAX_COMPLETIONS))

    def _check_seed(self) -> None:
        for field in ("seed", "seq_seed"):
            if getattr(self, field) is not None:
                expected, low, high = "an integer in -2**63..2**64-1 or None", -(SEED_LIMIT // 2), SEED_LIMIT - 1
                value = _within(field, getattr(self, field), expected, low, high)
                object.__setattr__(self, field, value % SEED_LIMIT)
        if self.seq_seed is not None:
            if self.seed not in (None, self.seq_seed):
                _refuse("seq_seed", self.seq_seed, f"equal to seed={self.seed}, of which it is another name")
            object.__setattr__(self, "seed", self.seq_seed)
            object.__setattr__(self, "seq_seed", None)

    def _check_logprobs(self) -> None:
        top = _within("top_logprobs", self.top_logprobs, f"an integer in 0..{MAX_LOGPROBS}", 0, MAX_LOGPROBS)
        count = _logprobs("logprobs", self.logprobs, top)
        if count is None and top:
            count = top
        if top and count != top:
            _refuse("top_logprobs", top, f"equal to logprobs={count}; give one of the two")
        object.__setattr__(self, "logprobs", count)
        object.__setattr__(self, "top_logprobs", 0)
        object.__setattr__(self, "prompt_logprobs", _logprobs("prompt_logprobs", self.prompt_logprobs, 0))
        if self.logprobs_mode not in ("raw", "processed"):
            _refuse("logprobs_mode", self.logprobs_mode, "'raw' or 'processed'")

    def _check_grammar(self) -> None:
        wanted = self.structured_output
        if isinstance(wanted, Mapping):
            known = StructuredOutput.__dataclass_fields__
            for name in wanted:
                if name not in known:
                    message = f"is not a field; known: {', '.join(known)}"
                    raise InvalidRequest(message, field=f"structured_output.{name}")
            wanted = StructuredOutput(**wanted)
        elif wanted is not None and not isinstance(wanted, StructuredOutput):
            _refuse("structured_output", wanted, "a StructuredOutput, a dict of its fields or None")
        if self.so_args is not None:
            official = StructuredOutput.from_so_args(self.so_args)
            if wanted not in (None, official):
                _refuse("so_args", self.so_args, "equal to structured_output; give one of the two")
            wanted = official
        object.__setattr__(self, "structured_output", wanted)
        object.__setattr__(self, "so_args", None)

    # ---- the normal forms, typed -------------------------------------------------------------------------------------

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as given."""
        return cast(tuple[str, ...], self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as sorted pairs."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias or ())

    @property
    def allowed(self) -> tuple[int, ...]:
        """`allowed_token_ids`; empty for everything."""
        return cast(tuple[int, ...], self.allowed_token_ids or ())

    @property
    def banned(self) -> tuple[int, ...]:
        """`banned_token_ids` as a tuple."""
        return cast(tuple[int, ...], self.banned_token_ids)

    @property
    def forced(self) -> tuple[int, ...]:
        """`golden_token_ids`; empty for none."""
        return cast(tuple[int, ...], self.golden_token_ids or ())

    @property
    def grammar(self) -> StructuredOutput | None:
        """`structured_output`, as an object."""
        return cast("StructuredOutput | None", self.structured_output)

    @property
    def has_penalties(self) -> bool:
        """Whether drawing needs to know what is in the prompt or output."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _temperature(field: str, value: Any) -> float:
    number = _number(field, value, "0 or a finite number of at least 1e-6")
    if number != 0 and not MIN_TEMPERATURE <= number < math.inf:
        _refuse(field, value, "0 (greedy) or a finite number of at least 1e-6")
    return min(number, MAX_FLOAT32)


def _numbers(expected: str, low: float, high: float, *, above: bool = False) -> Callable[[str, Any], float]:
    def check(field: str, value: Any) -> float:
        number = _number(field, value, expected)
        if not low <= number <= high or (above and number == low):
            _refuse(field, value, expected)
        return number

    return check


def _logprobs(field: str, value: Any, when_true: int) -> int | None:
    if value is None or value is False:
        return None
    if value is True:
        return when_true
    return _within(field, value, f"an integer in 0..{MAX_LOGPROBS}, True, False or None", 0, MAX_LOGPROBS)


def _ids(field: str, value: Any, low: int) -> tuple[int, ...]:
    expected = "a list of token ids >= 0" if low == 0 else "a list of token ids >= 0, or -1 where free"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(field, value, expected)
    ids = tuple(_integer(field, item, expected) for item in value)
    if any(not low <= item <= MAX_INT for item in ids):
        _refuse(field, list(ids), expected)
    return ids


def _bias(field: str, value: Any) -> tuple[tuple[int, float], ...] | None:
    expected = f"a dict of at most {MAX_LOGIT_BIAS} token ids >= 0 with values in [-100, 100]"
    if value is None:
        return None
    try:
        pairs = [(key, bias) for key, bias in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        _refuse(field, value, expected)
    result: dict[int, float] = {}
    for key, bias in pairs:
        text = isinstance(key, str) and key.isascii() and key.isdigit()
        token = _within(field, int(key) if text else key, expected, 0, MAX_INT)
        number = _number(field, bias, expected)
        if token in result or not -100 <= number <= 100:
            _refuse(field, {token: bias}, expected)
        result[token] = number
    if len(result) > MAX_LOGIT_BIAS:
        _refuse(field, f"a dict of {len(result)}", expected)
    return tuple(sorted(result.items())) or None


def _stop_strings(field: str, value: Any) -> tuple[str, ...] | None:
    expected = f"a string or a list of at most {MAX_STOP_STRINGS} strings"
    if value is None:
        return None
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(field, value, expected)
    strings = (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > MAX_STOP_STRINGS or any(not isinstance(item, str) for item in strings):
        _refuse(field, value, expected)
    if any(not item for item in strings):
        _refuse(field, list(strings), "free of empty strings, which would end every text at once")
    if any(map(_has_surrogate, strings)):
        _refuse(field, list(strings), "valid text; a lone surrogate can never be generated")
    return tuple(dict.fromkeys(strings)) or None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _within(field: str, value: Any, expected: str, low: int, high: int) -> int:
    number = _integer(field, value, expected)
    if not low <= number <= high:
        _refuse(field, value, expected)
    return number


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

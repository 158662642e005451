"""Frames: everything that crosses comes out as it went in, however the bytes arrive."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import SamplingParams, StructuredOutput
from deepinfer.engine.core import EngineStats
from deepinfer.engine.messages import Order, Update
from deepinfer.engine.outputs import Logprob, RequestMetrics
from deepinfer.engine.process.errors import LoopTraceback, pack_error, unpack_error
from deepinfer.engine.process.frames import (
    Abort,
    Commands,
    FrameDecoder,
    News,
    OrderFrame,
    decode_command,
    decode_news,
    encode,
)
from deepinfer.errors import (
    AcceleratorUnavailable,
    CheckpointError,
    ConfigError,
    DeepInferError,
    EngineDead,
    GrammarError,
    InvalidRequest,
)
from deepinfer.speculative.statistics import SpeculationStatistics

IDS = st.integers(0, 2**31 - 1)
GRAMMARS = st.sampled_from(
    [
        StructuredOutput(regex="a|ü"),
        StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}, trigger=[5, 6]),
        StructuredOutput(choices=["yes", "no"], trigger="</think>"),
        StructuredOutput(json_object=True, trigger=[9], bound_token_id=3),
    ]
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.sampled_from([-1, 1, 40]),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.1, 2.0),
        "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=4, unique=True),
        "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
        "stop_token_ids": st.lists(IDS, max_size=3),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "n": st.integers(1, 128),
        "max_tokens": st.none() | st.integers(1, 2**31 - 1),
        "logprobs": st.none() | st.integers(0, 5) | st.booleans(),
        "prompt_logprobs": st.none() | st.integers(0, 5),
        "golden_token_ids": st.lists(st.integers(-1, 100), max_size=4),
        "structured_output": GRAMMARS,
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=200, deadline=None)
@given(PARAMS, st.lists(IDS, min_size=1, max_size=50), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_an_order_crosses(fields: dict[str, Any], prompt: list[int], seed: int, priority: int) -> None:
    order = Order(7, "näme", np.array(prompt, np.int64), SamplingParams(**fields), seed, 2**31 - 1, priority)
    commands = decode_command(encode(Commands([OrderFrame.of(order), Abort(7)]))[8:])
    assert isinstance(commands, Commands)
    frame, abort = commands.items
    assert abort == Abort(7)
    assert isinstance(frame, OrderFrame)
    there = frame.order()
    assert there.prompt.tolist() == prompt
    assert there.prompt.dtype == np.int64
    assert (there.number, there.request_id, there.params, there.seed, there.max_tokens, there.priority) == (
        *(7, "näme", order.params, seed, 2**31 - 1, priority),
    )


def update(first: int, count: int, **more: Any) -> Update:
    ids = list(range(first, first + count))
    found = [{token: Logprob(-token / 7, 1), 0: Logprob(-math.inf, 2)} for token in ids]
    metrics = RequestMetrics(1.25, 1.5, num_prompt_tokens=3, num_generated_tokens=first + count)
    return Update(4, 1, ids, metrics, logprobs=found, cumulative_logprob=-first / 3, text="ab" * count, **more)


def test_news_cross() -> None:
    sent = News([update(1, 2, prompt_logprobs=[None, {3: Logprob(-0.1, 1)}])], {3: InvalidRequest("no", field="seed")})
    there = decode_news(encode(sent)[8:])
    assert isinstance(there, News)
    assert there.updates == sent.updates
    assert there.stats is None
    error = there.refused[3]
    assert type(error) is InvalidRequest
    assert (str(error), error.field) == ("seed: no", "seed")


def test_counts_cross() -> None:
    speculation = SpeculationStatistics(5)
    drafted, verified, accepted = np.array([5, 3, 0], np.int32), np.array([4, 3, 0], np.int32), np.array([4, 1, 0])
    speculation.observe(drafted, verified, accepted.astype(np.int32), np.full((3, 5), 0.7, np.float32))
    stats = EngineStats(steps=3, decode_seconds=0.1, finished={"length": 2}, speculation=speculation)
    there = decode_news(encode(News(stats=stats))[8:])
    assert isinstance(there, News)
    assert there.stats is not None
    assert there.stats.speculation is not None
    assert there.stats.speculation.to_dict() == speculation.to_dict()
    there.stats.speculation.observe(drafted, verified, accepted.astype(np.int32), np.full((3, 5), 0.7, np.float32))
    assert there.stats.accepted_drafts == 10
    there.stats.speculation = stats.speculation
    assert there.stats == stats


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_merged_updates_say_the_same(counts: list[int]) -> None:
    starts = [1 + sum(counts[:index]) for index in range(len(counts))]
    parts = [update(start, count) for start, count in zip(starts, counts, strict=True)]
    parts[0].prompt_logprobs = [None]
    merged, *later = parts
    for part in later:
        merged.absorb(part)
    whole = update(1, sum(counts), prompt_logprobs=[None])
    whole.cumulative_logprob = -starts[-1] / 3
    assert merged == whole


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(0, 300), max_size=10))
def test_frames_however_the_bytes_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(8, "little") + body for body in bodies)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder()
    found = [body for start, end in itertools.pairwise(edges) for body in decoder.feed(stream[start:end])]
    assert found == bodies


ERRORS = [
    DeepInferError("plain"),
    ConfigError("0 is not allowed", field="DEEPINFER_PAGE_SIZE"),
    ConfigError("clash"),
    CheckpointError("damaged", problems=("a: cut", "b: gone")),
    AcceleratorUnavailable("none here"),
    InvalidRequest("7 is not text", field="prompt"),
    GrammarError("structured_output.regex: wrong"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_type_text_and_fields(error: DeepInferError) -> None:
    there = unpack_error(msgspec.convert(msgspec.to_builtins(pack_error(error)), type(pack_error(error))))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
    assert there.__cause__ is None


def test_an_error_brings_its_traceback() -> None:
    def fail() -> None:
        raise RuntimeError("the cause") from ZeroDivisionError("its cause")

    with pytest.raises(RuntimeError) as caught:
        fail()
    there = unpack_error(pack_error(caught.value))
    assert type(there) is EngineDead
    assert str(there) == "RuntimeError: the cause"
    assert isinstance(there.__cause__, LoopTraceback)
    assert "in fail" in str(there.__cause__)
    assert "ZeroDivisionError: its cause" in str(there.__cause__)


def test_an_error_of_a_plugin_becomes_its_nearest_base() -> None:
    class CodecError(InvalidRequest):
        def __init__(self) -> None:
            super().__init__("cannot be read", field="messages")

    there = unpack_error(pack_error(CodecError()))
    assert type(there) is InvalidRequest
    assert (str(there), there.field) == ("messages: cannot be read", "messages")

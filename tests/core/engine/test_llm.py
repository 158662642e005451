"""`LLM.generate` on the fake model: shapes, order, errors that stay with their request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.loader import LoadedModel
from deepinfer.errors import CapacityError, ConfigError, EngineDead, InvalidRequest, RequestFailed
from deepinfer.settings import Settings


class LetterCodec:
    """Ids 6.. are the letters a..z; everything else is special."""

    bos_id: int | None = None

    def encode_text(self, text: str) -> list[int]:
        return [6 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + i - 6) if 6 <= i < 32 else "" if skip_special else f"<{i}>" for i in ids)


def make_llm(model: Any, codec: Any = None, **options: Any) -> LLM:
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "use_nextn_decode": 0}
    settings = Settings(**{**given, **options.pop("settings", {})})
    return LLM.from_loaded(LoadedModel(model, Path(), codec, "fake-id"), settings, poison_released=True, **options)


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_outputs_in_order_and_complete(fake_model: Any, naive_model: Any) -> None:
    llm = make_llm(fake_model, LetterCodec())
    prompts = ["hello", [7, 8, 9], np.array([20]), torch.tensor([6, 7]), {"prompt": "abc"}]
    outputs = llm.generate(prompts, GREEDY)
    ids = [[13, 10, 17, 17, 20], [7, 8, 9], [20], [6, 7], [6, 7, 8]]
    assert [out.prompt_token_ids for out in outputs] == ids
    assert [out.prompt for out in outputs] == ["hello", None, None, None, "abc"]
    assert [out.request_id for out in outputs] == ["0", "1", "2", "3", "4"]
    for out in outputs:
        (completion,) = out.outputs
        assert isinstance(out, RequestOutput)
        assert out.finished
        assert out.error is None
        assert out.numerics_id == "fake-id"
        assert out.num_cached_tokens == 0
        assert completion.token_ids == naive_model(out.prompt_token_ids, GREEDY, 4, 0)[0]
        assert completion.text == LetterCodec().decode(completion.token_ids)
        assert (completion.index, completion.finish_reason) == (0, "length")
        assert out.metrics.num_generated_tokens == 4
        assert out.metrics.arrival <= out.metrics.first_scheduled <= out.metrics.first_token <= out.metrics.finished
    llm._core.scheduler.assert_idle()


def test_official_names_and_single_prompts(fake_model: Any) -> None:
    llm = make_llm(fake_model, LetterCodec())
    by_ids = llm.generate(prompt_token_ids=[[6, 7, 8]], sampling_params=[GREEDY], use_tqdm=False)
    single = llm.generate("abc", GREEDY)
    flat = llm.generate([6, 7, 8], GREEDY)
    both = llm.generate(["abc"], GREEDY, prompt_token_ids=[[6, 7, 8]])
    texts = [out[0].outputs[0].token_ids for out in (by_ids, single, flat, both)]
    assert texts == [texts[0]] * 4
    assert both[0].prompt == "abc"
    assert llm.generate([], GREEDY) == []


def test_official_sampling_names(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    ours = SamplingParams(seed=5, max_tokens=6, min_tokens=2, logprobs=3)
    official = {"seq_seed": 5, "max_tokens": 6, "first_n_token_no_eos": 2, "logprobs": True, "top_logprobs": 3}
    one, two = llm.generate([[7, 8]] * 2, [ours, official], use_tqdm=False)
    assert one.outputs == two.outputs
    assert len(one.outputs[0].logprobs[0]) >= 3
    schema = {"schema_type": "regex", "schema": "a|b"}
    assert SamplingParams(so_args=schema) == SamplingParams(structured_output={"regex": "a|b"})


def test_priorities_order_requests_and_change_no_token(fake_model: Any) -> None:
    llm = make_llm(fake_model, settings={"max_num_seqs": 1})
    prompts = [[7], [8], [9], [10]]
    plain = llm.generate(prompts, GREEDY)
    assert [order_of(plain, index) for index in range(4)] == [0, 1, 2, 3]
    mixed = llm.generate(prompts, GREEDY, priority=[3, 1, 2, np.int64(-5)])
    assert [order_of(mixed, index) for index in range(4)] == [3, 1, 2, 0]
    assert [out.outputs[0].token_ids for out in mixed] == [out.outputs[0].token_ids for out in plain]
    for wrong, problem in ((1.5, "neither an integer"), ([1, 2], "2 entries for 4"), ([0, 0, 0, True], "True is not")):
        with pytest.raises(InvalidRequest, match=f"priority: .*{problem}"):
            llm.generate(prompts, GREEDY, priority=wrong)


def order_of(outputs: list[RequestOutput], index: int) -> int:
    """How many of the requests were started before this one."""
    started = [out.metrics.first_scheduled for out in outputs]
    return sorted(started).index(started[index])


def test_texts_begin_with_the_begin_token(fake_model: Any) -> None:
    codec = LetterCodec()
    codec.bos_id = 3
    llm = make_llm(fake_model, codec)
    prompts = ["ab", [6, 7], ""]
    assert [out.prompt_token_ids for out in llm.generate(prompts, GREEDY)] == [[3, 6, 7], [6, 7], []]
    plain = llm.generate(prompts, GREEDY, add_bos=False)
    assert [out.prompt_token_ids for out in plain] == [[6, 7], [6, 7], []]
    assert str(plain[2].error) == "prompt: the prompt is empty; give at least one token"


def test_special_tokens_in_text(fake_model: Any) -> None:
    llm = make_llm(fake_model, LetterCodec())
    ids = [6, 7, 8, 9]
    params = [
        SamplingParams(temperature=2.0, seed=5, max_tokens=12, ignore_eos=True, skip_special_tokens=skip)
        for skip in (True, False)
    ]
    hidden, shown = (out.outputs[0] for out in llm.generate([ids, ids], params))
    assert hidden.token_ids == shown.token_ids
    assert "<" not in hidden.text
    assert shown.text == LetterCodec().decode(shown.token_ids, skip_special=False) != hidden.text


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ([], {}, InvalidRequest, "prompt: the prompt is empty; give at least one token"),
        ([7, 37], {}, InvalidRequest, "prompt_token_ids: id 37 at index 1 is outside the vocabulary 0..36"),
        (
            [-1, -2],
            {},
            InvalidRequest,
            "prompt_token_ids: id -1 at index 0 is outside the vocabulary 0..36 (2 such ids)",
        ),
        (
            [7, 5],
            {},
            InvalidRequest,
            "prompt_token_ids: id 5 at index 1 stands for an image; images in a prompt are not",
        ),
        ([7] * 64, {}, InvalidRequest, "prompt: 64 tokens leave no room for output in the context of 64 tokens"),
        ([7, "x"], {}, InvalidRequest, "prompt_token_ids: token ids must be a flat list of integers, found 'x' (str)"),
        (
            [7, 1.5],
            {},
            InvalidRequest,
            "prompt_token_ids: token ids must be a flat list of integers, found 1.5 (float)",
        ),
        (
            [7, 2**70],
            {},
            InvalidRequest,
            f"prompt_token_ids: token ids must be a flat list of integers, found {2**70} (int)",
        ),
        (b"abc", {}, InvalidRequest, "prompt: b'abc' is neither text nor token ids; give bytes.decode()"),
        ([True, False], {}, InvalidRequest, "prompt_token_ids: token ids must be a flat list of integers"),
        (
            [[7], [8]],
            {},
            InvalidRequest,
            "prompt_token_ids: token ids must be a flat list of integers, found 2 dimensions",
        ),
        ([[7], [8, 9]], {}, InvalidRequest, "prompt_token_ids: token ids must be a flat list of integers"),
        ([2**70], {}, InvalidRequest, "prompt_token_ids: "),
        ([7], {"temperature": float("nan")}, InvalidRequest, "temperature: nan is not 0 or a finite number"),
        ([7], {"max_tokens": -1}, InvalidRequest, "max_tokens: -1 is not an integer in 1..2**31-1"),
        ([7], {"max_token": 1}, InvalidRequest, "max_token: is not a sampling parameter; known: temperature"),
        ([7], {"stop_token_ids": [40]}, InvalidRequest, "stop_token_ids: id 40 is outside the vocabulary 0..36"),
        ([7], 3, InvalidRequest, "sampling_params: int is neither SamplingParams nor a dict of its fields"),
        ("text", {}, InvalidRequest, "prompt: no installed plugin can turn text into token ids"),
    ],
)
def test_a_bad_request_hurts_only_itself(
    fake_model: Any, prompt: Any, params: Any, error: type[Exception], text: str
) -> None:
    llm = make_llm(fake_model)
    good = llm.generate([[9, 10]], GREEDY)[0].outputs[0].token_ids
    if isinstance(params, dict):
        params = {"temperature": 0, "max_tokens": 4, **params}
    first, bad, last = llm.generate([[9, 10], prompt, [9, 10]], [GREEDY, params, GREEDY])
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == good
    assert isinstance(bad.error, error)
    assert str(bad.error).startswith(text)
    assert bad.finished
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    with pytest.raises(error):
        llm.generate([prompt], [params], raise_errors=True)
    llm._core.scheduler.assert_idle()


def test_arguments_that_do_not_fit_together(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    with pytest.raises(InvalidRequest, match="prompts: give prompts or prompt_token_ids"):
        llm.generate()
    with pytest.raises(InvalidRequest, match="sampling_params: 1 entries for 2 prompts"):
        llm.generate([[7], [8]], [GREEDY])
    with pytest.raises(InvalidRequest, match="prompts: 2 prompts and 1 prompt_token_ids were given"):
        llm.generate(["a", "b"], prompt_token_ids=[[7]])
    with pytest.raises(InvalidRequest, match="prompt_token_ids: holds text"):
        llm.generate(prompt_token_ids=["a"])
    with pytest.raises(InvalidRequest, match="prompts: int is neither text nor a list"):
        llm.generate(7)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.generate([[]], GREEDY, raise_errors=True)


def test_too_large_for_the_pool(fake_model: Any) -> None:
    llm = make_llm(fake_model, num_pages=5, settings={"max_model_len": 64})
    big, small = llm.generate([[7] * 30, [7]], GREEDY)
    assert isinstance(big.error, CapacityError)
    assert "can need 9 pages of 4 tokens (30 prompt tokens, max_tokens=4), the pool has 5" in str(big.error)
    assert small.outputs[0].finish_reason == "length"
    shrunk = make_llm(fake_model, num_pages=5)
    assert shrunk.max_model_len == 20


def test_seeds_are_reported_and_repeat(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    free = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    first, second = (out.outputs[0] for out in llm.generate([[7], [7]], free))
    assert first.seed != second.seed
    again = llm.generate([7], SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True, seed=first.seed))
    assert again[0].outputs[0].token_ids == first.token_ids
    negative = llm.generate([7], SamplingParams(seed=-1))[0].outputs[0]
    assert negative.seed == 2**64 - 1


@pytest.mark.parametrize("mates", [0, 1, 3])
def test_a_seeded_request_does_not_feel_its_neighbours(fake_model: Any, mates: int) -> None:
    """H5: a seeded request repeats whatever runs beside it, seeded or not."""
    llm = make_llm(fake_model)
    seeded = SamplingParams(temperature=1.2, top_p=0.9, max_tokens=10, seed=11, ignore_eos=True)
    free = SamplingParams(temperature=1.2, max_tokens=10, ignore_eos=True)
    alone = llm.generate([9, 9, 9], seeded)[0].outputs[0].token_ids
    for _ in range(3):
        out = llm.generate([[20 + i] * 9 for i in range(mates)] + [[9, 9, 9]], [free] * mates + [seeded])
        assert out[-1].outputs[0].token_ids == alone


def test_a_used_slot_and_pages_leave_no_trace(fake_model: Any) -> None:
    """H2: the same request after others used its slot and pages gives the same tokens."""
    llm = make_llm(fake_model, num_pages=5, settings={"max_num_seqs": 1})
    first = llm.generate([8, 9, 10], GREEDY)[0].outputs[0].token_ids
    for token in range(11, 16):
        llm.generate([token] * 7, GREEDY)
        assert llm.generate([8, 9, 10], GREEDY)[0].outputs[0].token_ids == first


def test_stops(fake_model: Any, naive_model: Any) -> None:
    llm = make_llm(fake_model)
    full = naive_model([7, 8], SamplingParams(temperature=0, ignore_eos=True), 10, 0)[0]
    stop = full[3]
    out = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop], ignore_eos=True))
    (completion,) = out[0].outputs
    assert completion.token_ids == full[: full.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    to_the_end = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(to_the_end.outputs[0].token_ids) == 62
    assert to_the_end.outputs[0].finish_reason == "length"


def test_failures_while_running(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    fake_model.fail_on = lambda slots: len(slots) > 1
    outputs = llm.generate([[7], [8]], GREEDY)
    assert all(isinstance(out.error, RequestFailed) for out in outputs)
    assert [out.outputs[0].finish_reason for out in outputs] == ["error", "error"]
    with pytest.raises(RequestFailed, match="kernel fell over"):
        llm.generate([[7], [8]], GREEDY, raise_errors=True)
    assert llm.generate([7], GREEDY)[0].error is None


def test_an_interrupt_between_steps_leaves_a_clean_engine(fake_model: Any) -> None:
    llm = make_llm(fake_model)
    want = llm.generate([7], GREEDY)[0].outputs[0].token_ids
    step, calls = llm._core.step, iter(range(3))

    def interrupted() -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    llm._core.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[7 + i] for i in range(6)], GREEDY)
    llm._core.scheduler.assert_idle()
    llm._core.step = step
    assert llm.generate([7], GREEDY)[0].outputs[0].token_ids == want


def test_an_interrupt_inside_a_step_on_the_worker_ends_that_step_only(fake_model: Any) -> None:
    llm = make_llm(fake_model)

    def interrupt(slots: list[int]) -> bool:
        raise KeyboardInterrupt

    fake_model.fail_on = interrupt
    out = llm.generate([[7]], GREEDY)[0]
    assert "the step was ended by KeyboardInterrupt" in str(out.error)
    llm._core.scheduler.assert_idle()


def test_an_interrupted_call_leaves_a_clean_engine(fake_model: Any) -> None:
    llm = make_llm(fake_model, settings={"zero_overhead_scheduling": False})
    want = llm.generate([7], GREEDY)[0].outputs[0].token_ids
    steps = iter(range(3))

    def interrupt(slots: list[int]) -> bool:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return False

    fake_model.fail_on = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[7 + i] for i in range(6)], GREEDY)
    llm._core.scheduler.assert_idle()
    fake_model.fail_on = lambda slots: False
    assert llm.generate([7], GREEDY)[0].outputs[0].token_ids == want


def test_close_and_context_manager(fake_model: Any) -> None:
    with make_llm(fake_model) as llm, make_llm(fake_model) as other:
        assert llm.generate([7], GREEDY)[0].outputs[0].token_ids == other.generate([7], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(EngineDead, match="this LLM was closed"):
        llm.generate([7], GREEDY)
    llm.close()


def test_limits(fake_model: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 65 exceeds the model's context of 64 tokens"):
        make_llm(fake_model, settings={"max_model_len": 65})
    loaded = LoadedModel(fake_model, budget=17_000)
    with pytest.raises(CapacityError, match=r"one request of the longest length needs 16 pages, \d+ fit"):
        LLM.from_loaded(loaded, Settings(max_num_seqs=3, max_model_len=64))
    with pytest.raises(CapacityError, match=r"(?s)4000 pages were asked for, .* fit\n.*weights .*pages: 4,001 x 32 B"):
        LLM.from_loaded(LoadedModel(fake_model, budget=100_000), Settings(max_num_seqs=3), num_pages=4000)


def test_what_cannot_be_scored_disturbs_no_other(fake_model: Any) -> None:
    class Strict(LetterCodec):
        def encode_text(self, text: str) -> list[int]:
            if not text.isascii():
                raise InvalidRequest("not plain", field="prompt")
            return super().encode_text(text)

    llm = make_llm(fake_model, Strict())
    alone = llm.score([[7, 8]], ["abc"])[0]
    scores = llm.score(["a", [7, 8], 5, [7], "ab", "a\u00e9", [7, 8]], ["b\u00e9", "abc", "c", b"d", 4, "d", "abc"])
    assert [score.error is None for score in scores] == [False, True, False, False, False, False, True]
    assert {type(score.error) for score in scores if score.error is not None} == {InvalidRequest}
    assert scores[1] == scores[6] == alone
    llm._core.scheduler.assert_idle()

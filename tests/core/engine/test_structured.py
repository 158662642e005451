"""Structured outputs in the loop: always valid, never a bit different, and trouble stays with its request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams, StructuredOutput
from deepinfer.conformance.scripted import ScriptedDrafter
from deepinfer.conformance.sim import SimulatedDevice
from deepinfer.engine.grammars import Grammars, MaskGate
from deepinfer.engine.loader import LoadedModel
from deepinfer.errors import CapabilityError, EngineDead, GrammarError, InvalidRequest, RequestFailed
from deepinfer.scheduler.request import RequestState
from deepinfer.settings import Settings

pytest.importorskip("xgrammar")

TEXT = {**{6 + index: chr(ord("a") + index) for index in range(26)}, 32: "{", 33: "}", 34: '"', 35: ":", 36: "0"}
ABC = StructuredOutput(regex="(ab|ba){2,4}c")
WORDS = StructuredOutput(choices=["yes", "no", "nobody"])
PAIRS = StructuredOutput(ebnf='root ::= "x" [a-d] root | "z"')
OBJECT = StructuredOutput(json_object=True)
LATE = StructuredOutput(regex="q{2,3}", trigger=[9])
SO_PATTERNS = {ABC: r"(ab|ba){2,4}c", WORDS: r"yes|no|nobody", PAIRS: r"(x[a-d])*z"}


LETTERS = {text: token for token, text in TEXT.items()}


def text_of(tokens: list[int]) -> str:
    return "".join(TEXT.get(token, "") for token in tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer for the fake model."""
    path = tmp_path_factory.mktemp("letters")
    added = [{"id": index, "content": f"<{index}>"} for index in range(6)]
    vocab = {text: token for token, text in TEXT.items()}
    contents = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(contents))
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    """One service for all engines of this file: its processes take a while to start."""
    traits: Any = SimpleNamespace(vocab_size=37, eos_token_ids=frozenset({1}))
    service = Grammars(folder, traits, Settings(), rows=4 * 6)
    yield service
    service.close()


Make = Callable[..., Any]


@pytest.fixture
def make(make_engine: Make, grammars: Grammars) -> Make:
    def build(model: Any, **options: Any) -> Any:
        core = make_engine(model, **options)
        core.constraints.grammars = grammars
        return core

    return build


def sampling(wanted: StructuredOutput | None, **options: Any) -> SamplingParams:
    return SamplingParams(structured_output=wanted, **options)


def add(core: Any, name: str, params: SamplingParams, *, seed: int = 3, max_tokens: int = 20, **options: Any) -> Any:
    prompt = np.array([7 + len(name), *name.encode()[-2:]], np.int64) % 30
    return core.add(name, prompt, params, seed=seed, max_tokens=max_tokens, **options)


def finish(core: Any) -> None:
    while core.num_unfinished:
        core.step()


WANTED: dict[str, SamplingParams] = {
    "abc": sampling(ABC),
    "abc greedy": sampling(ABC, temperature=0, logprobs=2),
    "words": sampling(WORDS, logprobs=1, logprobs_mode="processed"),
    "pairs": sampling(PAIRS, temperature=0.7, repetition_penalty=1.2),
    "object": sampling(OBJECT),
    "late": sampling(LATE, logit_bias={9: 4.0}),
    "free": SamplingParams(logprobs=1),
    "free greedy": SamplingParams(temperature=0),
}


SEEDS = {name: 3 + index for index, name in enumerate(WANTED)}


def run_all(core: Any, names: list[str] | None = None, at_once: bool = True) -> dict[str, Any]:
    generations = {}
    for name in names or list(WANTED):
        generations[name] = add(core, name, WANTED[name], seed=SEEDS[name])
        if not at_once:
            finish(core)
    finish(core)
    core.scheduler.assert_idle()
    return {name: (item.token_ids, item.logprobs, item.finish_reason, item.error) for name, item in generations.items()}


@pytest.fixture
def alone(fake_model: Any, make: Make) -> dict[str, Any]:
    return run_all(make(fake_model, zero_overhead_scheduling=False), at_once=False)


def test_outputs_are_valid_when_they_stop(alone: dict[str, Any]) -> None:
    stopped = 0
    for name, (tokens, _, reason, error) in alone.items():
        assert error is None
        wanted = WANTED[name].grammar
        text = text_of(tokens)
        if wanted in SO_PATTERNS and reason == "stop":
            stopped += 1
            assert re.fullmatch(SO_PATTERNS[wanted], text), (name, text)
        if wanted is LATE and 9 in tokens:
            assert re.fullmatch("q{2,3}", text_of(tokens[tokens.index(9) + 1 :])), text
        if wanted is OBJECT:
            assert text.startswith("{")
            assert reason != "stop" or isinstance(json.loads(text), dict)
    assert stopped >= 3


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ({}, None),
        ({}, list(WANTED)[::-1]),
        ({"zero_overhead_scheduling": False}, None),
        ({"preempt_every": 2}, None),
        ({"preempt_every": 3, "zero_overhead_scheduling": False, "max_prefill_chunk": 2}, None),
        ({"num_pages": 12, "max_num_seqs": 3}, None),
        ({"executor": SimulatedDevice, "preempt_every": 4}, None),
        ({"enable_prefix_caching": False, "max_num_seqs": 2}, None),
    ],
)
def test_the_same_bits_whatever_happens_around(
    engine: dict[str, Any], names: list[str] | None, fake_model: Any, make: Make, alone: dict[str, Any]
) -> None:
    assert run_all(make(fake_model, **engine), names) == alone


# ---- drafts --------------------------------------------------------------------------------------------------------


def oracle(alone: dict[str, Any], acceptance: float = 0.8) -> ScriptedDrafter:
    """Knows what every request says, and is wrong at a fifth of the places: often with what its grammar refuses."""
    length = 3
    return ScriptedDrafter(5, {SEEDS[name]: (length, alone[name][0]) for name in alone}, acceptance)


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"zero_overhead_scheduling": False},
        {"preempt_every": 3},
        {"preempt_every": 4, "executor": SimulatedDevice},
        {"max_num_seqs": 2, "max_num_batched_tokens": 9, "enable_prefix_caching": False},
    ],
)
def test_drafts_change_nothing(engine: dict[str, Any], fake_model: Any, make: Make, alone: dict[str, Any]) -> None:
    core = make(fake_model, drafter=oracle(alone), use_nextn_decode=5, **{"max_num_batched_tokens": 32, **engine})
    assert run_all(core) == alone
    assert core.stats.accepted_drafts > 20


def test_rejection_sampling_keeps_to_the_grammar(fake_model: Any, make: Make, alone: dict[str, Any]) -> None:
    options = {"use_nextn_decode": 5, "max_num_batched_tokens": 32, "draft_verification": "rejection"}
    core = make(fake_model, drafter=oracle(alone), **options)
    for name, (tokens, _, reason, error) in run_all(core).items():
        assert error is None
        pattern = SO_PATTERNS.get(WANTED[name].grammar)
        assert pattern is None or reason != "stop" or re.fullmatch(pattern, text_of(tokens)), (name, tokens)
        assert "greedy" not in name or tokens == alone[name][0]
    assert core.stats.accepted_drafts > 10


@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_that_the_host_never_hears_of_are_cut(
    asynchronous: bool, fake_model: Any, make: Make, alone: dict[str, Any]
) -> None:
    """H4: what follows an unknown draft is not accepted, whatever the device knows."""
    options = {"use_nextn_decode": 5, "max_num_batched_tokens": 32, "zero_overhead_scheduling": asynchronous}
    core = make(fake_model, drafter=oracle(alone, 1.0), **options)
    original, losing = core.results.append, {"abc", "abc greedy", "words"}

    def lossy(scheduled: Any, result: Any) -> Any:
        changed = original(scheduled, result)
        for generation in changed:
            if generation.request.request_id in losing:
                generation.drafts = []
        return changed

    core.results.append = lossy
    generations = {name: add(core, name, WANTED[name], seed=SEEDS[name]) for name in WANTED}
    finish(core)
    core.scheduler.assert_idle()
    for name, generation in generations.items():
        assert (generation.token_ids, generation.logprobs) == alone[name][:2]
        assert generation.metrics.num_drafts_accepted == 0 or name not in losing
        assert generation.metrics.num_drafts_verified > 0 or len(generation.token_ids) < 3
    assert core.stats.accepted_drafts > 10


def test_ignore_eos_goes_on_freely_after_the_grammar(fake_model: Any, make: Make) -> None:
    core = make(fake_model)
    generation = add(core, "on", sampling(WORDS, ignore_eos=True), max_tokens=15)
    finish(core)
    assert generation.finish_reason == "length"
    assert text_of(generation.token_ids[: generation.token_ids.index(1)]) in ("yes", "no", "nobody")


# ---- compiling -----------------------------------------------------------------------------------------------------


class Slow:
    """A service whose grammars come when the test says so."""

    def __init__(self, inner: Grammars) -> None:
        self.inner, self.futures = inner, [Future() for _ in range(3)]
        self.left = iter(self.futures)
        self.fill = inner.fill

    def check(self) -> None:
        pass

    def submit(self, wanted: StructuredOutput) -> Any:
        return next(self.left)


def test_others_run_while_a_grammar_is_compiled(fake_model: Any, make: Make, grammars: Grammars) -> None:
    core = make(fake_model)
    core.constraints.grammars = slow = Slow(grammars)
    waiting, aborted, failing = (add(core, f"wait {index}", sampling(WORDS)) for index in range(3))
    free = add(core, "free", SamplingParams(), max_tokens=5)
    assert waiting.request.state is RequestState.COMPILING
    while free.finish_reason is None:
        core.step()
    assert core.abort("wait 1") is aborted
    assert (aborted.finish_reason, slow.futures[1].cancelled()) == ("abort", True)
    core.step()
    assert waiting.metrics.first_scheduled is None
    slow.futures[2].set_exception(GrammarError("took more than 20 s"))
    changed: list[Any] = []
    while not changed:
        changed = core.step()
    assert changed == [failing]
    assert (failing.finish_reason, str(failing.error)) == ("error", "took more than 20 s")
    slow.futures[0].set_result(grammars.submit(WORDS).result())
    finish(core)
    assert text_of(waiting.token_ids) in ("yes", "no", "nobody")
    core.scheduler.assert_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_completions_that_share_a_prompt_wait_for_both(
    fails: bool, fake_model: Any, make: Make, grammars: Grammars
) -> None:
    core = make(fake_model)
    core.constraints.grammars = slow = Slow(grammars)
    prompt = np.arange(6, 16)
    options: dict[str, Any] = {"seed": 3, "max_tokens": 20}
    first = core.add("first", prompt, sampling(WORDS), **options)
    second = core.add("second", prompt, sampling(WORDS), completion=1, leader=first, **options)
    third = core.add("third", prompt, sampling(WORDS), completion=2, leader=first, **options)
    good = grammars.submit(WORDS).result()
    slow.futures[1].set_result(good)
    core.step()
    assert core.abort("third") is third
    if fails:
        slow.futures[0].set_exception(GrammarError("no"))
    else:
        slow.futures[0].set_result(good)
    finish(core)
    assert (first.error is None) is not fails
    assert second.request.num_cached_tokens == (0 if fails else 8)
    assert text_of(second.token_ids) in ("yes", "no", "nobody")
    core.scheduler.assert_idle()


def test_aborted_while_nothing_else_runs(fake_model: Any, make: Make, grammars: Grammars) -> None:
    core = make(fake_model)
    core.constraints.grammars = Slow(grammars)
    add(core, "only", sampling(WORDS))
    assert core.step() == []
    core.abort("only")
    assert core.num_unfinished == 0
    core.scheduler.assert_idle()


# ---- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_forced_token_that_the_grammar_refuses_ends_only_its_request(
    asynchronous: bool, fake_model: Any, make: Make, alone: dict[str, Any]
) -> None:
    core = make(fake_model, zero_overhead_scheduling=asynchronous)
    bad = add(core, "bad", sampling(WORDS, golden_token_ids=[6], logprobs=1))
    good = add(core, "abc", WANTED["abc"], seed=3)
    finish(core)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, GrammarError)
    assert bad.token_ids == bad.logprobs == []
    assert good.token_ids == alone["abc"][0]
    core.scheduler.assert_idle()


def with_drafts(alone: dict[str, Any], drafts: int, **outputs: tuple[int, str]) -> dict[str, Any]:
    """Options of an engine whose drafter knows what requests of these seeds say."""
    if not drafts:
        return {}
    drafter = oracle(alone, 1.0)
    known = {seed: (3, [LETTERS[letter] for letter in text]) for seed, text in outputs.values()}
    drafter.outputs = {**drafter.outputs, **known}
    return {"drafter": drafter, "use_nextn_decode": 5, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_dead_end_ends_only_its_request(
    asynchronous: bool, drafts: int, fake_model: Any, make: Make, alone: dict[str, Any]
) -> None:
    core = make(fake_model, zero_overhead_scheduling=asynchronous, **with_drafts(alone, drafts, dead=(20, "aaa")))
    # No id spells a digit but 0.
    dead = add(core, "dead", sampling(StructuredOutput(regex="aa7")), seed=20)
    good = add(core, "abc", WANTED["abc"], seed=3)
    seen = []
    while core.num_unfinished:
        seen += core.step()
    assert isinstance(dead.error, GrammarError)
    assert "no token can follow after 2 tokens" in str(dead.error)
    assert text_of(dead.token_ids) == "aa"
    assert dead in seen
    assert good.token_ids == alone["abc"][0]
    core.scheduler.assert_idle()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_min_tokens_beyond_the_end_of_a_grammar(
    asynchronous: bool, drafts: int, fake_model: Any, make: Make, alone: dict[str, Any]
) -> None:
    known = with_drafts(alone, drafts, long=(20, "abcabc"), fits=(21, "abc"), banned=(22, "abc"))
    core = make(fake_model, zero_overhead_scheduling=asynchronous, **known)
    only = StructuredOutput(choices=["abc"])
    long = add(core, "long", sampling(only, min_tokens=5, logprobs=0), seed=20)
    fits = add(core, "fits", sampling(only, min_tokens=3), seed=21)
    banned = add(core, "banned", sampling(only, banned_token_ids=[8]), seed=22)
    good = add(core, "abc", WANTED["abc"], seed=3)
    finish(core)
    assert isinstance(long.error, GrammarError)
    assert "all that the grammar allows after 3 tokens is forbidden by min_tokens=5" in str(long.error)
    assert text_of(long.token_ids) == "abc"
    assert len(long.logprobs) == 3
    assert isinstance(banned.error, GrammarError)
    assert "all that the grammar allows after 2 tokens is forbidden by banned_token_ids" in str(banned.error)
    assert text_of(banned.token_ids) == "ab"
    assert (text_of(fits.token_ids), fits.finish_reason) == ("abc", "stop")
    assert good.token_ids == alone["abc"][0]
    core.scheduler.assert_idle()


@pytest.mark.parametrize("executor", [None, SimulatedDevice])
def test_a_failed_step_ends_its_requests_and_no_more(executor: Any, fake_model: Any, make: Make) -> None:
    core = make(fake_model, executor=executor)
    first = add(core, "first", sampling(PAIRS, logit_bias={31: -50.0}))
    while len(first.token_ids) < 3:
        core.step()
    fake_model.fail_on = lambda slots: True
    while first.finish_reason is None:
        core.step()
    fake_model.fail_on = lambda slots: False
    assert isinstance(first.error, RequestFailed)
    after = add(core, "after", sampling(WORDS))
    finish(core)
    assert text_of(after.token_ids) in ("yes", "no", "nobody")
    core.scheduler.assert_idle()


def test_closing_frees_a_step_that_waits_for_its_masks(fake_model: Any, make: Make, grammars: Grammars) -> None:
    core = make(fake_model)
    core.constraints.grammars = SimpleNamespace(
        check=grammars.check, submit=grammars.submit, fill=grammars.fill, close=lambda: None
    )
    generation = add(core, "long", sampling(PAIRS, logit_bias={31: -50.0}))
    while len(generation.token_ids) < 3:
        core.step()
    core._launch()
    core.close()
    gate = MaskGate()
    gate.cancel()
    with pytest.raises(EngineDead):
        gate.take()


# ---- LLM -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused_by_name(
    fake_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_num_seqs=4, max_num_batched_tokens=16, use_nextn_decode=0)
    with LLM.from_loaded(LoadedModel(fake_model, None), settings) as llm:
        outputs = llm.generate([[7], [8]], [sampling(WORDS), SamplingParams(max_tokens=2)])
        assert isinstance(outputs[0].error, InvalidRequest)
        assert "tokenizer.json" in str(outputs[0].error)
        assert outputs[1].error is None

        def missing() -> None:
            raise CapabilityError("pip install 'deepinfer-core[structured]'")

        monkeypatch.setattr("deepinfer.engine.grammars.require_library", missing)
        with pytest.raises(CapabilityError, match="deepinfer-core\\[structured\\]"):
            llm.generate([7], sampling(WORDS))


def test_parameters_take_both_shapes() -> None:
    official = SamplingParams(so_args={"schema_type": "regex", "schema": "a+"})
    assert official == SamplingParams(structured_output=StructuredOutput(regex="a+"))
    assert official == SamplingParams(structured_output={"regex": "a+"})
    assert official.so_args is None
    for wrong in (
        {"structured_output": "a+"},
        {"structured_output": {"guided_regex": "a+"}},
        {"structured_output": {}},
        {"so_args": {"schema_type": "xml", "schema": ""}},
        {"structured_output": {"regex": "b"}, "so_args": {"schema_type": "regex", "schema": "a+"}},
    ):
        with pytest.raises(InvalidRequest, match=r"structured_output|so_args"):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_tiny_end_to_end(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = [
        {"structured_output": {"json_schema": schema}},
        {"structured_output": {"regex": "[ab]{3,6}c"}, "n": 2},
        {"so_args": {"schema_type": "ebnf", "schema": 'root ::= "x" [0-9] | "."'}},
        {"structured_output": {"regex": "(oops"}},
        {"so_args": {"schema_type": "json", "schema": "{"}},
        {},
    ]
    prompts = [[3 + index, 40, 50] for index in range(len(wanted))]
    params: Any = [{"seed": index, "max_tokens": 40 if index < 3 else 3, **each} for index, each in enumerate(wanted)]
    options: dict[str, Any] = {"accelerator": "cpu", "batch_invariant": True, "max_model_len": 64, "page_size": 16}
    with LLM("tiny", cache_dir=tmp_path, **options) as llm:
        outputs = llm.generate(prompts, params)
        texts = [[part.text for part in output.outputs] for output in outputs]
        assert [output.error is None for output in outputs] == [True, True, True, False, False, True]
        assert isinstance(outputs[3].error, GrammarError)
        assert isinstance(outputs[4].error, GrammarError)
        assert outputs[0].outputs[0].finish_reason == "length" or "a" in json.loads(texts[0][0])
        assert all(re.fullmatch("[ab]{3,6}c", text) for text in texts[1])
        assert re.fullmatch(r"x[0-9]|\.", texts[2][0])
        alone = llm.generate(prompts[1], params[1])
        assert [part.token_ids for part in alone[0].outputs] == [part.token_ids for part in outputs[1].outputs]

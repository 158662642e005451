"""Faults through the public API, whoever turns the loop: their requests get a typed error, all others their tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import NOT_A_NUMBER, RAISE, faulty_backend
from support.grammars import ENDLESS_SCHEMA

from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.errors import DeepInferError, GrammarError, RequestFailed
from deepinfer.sampling.structured import StructuredOutput

HEALTHY = [[7], [8, 9, 10], list(range(20, 37))]
SETTINGS: dict[str, Any] = {
    "batch_invariant": True,
    "max_model_len": 128,
    "page_size": 16,
    "num_threads": 1,
    "xgrammar_timeout": 0.5,
}
ENDLESS = StructuredOutput(json_schema=ENDLESS_SCHEMA)
WANTED = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, banned_token_ids=[RAISE, NOT_A_NUMBER])

Serve = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "tiny", "tiny")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with faulty_backend(tmp_path_factory.mktemp("plugin")) as name:
        yield name


async def ask(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The last output of a request, with what its iterator raised."""
    last = RequestOutput("refused", None, prompt)
    try:
        async for output in llm.generate(prompt, params):
            last = output
    except DeepInferError as error:
        last.error = error
    return last


@pytest.fixture(params=["synchronous", "asynchronous", "thread", "process"], scope="module")
def engine(request: pytest.FixtureRequest, path: Path, backend: str) -> Iterator[tuple[Serve, Any]]:
    """A way to serve requests all at once, and the engine that does it."""
    settings = {**SETTINGS, "zero_overhead_scheduling": request.param != "synchronous"}
    if request.param in ("synchronous", "asynchronous"):
        with LLM(path, accelerator=backend, **settings) as llm:
            yield lambda prompts, params: llm.generate(prompts, params, use_tqdm=False, raise_errors=False), llm
        return
    with AsyncLLM(path, accelerator=backend, in_process=request.param == "thread", **settings) as engine:

        async def serve(prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
            return list(await asyncio.gather(*map(ask, [engine] * len(prompts), prompts, params)))

        yield lambda prompts, params: asyncio.run(serve(prompts, params)), engine


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """What healthy requests say alone."""
    with LLM(path, accelerator="cpu", **SETTINGS) as llm:
        return [llm.generate([prompt], WANTED, use_tqdm=False)[0].outputs[0].token_ids for prompt in HEALTHY]


def counts(llm: Any) -> Counter[str]:
    """How many requests ended for which reason, and how many steps failed, so far."""
    return Counter({**llm.stats.finished, "failed steps": llm.stats.failed_steps})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_kernel_that_raises_in_the_middle_of_a_step(engine: tuple[Serve, Any], expected: list[list[int]]) -> None:
    serve, llm = engine
    before = counts(llm)
    bad = serve([[30, RAISE, 31]], [WANTED])[0]
    assert type(bad.error) is RequestFailed
    assert "RuntimeError: the device fell over" in str(bad.error)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == []
    assert tokens(serve(HEALTHY, [WANTED] * 3)) == expected
    assert counts(llm) - before == {"failed steps": 1, "error": 1, "length": 3}


def test_a_failing_step_ends_the_requests_of_that_step_only(engine: tuple[Serve, Any]) -> None:
    serve, llm = engine
    before = counts(llm)
    outputs = serve([*HEALTHY, [30, RAISE]], [WANTED] * 4)
    assert all(output.error is None or type(output.error) is RequestFailed for output in outputs)
    assert outputs[-1].error is not None
    assert (counts(llm) - before)["failed steps"] == 1
    again = serve(HEALTHY, [WANTED] * 3)
    assert all(output.error is None for output in again)


def test_logits_that_are_no_numbers(engine: tuple[Serve, Any], expected: list[list[int]]) -> None:
    serve, llm = engine
    before = counts(llm)
    outputs = serve([HEALTHY[0], [30, NOT_A_NUMBER, 31], *HEALTHY[1:]], [WANTED] * 4)
    bad = outputs.pop(1)
    assert type(bad.error) is RequestFailed
    assert "the logits for position 3 hold NaN" in str(bad.error)
    assert tokens(outputs) == expected
    assert counts(llm) - before == {"error": 1, "length": 3}
    # The same pages and slot again: nothing of it may be left, or be found as a prefix.
    assert tokens(serve(HEALTHY, [WANTED] * 3)) == expected
    assert serve([[30, NOT_A_NUMBER, 31]], [WANTED])[0].error is not None


def test_a_grammar_that_takes_too_long(engine: tuple[Serve, Any], expected: list[list[int]]) -> None:
    pytest.importorskip("xgrammar")
    serve, llm = engine
    before = counts(llm)
    outputs = serve([*HEALTHY, [7]], [WANTED] * 3 + [SamplingParams(structured_output=ENDLESS)])
    bad = outputs.pop()
    assert type(bad.error) is GrammarError
    assert "structured_output.json_schema: not compiled within 0.5 s (grammar_timeout); simplify it" in str(bad.error)
    assert tokens(outputs) == expected
    assert counts(llm) - before == {"error": 1, "length": 3}


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let processes that are started now write no more than 4 KiB into any file: what is longer is torn there."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


STORE: dict[str, Any] = {**SETTINGS, "prefix_load_seconds": 30.0}


def ask_process(path: Path, store: Path) -> tuple[list[list[int]], list[int]]:
    """What a new process with a store on disk says, and how many tokens it found there."""

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(path, accelerator="cpu", prefix_disk_dir=store, **STORE) as llm:
            return [await ask(llm, prompt, WANTED) for prompt in HEALTHY]

    outputs = asyncio.run(main())
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


def ask_here(path: Path, store: Path) -> tuple[list[list[int]], list[int]]:
    """The same in this process."""
    with LLM(path, accelerator="cpu", prefix_disk_dir=store, **STORE) as llm:
        outputs = [llm.generate(prompt, WANTED, use_tqdm=False)[0] for prompt in HEALTHY]
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


def test_a_full_disk_stops_nothing(
    path: Path, expected: list[list[int]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("small_files")
    assert ask_process(path, tmp_path) == (expected, [0, 0, 0])
    assert ask_here(path, tmp_path) == (expected, [0, 0, 0]), "what is there is torn"


def test_torn_files_are_misses_in_a_new_process(path: Path, expected: list[list[int]], tmp_path: Path) -> None:
    assert ask_here(path, tmp_path) == (expected, [0, 0, 0])
    assert ask_process(path, tmp_path) == (expected, [0, 0, 16]), "whole files are found"
    for file in tmp_path.glob("??/*"):
        file.write_bytes(file.read_bytes()[:-20])
    assert ask_process(path, tmp_path) == (expected, [0, 0, 0])

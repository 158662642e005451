"""A loop in a process of its own: the tokens of `LLM`, and an honest end however it comes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.engine.process import client
from deepinfer.engine.process.client import ProcessLoop
from deepinfer.engine.process.errors import LoopTraceback
from deepinfer.engine.streams import Streams
from deepinfer.errors import (
    AcceleratorUnavailable,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDead,
    InvalidRequest,
)
from deepinfer.settings import load_settings

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "batch_invariant": True,
    "max_model_len": 160,
    "page_size": 16,
    "num_threads": 1,
}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 120))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[AsyncLLM]:
    """One engine for all tests that leave it alive."""
    with AsyncLLM(path, **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, process or socket outlives a test that made it."""
    before, files = set(threading.enumerate()), open_sockets()
    yield
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("deepinfer")]
    assert left == []
    assert open_sockets() <= files


def open_sockets() -> int:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return 0
    return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir() if entry.is_symlink())


def has_ended(pid: int) -> bool:
    """Whether a process is gone; it may need a moment. One that nobody has waited for yet is gone too."""
    for _ in range(1200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    return False


async def collect(llm: AsyncLLM, prompt: Any, params: Any = LONG, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


async def begun(llm: AsyncLLM, prompt: Any) -> AsyncIterator[RequestOutput]:
    """A long request that has its first token."""
    outputs = llm.generate(prompt, LONG)
    await anext(outputs)
    return outputs


# ---- the same as in this process -------------------------------------------------------------------------------------


def test_tokens_texts_and_log_probabilities_are_those_of_llm(path: Path, shared: AsyncLLM) -> None:
    params = [
        SamplingParams(seed=1, max_tokens=7, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, seed=2, max_tokens=9, n=2, stop_token_ids=[30], logit_bias={30: 3.0}),
        SamplingParams(seed=2**64 - 1, max_tokens=12, stop=["e", "a "], min_tokens=3),
        SamplingParams(seed=4, max_tokens=5, golden_token_ids=[-1, 42], skip_special_tokens=False),
    ]
    prompts = [[7, 8, 9], list(range(20, 57)), "Hello there", [9] * 16]
    with LLM(path, **SETTINGS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)

    async def main() -> list[list[RequestOutput]]:
        return list(await asyncio.gather(*map(collect, [shared] * 4, prompts, params)))

    for outputs, wanted in zip(run(main()), expected, strict=True):
        assert outputs[-1].outputs == wanted.outputs
        assert outputs[-1].prompt_logprobs == wanted.prompt_logprobs
        assert outputs[-1].prompt_token_ids == wanted.prompt_token_ids
        assert outputs[-1].numerics_id == wanted.numerics_id
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.num_generated_tokens == len(wanted.outputs[0].token_ids)


def test_what_the_engine_says_of_itself(path: Path, shared: AsyncLLM) -> None:
    with LLM(path, **SETTINGS) as llm:
        assert shared.traits == llm.traits
        assert shared.max_model_len == llm.max_model_len == 160
        assert shared.numerics_id == llm.numerics_id
        assert shared.memory_plan.request == llm.memory_plan.request
        assert shared.load_stats.bytes == llm.load_stats.bytes > 0
        assert type(shared.get_tokenizer()) is type(llm.get_tokenizer())


def test_metrics_counts_and_trace_cross(shared: AsyncLLM) -> None:
    before = shared.stats.finished.get("length", 0)
    trace = shared.trace()
    run(collect(shared, [7, 8], SamplingParams(max_tokens=5, ignore_eos=True)))
    assert shared.stats.finished["length"] == before + 1
    text = shared.metrics_text()
    assert f'deepinfer_requests_total{{engine="0",reason="length"}} {before + 1}' in text
    lanes = {event["tid"] for event in trace.to_dict()["traceEvents"] if event["ph"] == "X"}
    assert lanes == {0, 1, 2, 3}


def test_refusals_keep_their_type_and_field(shared: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary") as caught:
        run(collect(shared, [7, 99999]))
    assert caught.value.field == "prompt_token_ids"
    with pytest.raises(InvalidRequest, match="temperature: -1 is not"):
        run(collect(shared, [7], {"temperature": -1}))
    with pytest.raises(InvalidRequest, match="holds a lone surrogate at position 1"):
        run(collect(shared, [7], request_id="a\ud800"))
    assert run(collect(shared, [7], SamplingParams(max_tokens=1)))[-1].finished
    assert shared.stats.failed_steps == 0


@pytest.mark.parametrize("way", ["break", "cancel", "abort"])
def test_who_leaves_frees_everything(shared: AsyncLLM, way: str) -> None:
    async def main() -> None:
        before = shared.stats.finished.get("abort", 0)
        outputs = await begun(shared, [7, 8])
        if way == "break":
            await outputs.aclose()  # type: ignore[attr-defined]
        elif way == "abort":
            assert shared.abort("mine") is False
            assert shared.abort(next(iter(shared._streams._numbers)))
            last = [output async for output in outputs][-1]
            assert last.outputs[0].finish_reason == "abort"
        else:
            task = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # The next request's news come behind those of the abort.
        await collect(shared, [9], SamplingParams(max_tokens=1))
        assert shared.stats.finished["abort"] == before + 1
        assert len(shared._streams) == 0
        assert 'deepinfer_slots{engine="0"} 32' in shared.metrics_text()
        assert 'deepinfer_requests_running{engine="0"} 0' in shared.metrics_text()

    run(main())


def test_a_storm_of_consumers_leaves_nothing(shared: AsyncLLM) -> None:
    draw = random.Random(7)
    ends = Counter[str]()

    async def consume(index: int) -> None:
        params = SamplingParams(seed=index % 5, max_tokens=12, ignore_eos=True)
        way = draw.choice(["stay", "stay", "leave", "abort", "cancel"])
        task = asyncio.current_task()
        async for output in shared.generate([7, index % 5], params, f"storm {index}"):
            ends[way] += output.finished
            if way == "leave":
                break
            if way == "abort":
                shared.abort(output.request_id)
            if way == "cancel" and task is not None:
                task.cancel()
            if way == "stay" and output.finished:
                assert output.outputs[0].token_ids == expected[index % 5]

    async def main() -> None:
        for seed in range(5):
            params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
            expected.append((await collect(shared, [7, seed], params))[-1].outputs[0].token_ids)
        before = sum(shared.stats.finished.values())
        results = await asyncio.gather(*map(consume, range(40)), return_exceptions=True)
        assert [item for item in results if item and not isinstance(item, asyncio.CancelledError)] == []
        await collect(shared, [9], SamplingParams(max_tokens=1))
        assert sum(shared.stats.finished.values()) == before + 41
        assert len(shared._streams) == 0
        assert 'deepinfer_requests_running{engine="0"} 0' in shared.metrics_text()

    expected: list[list[int]] = []
    run(main())
    assert ends["stay"] > 0
    assert ends["abort"] > 0


def test_a_slow_consumer_gets_few_large_outputs(shared: AsyncLLM) -> None:
    async def main() -> None:
        expected = (await collect(shared, [7, 8]))[-1].outputs[0].token_ids
        ids: list[int] = []
        count = 0
        async for output in shared.generate([7, 8], LONG, delta=True):
            ids += output.outputs[0].token_ids
            count += 1
            if count == 1:
                await collect(shared, [9], LONG)  # Meanwhile others are served, and this one goes on.
        assert ids == expected
        assert count < len(ids)

    run(main())


# ---- how it starts ---------------------------------------------------------------------------------------------------


def test_errors_of_the_start_are_those_of_llm(path: Path, tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "broken", "tiny")
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    for model, wrong, kind in (
        (broken, {}, CheckpointError),
        (path, {"accelerator": "quantum"}, AcceleratorUnavailable),
        (path, {"max_model_len": 10**9}, ConfigError),
    ):
        with pytest.raises(kind) as local:
            LLM(model, **{**SETTINGS, **wrong})
        with pytest.raises(kind) as crossed:
            AsyncLLM(model, **{**SETTINGS, **wrong})
        assert type(crossed.value) is type(local.value)
        assert str(crossed.value) == str(local.value)
        assert vars(crossed.value) == vars(local.value)
        assert isinstance(crossed.value.__cause__, LoopTraceback)
        assert "in start_engine" in str(crossed.value.__cause__)


def test_progress_logs_and_refusals_of_the_loop(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer"), AsyncLLM(path, **SETTINGS, num_pages=2) as llm:
        with pytest.raises(CapacityError, match="request '0' can need 3 pages .* the pool has 2"):
            run(collect(llm, [7] * 40, SamplingParams(max_tokens=4)))
        assert run(collect(llm, [7], SamplingParams(max_tokens=2)))[-1].finished
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith(f"loading {path}") for text in said)
    assert any("allocating caches" in text for text in said)
    assert any(text.startswith(f"{path}: read ") for text in said), "the loader's own record"


def test_a_program_that_is_no_loop(path: Path) -> None:
    given = (Streams(), str(path), load_settings(**SETTINGS), {})
    with pytest.raises(EngineDead, match=r"the loop's process \d+ ended with exit code 3 before the model was ready"):
        ProcessLoop(*given, command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineDead, match=r"the loop's process \d+ was killed by SIGKILL before the model was ready"):
        ProcessLoop(*given, command=(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROTOCOL", "deepinfer-loop-1 0.0.0")
    with pytest.raises(EngineDead, match="speaks 'deepinfer-loop-1 0.0.0' and the loop's process 'deepinfer-loop-1 "):
        AsyncLLM(path, **SETTINGS)


# ---- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"the loop's process \d+ was killed by SIGKILL; make a new AsyncLLM"),
        (signal.SIGTERM, r"the loop's process was told to end by SIGTERM; make a new AsyncLLM"),
    ],
)
def test_a_signal_in_the_middle(path: Path, shared: AsyncLLM, number: signal.Signals, said: str) -> None:
    params = SamplingParams(seed=11, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = run(collect(shared, [7, 8, 9], params))[-1].outputs
    with AsyncLLM(path, **SETTINGS) as llm:
        pid = llm.loop_pid

        async def main() -> None:
            assert (await collect(llm, [7, 8, 9], params))[-1].outputs == expected, "another process, the same bits"
            waiting = [await begun(llm, [7, index]) for index in range(3)]
            os.kill(pid, number)
            for outputs in waiting:
                with pytest.raises(EngineDead, match=said):
                    async for _ in outputs:
                        pass
            with pytest.raises(EngineDead, match=said):
                await collect(llm, [7])
            with pytest.raises(EngineDead, match=said):
                llm.metrics_text()

        run(main())
    assert has_ended(pid)


def test_ctrl_c_is_the_front_ends_matter(shared: AsyncLLM) -> None:
    async def main() -> None:
        outputs = await begun(shared, [7])
        os.kill(shared.loop_pid, signal.SIGINT)
        assert [output async for output in outputs][-1].outputs[0].finish_reason == "length"

    run(main())


def test_closing_in_the_middle(path: Path) -> None:
    async def main() -> int:
        async with AsyncLLM(path, **SETTINGS) as llm:
            outputs = await begun(llm, [7])
            await llm.aclose()
            with pytest.raises(EngineDead, match="this AsyncLLM was closed; make a new one"):
                async for _ in outputs:
                    pass
            with pytest.raises(EngineDead, match="was closed"):
                await collect(llm, [7])
            return llm.loop_pid

    assert has_ended(run(main()))


def test_an_engine_that_nobody_holds_ends(path: Path) -> None:
    llm = AsyncLLM(path, **SETTINGS)
    pid = llm.loop_pid
    run(collect(llm, [7], SamplingParams(max_tokens=2)))
    del llm
    gc.collect()
    assert has_ended(pid)


PROGRAM = """
import asyncio, os, signal, sys
from deepinfer import AsyncLLM

llm = AsyncLLM(sys.argv[1], accelerator="cpu", max_model_len=160, num_threads=1)

async def main():
    outputs = llm.generate([5, 6], {"max_tokens": 150, "ignore_eos": True})
    await anext(outputs)
    print(llm.loop_pid, flush=True)
    if sys.argv[2] != "exit":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))

asyncio.run(main())
"""


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("SIGKILL", -9), ("SIGTERM", -15)])
def test_the_process_ends_with_the_program(path: Path, end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), end], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert has_ended(int(done.stdout))

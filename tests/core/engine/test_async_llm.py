"""`AsyncLLM`: the tokens of `LLM`, many consumers, and nothing left behind whatever they do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import deepinfer
from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.engine.loader import LoadedModel
from deepinfer.errors import EngineDead, InvalidRequest, RequestFailed
from deepinfer.settings import Settings

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
PROMPTS = [[7], [8, 9, 10], [11] * 9, [12, 6, 20, 30], [14] * 20, [22, 23]]


class PieceCodec:
    """Ids 6.. are the letters a..z; everything else is special; decodes piece by piece."""

    bos_id: int | None = None

    def encode_text(self, text: str) -> list[int]:
        return [6 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + i - 6) if 6 <= i < 32 else "" if skip_special else f"<{i}>" for i in ids)

    def decode_stream(self, *, skip_special: bool = True) -> PieceCodec:
        return self

    def push(self, ids: list[int]) -> str:
        return self.decode(ids)

    def finish(self) -> str:
        return ""


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


def make(model: Any, codec: Any = None, **settings: Any) -> AsyncLLM:
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "use_nextn_decode": 0, **settings}
    return AsyncLLM.from_loaded(LoadedModel(model, Path(), codec, "fake-id"), Settings(**given), poison_released=True)


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("deepinfer")]
    assert left == []


def slow_down(model: Any, seconds: float) -> None:
    """Let every step take a while, and count them."""
    forward = model.forward

    def late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments)

    model.forward = late


async def collect(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


async def settled(llm: AsyncLLM) -> None:
    """Wait until the loop has forgotten every request, then check that it holds nothing."""
    for _ in range(1000):
        if not llm._loop.core.num_unfinished and not llm._loop._loop._parts and not llm._loop._inbox:
            llm._loop.core.scheduler.assert_idle()
            return
        await asyncio.sleep(0.005)
    pytest.fail("requests were left in the loop")


def test_public_name() -> None:
    assert deepinfer.AsyncLLM is AsyncLLM
    assert "AsyncLLM" in deepinfer.__all__


def test_many_at_once_get_their_tokens(fake_model: Any, naive_model: Any) -> None:
    async def main() -> None:
        async with make(fake_model) as llm:
            results = await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))
            for prompt, outputs in zip(PROMPTS, results, strict=True):
                expected = naive_model(prompt, GREEDY, 8, 0)[0]
                for output in outputs:
                    ids = output.outputs[0].token_ids
                    assert ids == expected[: len(ids)]
                sizes = [len(output.outputs[0].token_ids) for output in outputs]
                assert sizes == sorted(set(sizes))
                last = outputs[-1]
                assert last.outputs[0].token_ids == expected
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert last.outputs[0].finish_reason == "length"
                assert last.prompt_token_ids == prompt
                assert last.numerics_id == "fake-id"
                assert last.metrics.num_generated_tokens == 8
            await settled(llm)
            assert llm.stats.finished == {"length": len(PROMPTS)}

    run(main())


def test_deltas_add_up(fake_model: Any) -> None:
    params = SamplingParams(seed=4, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1, n=2)

    async def main() -> None:
        async with make(fake_model, PieceCodec()) as llm:
            *_, whole = await collect(llm, "hello", params)
            pieces = await collect(llm, "hello", params, delta=True)
            for index, completion in enumerate(whole.outputs):
                parts = [part for output in pieces for part in output.outputs if part.index == index]
                assert [token for part in parts for token in part.token_ids] == completion.token_ids
                assert "".join(part.text for part in parts) == completion.text
                assert [place for part in parts for place in part.logprobs] == completion.logprobs
                assert parts[-1].cumulative_logprob == completion.cumulative_logprob
                assert completion.text == PieceCodec().decode(completion.token_ids)
            scored = [output.prompt_logprobs for output in pieces if output.prompt_logprobs is not None]
            assert scored == [whole.prompt_logprobs]

    run(main())


def test_stop_strings_never_show(fake_model: Any) -> None:
    async def main() -> None:
        async with make(fake_model, PieceCodec()) as llm:
            params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
            *_, free = await collect(llm, [7, 8], params)
            text = free.outputs[0].text
            stop = text[4:6]
            params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, stop=stop)
            outputs = await collect(llm, [7, 8], params)
            end = text.index(stop)
            assert outputs[-1].outputs[0].text == text[:end]
            assert outputs[-1].outputs[0].stop_reason == stop
            assert all(text[:end].startswith(output.outputs[0].text) for output in outputs)
            deltas = await collect(llm, [7, 8], params, delta=True)
            assert "".join(output.outputs[0].text for output in deltas) == text[:end]

    run(main())


@pytest.mark.parametrize("way", ["break", "cancel", "aclose"])
def test_who_leaves_frees_everything(fake_model: Any, naive_model: Any, way: str) -> None:
    slow_down(fake_model, 0.002)

    async def leave(llm: AsyncLLM) -> None:
        outputs = llm.generate([7, 8], LONG)
        async for _ in outputs:
            if way == "cancel":
                await asyncio.sleep(3600)
            break
        if way == "aclose":
            await outputs.aclose()

    async def main() -> None:
        async with make(fake_model) as llm:
            stay = asyncio.create_task(collect(llm, [9], LONG))
            task = asyncio.create_task(leave(llm))
            await asyncio.sleep(0.02)
            if way == "cancel":
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (await stay)[-1].outputs[0].token_ids == naive_model([9], LONG, 50, 0)[0]
            await settled(llm)
            assert llm.stats.finished == {"abort": 1, "length": 1}

    run(main())


def test_abort_by_name_ends_the_iterator(fake_model: Any) -> None:
    slow_down(fake_model, 0.002)

    async def main() -> None:
        async with make(fake_model) as llm:
            seen = []
            async for output in llm.generate([7, 8], LONG, "mine"):
                seen.append(output)
                assert output.request_id == "mine"
                if len(seen) == 1:
                    assert llm.abort("mine")
            assert seen[-1].finished
            assert seen[-1].outputs[0].finish_reason == "abort"
            assert not llm.abort("mine")
            assert not llm.abort("never")
            await settled(llm)

    run(main())


def test_a_slow_consumer_gets_few_large_outputs(fake_model: Any, naive_model: Any) -> None:
    async def main() -> None:
        async with make(fake_model) as llm:
            ids: list[int] = []
            count = 0
            async for output in llm.generate([7, 8], LONG, delta=True):
                count += 1
                ids += output.outputs[0].token_ids
                await asyncio.sleep(0.25)
            assert ids == naive_model([7, 8], LONG, 50, 0)[0]
            assert count < 10

    run(main())


def test_refusals_queue_nothing(fake_model: Any) -> None:
    async def main() -> None:
        async with make(fake_model) as llm:
            with pytest.raises(InvalidRequest, match="prompt: the prompt is empty"):
                await collect(llm, [])
            with pytest.raises(InvalidRequest, match="prompt: holds 2 prompts; call generate once for each"):
                await collect(llm, [[7], [8]])
            with pytest.raises(InvalidRequest, match="request_id: 5 is not a text"):
                await collect(llm, [7], request_id=5)
            with pytest.raises(InvalidRequest, match="no installed plugin can turn text into token ids"):
                await collect(llm, "text")
            first = llm.generate([7], LONG, "twice")
            await anext(first)
            with pytest.raises(InvalidRequest, match="request_id: 'twice' is already in flight"):
                await collect(llm, [7], request_id="twice")
            await first.aclose()
            await settled(llm)

    run(main())


def test_a_failing_step_hurts_its_requests_only(fake_model: Any) -> None:
    async def main() -> None:
        async with make(fake_model) as llm:
            fake_model.fail_on = lambda slots: True
            outputs = llm.generate([7], GREEDY)
            output = await anext(outputs)
            assert output.outputs[0].finish_reason == "error"
            with pytest.raises(RequestFailed, match="kernel fell over"):
                await anext(outputs)
            fake_model.fail_on = lambda slots: False
            assert (await collect(llm, [7]))[-1].finished

    run(main())


def test_a_dead_engine_tells_everybody(fake_model: Any) -> None:
    slow_down(fake_model, 0.002)

    async def main() -> None:
        async with make(fake_model) as llm:
            tasks = [asyncio.create_task(collect(llm, prompt, LONG)) for prompt in PROMPTS]
            await asyncio.sleep(0.02)
            llm._loop.core.scheduler.plan = lambda: 1 / 0
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineDead)
                assert "ZeroDivisionError" in str(result)
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await collect(llm, [7])

    run(main())


def test_close_with_work_in_flight(fake_model: Any) -> None:
    slow_down(fake_model, 0.002)

    async def main() -> None:
        llm = make(fake_model)
        core = llm._loop.core
        tasks = [asyncio.create_task(collect(llm, prompt, LONG)) for prompt in PROMPTS]
        await asyncio.sleep(0.02)
        await llm.aclose()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert str(result) == "this AsyncLLM was closed; make a new one"
        core.scheduler.assert_idle()
        with pytest.raises(EngineDead, match="was closed"):
            await collect(llm, [7])
        llm.close()

    run(main())


def test_an_engine_that_nobody_holds_ends(fake_model: Any) -> None:
    llm = make(fake_model)
    run(collect(llm, [7]))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "deepinfer-loop"]
    core = weakref.ref(llm._loop.core)
    del llm
    gc.collect()
    assert not thread.is_alive()
    assert core() is None


def test_a_closed_engine_holds_no_memory(fake_model: Any) -> None:
    llm = make(fake_model)
    storage = weakref.ref(llm._loop.core.runner)
    llm.close()
    gc.collect()
    assert storage() is None
    assert llm.traits.vocab_size == 37
    assert llm.stats.steps == 0
    with pytest.raises(EngineDead, match="was closed"):
        llm.metrics_text()
    with pytest.raises(EngineDead, match="was closed"):
        llm.trace()


def test_an_event_loop_that_ends_leaves_nothing(fake_model: Any) -> None:
    slow_down(fake_model, 0.002)
    with make(fake_model) as llm:

        async def start() -> Any:
            outputs = llm.generate([7], LONG)
            await anext(outputs)
            return outputs

        loop = asyncio.new_event_loop()
        outputs = loop.run_until_complete(start())
        loop.close()
        run(settled(llm))
        assert llm.stats.finished == {"abort": 1}
        del outputs


def test_several_engines_and_event_loops(fake_model: Any, naive_model: Any) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    with make(fake_model) as one, make(fake_model) as two:

        def serve(worker: int) -> None:
            async def main() -> None:
                results = await asyncio.gather(*(collect(one if worker % 2 else two, prompt) for prompt in PROMPTS))
                for index, outputs in enumerate(results):
                    found[worker, index] = outputs[-1].outputs[0].token_ids

            run(main())

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [naive_model(prompt, GREEDY, 8, 0)[0] for prompt in PROMPTS]
    assert len(found) == 4 * len(PROMPTS)
    assert all(ids == expected[index] for (_, index), ids in found.items())


def test_tiny_same_tokens_and_text_as_llm(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", "tiny")
    options: dict[str, Any] = {"accelerator": "cpu", "batch_invariant": True, "max_model_len": 160, "page_size": 16}
    params = [SamplingParams(seed=seed, max_tokens=7, ignore_eos=True, logprobs=1) for seed in range(4)]
    prompts = [[7], list(range(20, 37)), [9, 9, 9, 9], [(7 * i * i) % 480 + 3 for i in range(33)]]
    with LLM(path, **options) as llm:
        expected = llm.generate(prompts, params)

    async def main() -> None:
        async with AsyncLLM(path, in_process=True, **options) as engine:
            results = await asyncio.gather(
                *(collect(engine, prompt, given) for prompt, given in zip(prompts, params, strict=True))
            )
            for outputs, wanted in zip(results, expected, strict=True):
                assert outputs[-1].outputs == wanted.outputs

    run(main())


def test_a_storm_of_consumers_leaves_nothing(fake_model: Any, naive_model: Any) -> None:
    draw = random.Random(5)
    ends = Counter[str]()

    async def consume(llm: AsyncLLM, index: int) -> None:
        await asyncio.sleep(draw.random() * 0.3)
        prompt = [draw.randrange(6, 30) for _ in range(draw.randrange(1, 20))]
        size, how = draw.randrange(1, 30), draw.choice(["stay", "slow", "leave", "cancel", "abort"])
        params = SamplingParams(temperature=0, max_tokens=size, ignore_eos=True, n=draw.choice([1, 1, 2]))
        patience = draw.randrange(1, 4)
        outputs = llm.generate(prompt, params, f"request {index}", priority=draw.randrange(2))
        count = 0
        async for output in outputs:
            ids = output.outputs[0].token_ids
            count += 1
            if how == "slow":
                await asyncio.sleep(0.02)
            elif count == patience and how == "leave":
                await outputs.aclose()
                break
            elif count == patience and how == "cancel":
                asyncio.current_task().cancel()
            elif count == patience and how == "abort":
                llm.abort(f"request {index}")
        assert ids == naive_model(prompt, params, size, 0)[0][: len(ids)]
        if how in ("stay", "slow"):
            assert len(ids) == size
        ends[how] += 1

    async def main() -> None:
        async with make(fake_model) as llm:
            tasks = [asyncio.create_task(consume(llm, index)) for index in range(80)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [result for result in results if result and not isinstance(result, asyncio.CancelledError)]
            assert wrong == []
            await settled(llm)
            assert len(llm._streams) == 0
            assert sum(llm.stats.finished.values()) >= 80

    run(main())
    assert set(ends) >= {"stay", "slow", "leave", "abort"}


def test_a_program_that_forgets_to_close_ends(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", "tiny")
    code = (
        "import asyncio, sys\nfrom deepinfer import AsyncLLM\n"
        "llm = AsyncLLM(sys.argv[1], accelerator='cpu', max_model_len=128)\n"
        "async def main():\n"
        "    outputs = llm.generate([5, 6], {'max_tokens': 100, 'ignore_eos': True})\n"
        "    print((await anext(outputs)).request_id)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")

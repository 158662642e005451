"""What a process of its own costs the loop: tokens a second with consumers on asyncio, against a thread and nobody.

python benchmarks/engine_process.py --output engine_process.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_loop import make_core

from deepinfer.checkpoint.reader import ReadStats
from deepinfer.engine.front_end import FrontEnd
from deepinfer.engine.local import LocalEngine
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.memory_plan import MemoryPlan, MemoryRequest
from deepinfer.engine.messages import EngineFacts, Loop
from deepinfer.engine.process.__main__ import main as serve_process
from deepinfer.engine.process.client import ProcessLoop
from deepinfer.engine.process.frames import News, decode_news, encode
from deepinfer.engine.prompts import Prompt
from deepinfer.engine.streams import RequestStream, Streams
from deepinfer.engine.thread_loop import ThreadLoop
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import load_settings

PROMPT = 32


def make_engine(sequences: int, step_time: float) -> LocalEngine:
    """A loop around a device that does nothing but take its time."""
    core, _ = make_core(sequences, step_time, 2)
    plan = MemoryPlan(MemoryRequest(0, 0, 0, 0, 1, 1, sequences, 1, 1), 1)
    traits: Any = core.runner.traits
    return LocalEngine(core, None, EngineFacts(traits, traits.context, "none", 0, plan, ReadStats(), None, "none"))


async def consume(loop: Loop, streams: Streams, front: FrontEnd, tokens: int) -> int:
    """One request whose consumer takes every output; the number of outputs."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ticket = front.check(Prompt(token_ids=list(range(PROMPT))), params, False, front.next_name())
    stream = RequestStream(ticket, front, delta=True)
    order = ticket.order(front.next_number(), 0)
    streams.add(order.number, stream)
    loop.submit(order)
    count = 0
    while True:
        await stream.event.wait()
        stream.event.clear()
        output = stream.take()
        count += output is not None
        if output is not None and output.finished:
            streams.remove(order.number)
            return count


def with_consumers(loop: Loop, streams: Streams, sequences: int, tokens: int) -> dict[str, float]:
    """Tokens a second of so many requests at once, and how many tokens an output holds."""
    front = FrontEnd(loop.facts, None)

    async def main() -> list[int]:
        return list(await asyncio.gather(*(consume(loop, streams, front, tokens) for _ in range(sequences))))

    start, steps = time.perf_counter(), loop.stats.steps
    outputs = asyncio.run(main())
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": sequences * tokens / seconds,
        "step_ms": 1e3 * seconds / (loop.stats.steps - steps),
        "tokens_per_output": sequences * tokens / sum(outputs),
    }


def alone(sequences: int, step_time: float, tokens: int) -> dict[str, float]:
    """The same requests on a loop that nobody listens to."""
    engine = make_engine(sequences, step_time)
    loop, front = EngineLoop(engine.core, None), FrontEnd(engine.facts, None)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    for number in range(sequences):
        ticket = front.check(Prompt(token_ids=list(range(PROMPT))), params, False, str(number))
        loop.add(ticket.order(number, 0))
    while loop.has_work:
        loop.step()
    seconds = time.perf_counter() - start
    engine.core.close()
    return {"tokens_per_second": sequences * tokens / seconds, "step_ms": 1e3 * seconds / engine.core.stats.steps}


def costs(sequences: int, steps: int = 200) -> dict[str, float]:
    """Milliseconds of processor time a step, where each part runs alone: no waiting is counted."""
    engine = make_engine(sequences, 0.0)
    loop, front = EngineLoop(engine.core, None), FrontEnd(engine.facts, None)
    params = SamplingParams(max_tokens=steps + 10, ignore_eos=True)
    for number in range(sequences):
        ticket = front.check(Prompt(token_ids=list(range(PROMPT))), params, False, str(number))
        loop.add(ticket.order(number, 0))
    while engine.core.stats.decode_rows == 0:
        loop.step()
    seconds = dict.fromkeys(("core", "what is new", "encode", "decode", "merge and take"), 0.0)
    stream = asyncio.run(_make_stream(front, params))
    for _ in range(steps):
        marks = [time.thread_time()]
        changed = engine.core.step()
        marks.append(time.thread_time())
        updates = loop._tell(changed)
        marks.append(time.thread_time())
        frame = encode(News(updates, stats=engine.core.stats))
        marks.append(time.thread_time())
        news = decode_news(frame[8:])
        marks.append(time.thread_time())
        for update in news.updates if isinstance(news, News) else ():
            stream.put(update)
            stream.take()
        marks.append(time.thread_time())
        for name, start, end in zip(seconds, marks, marks[1:], strict=False):
            seconds[name] += end - start
    loop.abort_all()
    engine.core.close()
    return {name: 1e3 * value / steps for name, value in seconds.items()}


async def _make_stream(front: FrontEnd, params: SamplingParams) -> RequestStream:
    return RequestStream(front.check(Prompt(token_ids=[5]), params, False, "one"), front, delta=True)


def measure(sequences: int, step_time: float, tokens: int) -> dict[str, dict[str, float]]:
    """All three ways."""
    report = {"nobody listens": alone(sequences, step_time, tokens)}
    streams = Streams()
    loop: Loop = ThreadLoop(make_engine(sequences, step_time), streams)
    report["thread"] = with_consumers(loop, streams, sequences, tokens)
    loop.close()
    streams = Streams()
    command = (sys.executable, str(Path(__file__).resolve()), "--serve", str(sequences), str(step_time))
    loop = ProcessLoop(streams, None, load_settings(), {}, command=command)
    report["process"] = with_consumers(loop, streams, sequences, tokens)
    loop.close()
    return report


def main() -> None:
    """Run all measurements and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    report: dict[str, Any] = {"milliseconds of processor time a step": {"all": costs(options.sequences)}}
    report |= {f"steps of {ms} ms": measure(options.sequences, ms / 1e3, options.tokens) for ms in (20, 10, 5)}
    for name, rows in report.items():
        print(name)
        for key, values in rows.items():
            print(f"  {key:>15}  " + "  ".join(f"{what} {value:,.4g}" for what, value in values.items()))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sequences, step_time = int(sys.argv[2]), float(sys.argv[3])
        sys.exit(serve_process(sys.argv[4:], lambda channel, setup: make_engine(sequences, step_time)))
    main()

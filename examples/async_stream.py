"""Several answers at once, streamed piece by piece; one is abandoned, and the loop's process is replaced when it dies.

python examples/async_stream.py
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from deepinfer import AsyncLLM, SamplingParams
from deepinfer.errors import EngineDead


async def stream(llm: AsyncLLM, prompt: list[int], *, at_most: int = 1000) -> list[int]:
    """Collect the pieces of one request as they come; leaving the loop ends the request."""
    params = SamplingParams(max_tokens=24, seed=prompt[-1], ignore_eos=True)
    ids: list[int] = []
    async for output in llm.generate(prompt, params, delta=True):
        ids += output.outputs[0].token_ids
        if len(ids) >= at_most:
            break
    return ids


async def main() -> None:
    """Stream, abandon, lose the process, and go on."""
    options: dict[str, Any] = {"accelerator": "cpu", "max_model_len": 128, "batch_invariant": True}
    async with AsyncLLM("tiny", **options) as llm:
        whole, part = await asyncio.gather(stream(llm, [5, 6, 7]), stream(llm, [5, 6, 8], at_most=3))
        print(f"finished: {len(whole)} tokens, abandoned: after {len(part)}")

        os.kill(llm.loop_pid, signal.SIGKILL)  # What running out of memory would do.
        try:
            await stream(llm, [5, 6, 7])
        except EngineDead as error:
            print(f"EngineDead: {str(error).partition(';')[2].strip()}")

    async with AsyncLLM("tiny", **options) as again:
        same = await stream(again, [5, 6, 7]) == whole
        print(f"after a restart: {'the same tokens' if same else 'other tokens'}")


if __name__ == "__main__":
    asyncio.run(main())

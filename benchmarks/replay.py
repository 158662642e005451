"""Measures what bounded replay saves of a long prompt: all rows, the oracle with all rows, only the rows that are kept.

One request at a time on one thread of the CPU backend; CPU seconds of the process from the prompt to its first token,
so that other work on the machine counts little. Modes take turns; the smallest of the repeats is shown. `mask` and
`compact` must say the same.

Usage: python benchmarks/replay.py [--preset small] [--lengths 288 544] [--into docs/benchmarks/engine.md]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import deepinfer
from deepinfer import LLM, SamplingParams

MODES = ("off", "mask", "compact")
BEGIN, END = "<!-- replay: begin -->", "<!-- replay: end -->"
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, Any]:
    """CPU seconds to the first token, and what it is."""
    start = time.process_time()
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    seconds = time.process_time() - start
    return seconds, (output.outputs[0].token_ids, output.outputs[0].logprobs)


def measure(llms: dict[str, LLM], length: int, repeats: int) -> dict[str, float]:
    """Seconds of a prompt by mode.

    Raises:
        RuntimeError: `mask` and `compact` do not agree.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        generator = torch.Generator().manual_seed(1000 * length + repeat)
        prompt = torch.randint(8, 480, (length,), generator=generator).tolist()
        said = {}
        for mode, llm in llms.items():
            found, said[mode] = first_token(llm, prompt)
            seconds[mode].append(found)
        if said["mask"] != said["compact"]:
            raise RuntimeError(f"{length} tokens: mask says {said['mask']}, compact {said['compact']}")
    return {mode: min(found) for mode, found in seconds.items()}


def main() -> None:
    """Measure, print and, if asked, put the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[288, 544])
    parser.add_argument("--keep", type=int, default=140)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "batch_invariant": True,
        "max_num_seqs": 1,
        "max_model_len": max(args.lengths) + 8,
        "use_nextn_decode": 5,
        "enable_prefix_caching": False,
        "num_threads": 1,
    }
    with ExitStack() as stack:
        llms = {}
        for mode in MODES:
            keep = 0 if mode == "off" else args.keep
            replay = {"yoco_prefill_truncation_mode": mode, "yoco_prefill_keep_tokens": keep}
            llms[mode] = stack.enter_context(LLM(args.preset, **options, **replay))
            llms[mode].generate([[3, 4, 5]], PARAMS, use_tqdm=False)
        lines = ["| prompt | off | mask | compact | gain |", "|---:|---:|---:|---:|---:|"]
        for length in args.lengths:
            found = measure(llms, length, args.repeats)
            cells = " | ".join(f"{found[mode]:.2f} s" for mode in MODES)
            lines.append(f"| {length:,} | {cells} | {found['off'] / found['compact']:.2f}× |")
    text = (
        f"{datetime.date.today()}, preset `{args.preset}`, {args.keep} tokens kept, one thread of {platform.machine()} "
        f"({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}, deepinfer-core "
        f"{deepinfer.__version__}, load average {os.getloadavg()[0]:.1f}; `mask` and `compact` said the same bits:\n\n"
        + "\n".join(lines)
    )
    print(text)
    if args.into is not None:
        before, _, rest = args.into.read_text().partition(BEGIN)
        args.into.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

"""Whether filling grammar masks is hidden behind the forward pass: 256 sequences on the simulated device.

Masks have a bit for each of 129,280 ids. Three columns of tokens a second: no sequence has a grammar, every second one,
all of them. What they may cost is what the step time does not cover.

python benchmarks/engine_grammars.py --output engine_grammars.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from engine_loop import fill, make_core, num_tokens

from deepinfer.engine.grammars import Grammars
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.sampling.structured import StructuredOutput
from deepinfer.settings import load_settings

VOCAB = 129_280
EOS = 1
WORDS = StructuredOutput(regex="([a-z]+ ?)*")
PLAN = StructuredOutput(ebnf='root ::= item*\nitem ::= "a" | "b" digit | "[" root "]"\ndigit ::= [0-9]')
MIXES: dict[str, tuple[StructuredOutput | None, ...]] = {
    "none": (None,),
    "half": (None, WORDS, None, PLAN),
    "all": (WORDS, PLAN),
}


def write_tokenizer(path: Path) -> None:
    """A byte-level vocabulary of the release's size: an end mark, signs, and words of up to four letters."""
    words = (
        "".join(letters)
        for length in range(1, 5)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    texts = itertools.chain("Ġ[]0123456789", words)
    vocab = {text: token for token, text in zip(range(EOS + 1, VOCAB), texts, strict=False)}
    added = [{"id": token, "content": f"<{token}>"} for token in range(EOS + 1)]
    contents = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}, "added_tokens": added}
    path.write_text(json.dumps(contents), encoding="utf-8")


def measure(folder: Path, sequences: int, step_time: float, mix: str, steps: int) -> dict[str, float]:
    """Tokens a second in steady decoding, and the median milliseconds that a step's masks take."""
    traits: Any = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    grammars = Grammars(folder, traits, load_settings(), rows=sequences)
    token = Vocabulary.from_file(folder / "tokenizer.json", VOCAB, (EOS,)).tokens.index(b"a")
    seconds = []
    fill_masks = grammars.fill

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        found = fill_masks(*args)
        seconds.append(time.perf_counter() - start)
        return found

    grammars.fill = timed  # type: ignore[method-assign]
    core, _ = make_core(sequences, step_time, 2, token=token, grammars=grammars)
    fill(core, sequences, MIXES[mix])
    seconds.clear()
    start, tokens = time.perf_counter(), num_tokens(core)
    for _ in range(steps):
        core.step()
    result = {"tokens_per_second": (num_tokens(core) - tokens) / (time.perf_counter() - start)}
    core.close()
    return {**result, "fill_ms": 1e3 * float(np.median(seconds))} if seconds else result


def main() -> None:
    """Measure every mix at every step time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer.json")
        for step_ms in (20, 10, 5):
            row = report[f"{step_ms} ms"] = {}
            for mix in MIXES:
                row[mix] = measure(folder, options.sequences, step_ms / 1e3, mix, options.steps)
                values = "  ".join(f"{what} {value:,.4g}" for what, value in row[mix].items())
                print(f"{step_ms:>3} ms  {mix:>5}  {values}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

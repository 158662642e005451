"""`deepinfer generate`: one prompt, its text and the speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from deepinfer.errors import InvalidRequest

__all__ = ["announce", "default_model", "generate"]

SYNTHETIC = ("tiny", "small", "wide")


def generate(
    prompt: str | None = typer.Argument(None, help="Text to continue; `-` reads it from standard input."),
    model: str | None = typer.Option(
        None,
        help="Folder, Hub id (for example deepseek-ai/DeepSeek-V4.1-Flash-1017) or synthetic preset (tiny, small, "
        "wide). Default: DEEPINFER_HF_MODEL_DIR, else tiny.",
    ),
    token_ids: str | None = typer.Option(None, help="Comma list of token ids instead of a text."),
    max_tokens: int = typer.Option(32, help="Tokens to generate at most."),
    temperature: float = typer.Option(1.0, help="0 always takes the most probable token."),
    top_k: int = typer.Option(-1, help="Draw from this many most probable tokens; -1: all."),
    top_p: float = typer.Option(1.0, help="Draw from the most probable tokens with this mass."),
    seed: int | None = typer.Option(None, help="Repeats a run; printed when drawn."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after the end-of-sequence token."),
    accelerator: str | None = typer.Option(None, help="Backend; default: DEEPINFER_ACCELERATOR, else automatic."),
    max_model_len: int | None = typer.Option(None, help="Most tokens of prompt and output together."),
    trace: Path | None = typer.Option(
        None, help="Write the time line of every step to this file, for Chrome's tracing page or Perfetto."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Continue a prompt and print the text; notes and tokens per second go to standard error."""
    from deepinfer.engine.llm import LLM
    from deepinfer.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos
    )
    given = _prompt(prompt, token_ids)
    if trace is not None and not trace.absolute().parent.is_dir():
        raise InvalidRequest(f"there is no directory {trace.absolute().parent}", field="--trace")
    name = default_model() if model is None else model
    announce(name, chosen=model is not None)
    with LLM(name, accelerator=accelerator, max_model_len=max_model_len, max_num_seqs=1) as llm:
        typer.echo(f"[read {llm.load_stats}]", err=True)
        steps = llm.trace() if trace is not None else None
        (output,) = llm.generate(given, params)
        if steps is not None and trace is not None:
            steps.save(trace)
    completion, metrics = output.outputs[0], output.metrics
    speed = {
        "prefill": metrics.prefill_tokens_per_second if metrics else None,
        "decode": metrics.decode_tokens_per_second if metrics else None,
    }
    if as_json:
        typer.echo(json.dumps(_report(str(name), output, speed), ensure_ascii=False))
        return
    typer.echo(completion.text or " ".join(map(str, completion.token_ids)))
    rates = ", ".join(f"{what} {rate:,.1f} tokens/s" for what, rate in speed.items() if rate)
    counts = f"{len(output.prompt_token_ids)} prompt + {len(completion.token_ids)} new tokens"
    typer.echo(f"\n[{counts}, finished by {completion.finish_reason}; {rates}; seed {completion.seed}]", err=True)


def default_model() -> str | Path:
    """What runs when no model is named."""
    from deepinfer.settings import load_settings

    return load_settings().hf_model_dir or "tiny"


def announce(name: str | Path, *, chosen: bool) -> None:
    """Say on standard error what runs when it was not asked for, and that random weights write noise."""
    if str(name) in SYNTHETIC:
        why = "" if chosen else "no model was named (--model, DEEPINFER_HF_MODEL_DIR): "
        typer.echo(
            f"{why}running {name!r}, a synthetic checkpoint with random weights in the released format; its text is "
            "noise",
            err=True,
        )
    elif not chosen:
        typer.echo(f"running {name} (DEEPINFER_HF_MODEL_DIR)", err=True)


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise InvalidRequest("give either a text or --token-ids", field="prompt")
    if text is not None:
        return sys.stdin.read() if text == "-" else text
    try:
        return [int(part) for part in str(token_ids).split(",") if part.strip()]
    except ValueError:
        raise InvalidRequest(f"{token_ids!r} is not a comma list of integers", field="--token-ids") from None


def _report(name: str, output: Any, speed: dict[str, float | None]) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "model": name,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "num_cached_tokens": output.num_cached_tokens,
        "numerics_id": output.numerics_id,
        "prefill_tokens_per_second": speed["prefill"],
        "decode_tokens_per_second": speed["decode"],
    }

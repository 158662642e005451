"""Complete one prompt and look at everything that comes back; `python examples/offline_generate.py [MODEL]`."""

from __future__ import annotations

import sys

from deepinfer import LLM, SamplingParams


def main(model: str) -> None:
    """Load a model, generate twice with the same seed, and print both."""
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    with LLM(model=model) as llm:
        first, second = (llm.generate("The engine reads a prompt", params, use_tqdm=False)[0] for _ in range(2))
        counts = llm.stats
    completion = first.outputs[0]
    print(f"prompt:   {first.prompt!r} = {len(first.prompt_token_ids)} tokens")
    print(f"text:     {completion.text!r}")
    print(f"ended by: {completion.finish_reason} after {len(completion.token_ids)} tokens, seed {completion.seed}")
    print(f"numerics: {first.numerics_id}")
    print(f"steps:    {counts.steps} ({counts.prefill_rows} prompt rows, {counts.decode_rows} decode rows)")
    print(f"repeated: {'same tokens' if completion.token_ids == second.outputs[0].token_ids else 'other tokens'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny")

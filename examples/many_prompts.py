"""Serve a batch with one bad request in it, and show that neighbours change nothing; give a model or take tiny."""

from __future__ import annotations

import sys

from deepinfer import LLM, SamplingParams

PROMPTS = ["The engine", "A small drafter guesses", "Every layer looks at the last few words", [-5]]


def main(model: str) -> None:
    """Generate all prompts together and each alone in row-invariant mode, and compare token by token."""
    params = [SamplingParams(temperature=1.0, seed=index, max_tokens=16) for index in range(len(PROMPTS))]
    with LLM(model=model, batch_invariant=True, max_num_seqs=8) as llm:
        # Texts and lists of token ids may be mixed. The last prompt is refused; the others do not notice.
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, param, output in zip(PROMPTS, params, together, strict=True):
            if output.error is not None:
                print(f"{prompt!r} is refused: {type(output.error).__name__}: {output.error}")
                continue
            alone = llm.generate([prompt], param, use_tqdm=False)[0]
            ids = output.outputs[0].token_ids
            verdict = "the same tokens" if ids == alone.outputs[0].token_ids else "other tokens"
            print(f"{prompt!r}: {len(ids)} tokens; alone {verdict}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny")

"""What one request says alone, straight from the definitions of its parameters; and an `LLM` over a model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine.loader import LoadedModel
from deepinfer.ops.sampling import apply_filters, sample_rows
from deepinfer.settings import Settings

__all__ = ["EOS", "VOCAB", "Letters", "adjusted", "expected", "make_llm", "one"]

VOCAB, EOS = 37, 1


class Letters:
    """Ids 6.. are the letters a..z; everything else is special."""

    bos_id: int | None = None

    def encode_text(self, text: str) -> list[int]:
        return [6 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + i - 6) if 6 <= i < 32 else "" if skip_special else f"<{i}>" for i in ids)

    def decode_stream(self, *, skip_special: bool = True) -> Any:
        codec = self

        class Stream:
            def push(self, ids: list[int]) -> str:
                return codec.decode(ids, skip_special=skip_special)

            def finish(self) -> str:
                return ""

        return Stream()


def make_llm(model: Any, codec: Any = None, **settings: Any) -> LLM:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "use_nextn_decode": 0, **settings}
    return LLM.from_loaded(LoadedModel(model, Path(), codec, "fake-id"), Settings(**given), poison_released=True)


def one(llm: LLM, prompt: Any, **params: Any) -> Any:
    given = {"temperature": 1.0, "seed": 11, "max_tokens": 10, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**given))[0]


def adjusted(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """Bias, penalties and bans by their definitions, in float32."""
    row = logits.astype(np.float32).copy()
    for token, value in params.bias:
        row[token] += np.float32(value)
    for token in set(prompt) | set(output):
        factor = np.float32(params.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(params.presence_penalty)
    banned = set(params.banned)
    if params.allowed_token_ids is not None:
        banned |= set(range(VOCAB)) - set(params.allowed)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_ids) | (set() if params.ignore_eos else {EOS})
    row[sorted(banned)] = -np.inf
    return row


def expected(fake: Any, prompt: list[int], params: SamplingParams, completion: int = 0) -> list[int]:
    """One request alone, straight from the definitions."""
    state, output = 0, []
    for position, token in enumerate(prompt):
        state = fake.chain(state, token, position)
    while len(output) < params.max_tokens:
        row = torch.from_numpy(adjusted(fake.logits_of(state).numpy(), prompt, output, params))[None]
        temperature = torch.tensor([params.temperature])
        scaled = apply_filters(
            row,
            temperature,
            torch.tensor([params.top_k], dtype=torch.int32),
            torch.tensor([params.top_p]),
            torch.tensor([params.min_p]),
        )
        position = len(prompt) + len(output)
        numbers = (torch.tensor([params.seed]), torch.tensor([position]), torch.tensor([completion], dtype=torch.int32))
        token = int(sample_rows(scaled, temperature, *numbers))
        if len(output) < len(params.forced) and params.forced[len(output)] >= 0:
            token = params.forced[len(output)]
        output.append(token)
        if token in params.stop_ids or (token == EOS and not params.ignore_eos):
            break
        state = fake.chain(state, token, position)
    return output

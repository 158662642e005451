"""The shapes in which prompts and sampling parameters may be given, brought to one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.errors import DeepInferError, InvalidRequest

__all__ = ["Prompt", "split_prompts", "spread_params", "spread_priorities"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: text, token ids (not yet checked), ids with the text that they stand for, or why there are none."""

    text: str | None = None
    token_ids: Any = None
    error: DeepInferError | None = None


def split_prompts(prompts: Any, prompt_token_ids: Any) -> tuple[list[Prompt], bool]:
    """One `Prompt` per request, and whether the caller gave a single one outside a list.

    Raises:
        InvalidRequest: nothing was given, a shape is not understood, or texts and ids differ in number.
    """
    if prompts is None and prompt_token_ids is None:
        raise InvalidRequest("give prompts or prompt_token_ids", field="prompts")
    if prompt_token_ids is None:
        return _split(prompts)
    ids, single = _split(prompt_token_ids)
    if any(item.token_ids is None for item in ids):
        raise InvalidRequest("holds text; give text as prompts", field="prompt_token_ids")
    if prompts is None:
        return ids, single
    texts, _ = _split(prompts)
    if len(texts) != len(ids):
        raise InvalidRequest(f"{len(texts)} prompts and {len(ids)} prompt_token_ids were given", field="prompts")
    return [Prompt(text.text, item.token_ids) for text, item in zip(texts, ids, strict=True)], single


def spread_params(params: Any, count: int) -> list[Any]:
    """One entry of sampling parameters per prompt.

    Raises:
        InvalidRequest: a list of another length.
    """
    if isinstance(params, Mapping) or not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} entries for {count} prompts", field="sampling_params")
    return list(params)


def spread_priorities(priority: Any, count: int) -> list[int]:
    """One priority per prompt; lower goes first.

    Raises:
        InvalidRequest: neither an integer nor a list of `count` integers, or beyond 64 bits.
    """
    priority = _plain(priority)
    given = [priority] * count if isinstance(priority, int) else priority
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(f"{priority!r} is neither an integer nor a list of them", field="priority")
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} entries for {count} prompts", field="priority")
    given = [_plain(item) for item in given]
    for item in given:
        if isinstance(item, bool) or not isinstance(item, int) or not -(2**63) <= item < 2**63:
            raise InvalidRequest(f"{item!r} is not an integer of 64 bits; lower goes first", field="priority")
    return given


def _split(given: Any) -> tuple[list[Prompt], bool]:
    given = _plain(given)
    if isinstance(given, str | Mapping):
        return [_one(given)], True
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidRequest(f"{type(given).__name__} is neither text nor a list", field="prompts")
    if given and all(isinstance(item, int | np.integer) for item in given):
        return [Prompt(token_ids=given)], True
    return [_one(_plain(item)) for item in given], False


def _one(item: Any) -> Prompt:
    if isinstance(item, str):
        return Prompt(text=item)
    if isinstance(item, Mapping):
        if not set(item) <= {"prompt", "prompt_token_ids"} or not item:
            raise InvalidRequest(
                f"a prompt given as a dict has the keys prompt and prompt_token_ids, found {sorted(map(str, item))}",
                field="prompts",
            )
        return Prompt(item.get("prompt"), _plain(item.get("prompt_token_ids")))
    return Prompt(token_ids=item)


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value

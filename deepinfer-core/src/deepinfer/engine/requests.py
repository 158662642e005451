"""Checks of what a caller sends, before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InvalidRequest
from deepinfer.models.traits import ModelTraits
from deepinfer.sampling.params import ALIASES, SamplingParams

__all__ = ["check_params", "check_prompt", "draw_seed", "output_limit"]


def check_prompt(ids: Any, traits: ModelTraits, max_model_len: int) -> NDArray[np.int64]:
    """Token ids as an array.

    Raises:
        InvalidRequest: not a sequence of integers, empty, an id outside the vocabulary, the id that stands for an
            image, or no room for one output token.
    """
    if isinstance(ids, bytes):
        raise InvalidRequest(f"{ids!r} is neither text nor token ids; give bytes.decode()", field="prompt")
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"token ids must be a flat list of integers ({error})", field="prompt_token_ids") from None
    if array.size == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"token ids must be a flat list of integers, found {_shape_text(ids, array)}", field="prompt_token_ids"
        )
    outside = np.flatnonzero((array < 0) | (array >= traits.vocab_size))
    if outside.size:
        at = int(outside[0])
        raise InvalidRequest(
            f"id {int(array[at])} at index {at} is outside the vocabulary 0..{traits.vocab_size - 1}"
            + (f" ({outside.size} such ids)" if outside.size > 1 else ""),
            field="prompt_token_ids",
        )
    if traits.image_token_id is not None:
        images = np.flatnonzero(array == traits.image_token_id)
        if images.size:
            raise InvalidRequest(
                f"id {traits.image_token_id} at index {int(images[0])} stands for an image; images in a prompt are not "
                "served yet",
                field="prompt_token_ids",
            )
    if array.size >= max_model_len:
        raise InvalidRequest(
            f"{array.size} tokens leave no room for output in the context of {max_model_len} tokens; shorten the "
            f"prompt to at most {max_model_len - 1} tokens or raise max_model_len",
            field="prompt",
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def check_params(params: Any, traits: ModelTraits) -> SamplingParams:
    """Sampling parameters of one request; a mapping is taken as keyword arguments.

    Raises:
        InvalidRequest: a value out of range, an unknown name, or a stop id outside the vocabulary.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, dict):
        params = SamplingParams(**_known_names(params))
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"{type(params).__name__} is neither SamplingParams nor a dict of its fields", field="sampling_params"
        )
    for field, ids in (
        ("stop_token_ids", params.stop_ids),
        ("allowed_token_ids", params.allowed),
        ("banned_token_ids", params.banned),
        ("golden_token_ids", params.forced),
        ("logit_bias", tuple(token for token, _ in params.bias)),
    ):
        outside = max(ids, default=0)
        if outside >= traits.vocab_size:
            raise InvalidRequest(f"id {outside} is outside the vocabulary 0..{traits.vocab_size - 1}", field=field)
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > traits.vocab_size:
            raise InvalidRequest(f"{count} exceeds the vocabulary of {traits.vocab_size} ids", field=field)
    return params


def _known_names(given: dict[str, Any]) -> dict[str, Any]:
    """Fields by their names here; names of other libraries are translated."""
    known = SamplingParams.__dataclass_fields__
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = ALIASES.get(name, name)
        if field not in known:
            raise InvalidRequest(f"is not a sampling parameter; known: {', '.join(known)}", field=str(name))
        if field in fields:
            other = name if name != field else next(key for key in given if ALIASES.get(key) == field)
            raise InvalidRequest(f"is another name of {field}, which was given too", field=other)
        fields[field] = value
    return fields


def output_limit(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens to generate at most: what was asked, cut at the end of the context."""
    room = max_model_len - num_prompt_tokens
    return room if params.max_tokens is None else min(params.max_tokens, room)


def draw_seed() -> int:
    """A fresh 64-bit seed."""
    return int.from_bytes(os.urandom(8), "little")


def _shape_text(ids: Any, array: NDArray[Any]) -> str:
    if array.ndim != 1:
        return f"{array.ndim} dimensions"
    odd = next((item for item in ids if not isinstance(item, int | np.integer) or isinstance(item, bool)), None)
    if odd is None:  # Integers, but of a size that no id has.
        odd = max(ids, key=abs)
    return f"{odd!r} ({type(odd).__name__})" if isinstance(ids, Sequence) else f"dtype {array.dtype}"

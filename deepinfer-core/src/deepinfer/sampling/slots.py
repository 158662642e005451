"""What a request asks of the sampler beyond the plain filters, as arrays for its slot (NumPy, no torch)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.params import SamplingParams

__all__ = ["Feature", "SlotSampling", "pack_ids"]


class Feature(IntFlag):
    """Which steps of the sampler a slot needs."""

    BIAS = 1
    PENALTY = 2
    BAN = 4
    MIN_P = 8
    FORCE = 16
    LOGPROBS = 32
    PROCESSED = 64
    PROMPT_LOGPROBS = 128


@dataclass(frozen=True, eq=False)
class SlotSampling:
    """The sampler's view of one request.

    Attributes:
        params: as validated.
        prompt: int64 [L].
        ending: ids that end the text and may not be drawn before `min_tokens`.
    """

    params: SamplingParams
    prompt: NDArray[np.int64]
    ending: frozenset[int] = frozenset()

    @classmethod
    def of(cls, params: SamplingParams, prompt: NDArray[np.int64], eos: Iterable[int]) -> SlotSampling | None:
        """The view of a request; None if the plain filters are all that it needs."""
        ending = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        view = cls(params, prompt, ending)
        return view if view.features else None

    @property
    def features(self) -> Feature:
        """Steps that this request needs."""
        params = self.params
        bans = params.allowed_token_ids is not None or params.banned or (params.min_tokens and self.ending)
        found = Feature(0)
        for needed, feature in (
            (params.bias, Feature.BIAS),
            (params.has_penalties, Feature.PENALTY),
            (bans, Feature.BAN),
            (params.min_p > 0, Feature.MIN_P),
            (params.forced, Feature.FORCE),
            (params.logprobs is not None, Feature.LOGPROBS),
            (params.logprobs is not None and params.logprobs_mode == "processed", Feature.PROCESSED),
            (params.prompt_logprobs is not None, Feature.PROMPT_LOGPROBS),
        ):
            if needed:
                found |= feature
        return found

    def allowed_words(self, vocab_size: int) -> NDArray[np.int32]:
        """Ids that may be drawn, as bits (`pack_ids`)."""
        params = self.params
        some = params.allowed_token_ids is not None
        words = pack_ids(params.allowed, vocab_size) if some else np.full(-(-vocab_size // 32), -1, np.int32)
        return words & ~pack_ids(params.banned, vocab_size)

    def words_after(self, num_tokens: int, vocab_size: int) -> NDArray[np.int32]:
        """Ids that may be drawn behind so many output tokens: `allowed_words` and no early end."""
        words = self.allowed_words(vocab_size)
        return words & ~pack_ids(self.ending, vocab_size) if num_tokens < self.params.min_tokens else words


def pack_ids(ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Bits of ids: int32 [ceil(V / 32)], id v is bit v % 32 of word v // 32."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    values = np.fromiter(ids, np.int64)
    np.bitwise_or.at(words, values // 32, np.uint32(1) << (values % 32).astype(np.uint32))
    return words.view(np.int32)

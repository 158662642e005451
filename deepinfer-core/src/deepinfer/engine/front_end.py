"""What a request needs before and after the loop: checks, text to ids and back. Touches no device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.grammars import check_grammars
from deepinfer.engine.messages import EngineFacts, Order
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.prompts import Prompt
from deepinfer.engine.requests import check_params, check_prompt, draw_seed, output_limit
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, InvalidRequest
from deepinfer.sampling.params import SamplingParams

__all__ = ["CODEC_ADVICE", "FrontEnd", "Ticket"]

CODEC_ADVICE = (
    "no installed plugin can turn text into token ids for this model; install one (pip install "
    "deepinfer-recipe-bindings) or pass token ids"
)


@dataclass
class Ticket:
    """One request of a call on its way: checked, ordered, filled."""

    output: RequestOutput
    params: SamplingParams = SamplingParams()
    prompt: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    max_tokens: int = 0
    seed: int = 0

    def order(self, number: int, priority: int) -> Order:
        """What the loop gets of it."""
        return Order(number, self.output.request_id, self.prompt, self.params, self.seed, self.max_tokens, priority)

    def refuse(self, error: DeepInferError) -> None:
        """End the request with a typed error."""
        self.output.error = error
        self.output.finished = True
        self.output.outputs = [CompletionOutput(0, "", [], "error")]


class FrontEnd:
    """Checks requests against an engine's facts and speaks its model's text.

    Args:
        facts: of the engine.
        codec: text to ids and back; None: there is none.
    """

    def __init__(self, facts: EngineFacts, codec: Any) -> None:
        self.facts = facts
        self.codec = codec
        self._names = itertools.count()
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """A number for an order."""
        return next(self._numbers)

    def next_name(self) -> str:
        """A name for a request that was given none."""
        return str(next(self._names))

    def check(self, item: Prompt, params: Any, add_bos: bool, request_id: str) -> Ticket:
        """Validate one request; what is wrong with it goes into its output."""
        facts = self.facts
        output = RequestOutput(request_id, item.text, [], numerics_id=facts.numerics_id)
        ticket = Ticket(output)
        try:
            if item.error is not None:
                raise item.error
            ticket.params = check_params(params, facts.traits)
            self._check_served(ticket.params)
            ticket.prompt = check_prompt(self.ids_of(item, add_bos), facts.traits, facts.max_model_len)
            output.prompt_token_ids = ticket.prompt.tolist()
            ticket.max_tokens = output_limit(ticket.params, ticket.prompt.size, facts.max_model_len)
            ticket.seed = draw_seed() if ticket.params.seed is None else ticket.params.seed
            output.outputs = [CompletionOutput(index, "", [], seed=ticket.seed) for index in range(ticket.params.n)]
        except DeepInferError as error:
            ticket.refuse(error)
        return ticket

    def _check_served(self, params: SamplingParams) -> None:
        """Refuse what this engine cannot do for any prompt."""
        if self.facts.replay_keep and params.prompt_logprobs is not None:
            raise InvalidRequest(
                "bounded replay leaves prompt rows out; set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=off",
                field="prompt_logprobs",
            )
        if params.grammar is not None:
            check_grammars(None if self.facts.path is None else Path(self.facts.path))
        if params.stop_strings:
            TextStream(self.codec, params)  # Refused now, not in the middle of a batch.

    def ids_of(self, item: Prompt, add_bos: bool) -> Any:
        """Ids of a prompt, as the caller gave them or as the codec makes them of its text; not checked.

        Raises:
            InvalidRequest: text without a codec that serves the model.
        """
        if item.token_ids is not None:
            return item.token_ids
        codec = self.codec
        if codec is None:
            raise InvalidRequest(CODEC_ADVICE, field="prompt")
        ids: list[int] = codec.encode_text(item.text)
        bos = getattr(codec, "bos_id", None)
        return [bos, *ids] if add_bos and bos is not None and ids else ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of ids; empty without a codec."""
        return "" if self.codec is None else str(self.codec.decode(list(ids), skip_special=skip_special))

    def name_tokens(self, places: Any) -> Any:
        """Log-probabilities with the text of each id."""
        if places is None or self.codec is None:
            return places
        return [
            None
            if place is None
            else {token: replace(found, decoded_token=self.decode([token], False)) for token, found in place.items()}
            for place in places
        ]

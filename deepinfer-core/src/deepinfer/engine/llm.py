"""`LLM`: a model and its engine in this process, with a blocking `generate`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.checkpoint.reader import ReadStats
from deepinfer.engine.build import build_engine
from deepinfer.engine.core import Generation
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.metrics import metrics_text
from deepinfer.engine.outputs import CompletionOutput, RequestOutput, ScoreOutput
from deepinfer.engine.progress import GenerationProgress
from deepinfer.engine.prompts import Prompt, split_prompts, spread_params
from deepinfer.engine.requests import check_params, check_prompt, draw_seed, output_limit
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, EngineDead, InvalidRequest
from deepinfer.models.traits import ModelTraits
from deepinfer.observe.trace import StepTrace
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings, load_settings

__all__ = ["LLM", "Ticket"]

CODEC_ADVICE = (
    "no installed plugin can turn text into token ids for this model; install one (pip install "
    "deepinfer-recipe-bindings) or pass token ids"
)


class LLM:
    """A model that generates, in this process. Several may live side by side; close them to free their memory.

    Args:
        model: directory of a checkpoint, Hub id, or a synthetic preset ("tiny", "small", "wide": random weights, made
            in the cache directory on first use); None: `DEEPINFER_HF_MODEL_DIR`, else the released model on the Hub.
        accelerator: backend; None: `DEEPINFER_ACCELERATOR`, else chosen automatically.
        max_model_len: longest prompt and output together; None: what the model and the memory allow.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: rows of one step.
        max_prefill_chunk: rows of one prompt in a step; never changes a result on a row-invariant backend.
        num_pages: cache pages; None: from the memory settings.
        poison_released: overwrite freed cache memory with NaN bytes (for tests).
        settings: any other field of `deepinfer.settings.Settings` by name; arguments win over the environment.

    Raises:
        ConfigError: a setting or the checkpoint's config is not valid.
        CheckpointError: the checkpoint is missing or damaged.
        AcceleratorUnavailable, CapabilityError, PluginError: no backend can run it.
        CapacityError: it does not fit; the memory plan is in the message.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        accelerator: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_prefill_chunk: int | None = None,
        num_pages: int | None = None,
        poison_released: bool = False,
        **settings: Any,
    ) -> None:
        self.settings = load_settings(
            accelerator=accelerator,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **settings,
        )
        loaded = load_model(model, self.settings)
        self._start(loaded, num_pages, max_prefill_chunk, poison_released)

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        settings: Settings | None = None,
        *,
        num_pages: int | None = None,
        max_prefill_chunk: int | None = None,
        poison_released: bool = False,
    ) -> LLM:
        """Build on a model that is already in memory, shared with whoever else holds it."""
        llm = cls.__new__(cls)
        llm.settings = load_settings() if settings is None else settings
        llm._start(loaded, num_pages, max_prefill_chunk, poison_released)
        return llm

    def _start(
        self, loaded: LoadedModel, num_pages: int | None, max_prefill_chunk: int | None, poison_released: bool
    ) -> None:
        built = build_engine(
            loaded,
            self.settings,
            num_pages=num_pages,
            max_prefill_chunk=max_prefill_chunk,
            poison_released=poison_released,
        )
        self.memory_plan: MemoryPlan = built.plan
        self.max_model_len = built.max_model_len
        self.numerics_id = loaded.numerics_id
        self._loaded: LoadedModel | None = loaded
        self._core = built.core
        self._lock = threading.Lock()
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any]] | None = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
        add_bos: bool = True,
        raise_errors: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; blocks until all have ended.

        A request that cannot be served does not disturb the others: its output has `error`, and finish reason
        "error". With `raise_errors` the first such error is raised instead: for a refused request before anything
        is queued, for a failed one after all others have ended.

        Args:
            prompts: a text, a list of token ids, or a list of texts and lists of token ids.
            sampling_params: for all prompts, or one entry for each; a dict is taken as keyword arguments.
            prompt_token_ids: token ids instead of, or beside, texts (then the texts are only reported back).
            use_tqdm: show progress on a terminal.
            add_bos: begin the ids of texts with the begin-of-sequence token, as the model was trained; ids that the
                caller gives are never changed. Special tokens spelled in a text are plain text.
            raise_errors: None: True for a single prompt that is not in a list, else False.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: the arguments do not fit together; or with `raise_errors` a request is not valid.
            CapacityError, RequestFailed: with `raise_errors`.
            EngineDead: the engine was closed or has failed.
        """
        with self._lock:
            core = self._alive()
            items, single = split_prompts(prompts, prompt_token_ids)
            params = spread_params(sampling_params, len(items))
            strict = single if raise_errors is None else raise_errors
            tickets = [self.check(item, given, add_bos) for item, given in zip(items, params, strict=True)]
            if strict:
                _raise_first(ticket.output.error for ticket in tickets)
            queued = [ticket for ticket in tickets if ticket.output.error is None]
            running = {ticket.part_id(index): (ticket, index) for ticket in queued for index in range(ticket.params.n)}
            try:
                for ticket in queued:
                    self.queue(ticket)
                self._run(running, use_tqdm)
            finally:
                for request_id in running:
                    core.abort(request_id)
            if strict:
                _raise_first(ticket.output.error for ticket in tickets)
            return [ticket.output for ticket in tickets]

    def score(
        self, prompts: Any, continuations: Any = None, *, use_tqdm: bool = True, add_bos: bool = True
    ) -> list[ScoreOutput]:
        """Log-probabilities of given texts: of continuations after their prompts, or of the prompts themselves.

        A continuation is encoded by itself and put behind its prompt's ids. The whole must leave room for one more
        token in the context. A text that cannot be scored has `error` and disturbs no other.

        Args:
            prompts: as in `generate`.
            continuations: as many, texts or lists of token ids; None: every prompt id but the first is scored.
            use_tqdm: show progress on a terminal.
            add_bos: as in `generate`.

        Raises:
            InvalidRequest: the arguments do not fit together.
            EngineDead: the engine was closed or has failed.
        """
        items, _ = split_prompts(prompts, None)
        after = [Prompt(token_ids=[])] * len(items) if continuations is None else split_prompts(continuations, None)[0]
        if len(after) != len(items):
            raise InvalidRequest(f"{len(after)} continuations for {len(items)} prompts", field="continuations")
        self._alive()
        scores = [ScoreOutput() for _ in items]
        whole: list[Any] = []
        starts: list[int] = []
        for item, more, score in zip(items, after, scores, strict=True):
            try:
                ids = list(self._encode(item.text, add_bos) if item.token_ids is None else item.token_ids)
                starts.append(max(1, len(ids)) if continuations is not None else 1)
                whole.append([*ids, *(self._encode(more.text, False) if more.token_ids is None else more.token_ids)])
            except InvalidRequest as error:
                score.error = error
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = self.generate(prompt_token_ids=whole, sampling_params=params, use_tqdm=use_tqdm, raise_errors=False)
        waiting = [score for score in scores if score.error is None]
        for score, output, start in zip(waiting, outputs, starts, strict=True):
            score.error = output.error
            if output.error is None and output.prompt_logprobs is not None:
                score.token_ids = output.prompt_token_ids[start:]
                places = zip(output.prompt_logprobs[start:], score.token_ids, strict=True)
                found = [place[token] for place, token in places if place is not None]
                score.logprobs = [entry.logprob for entry in found]
                score.ranks = [entry.rank for entry in found]
        return scores

    def check(self, item: Prompt, params: Any, add_bos: bool, request_id: str | None = None) -> Ticket:
        """Validate one request; what is wrong with it goes into its output."""
        core = self._alive()
        name = str(next(self._ids)) if request_id is None else request_id
        output = RequestOutput(name, item.text, [], numerics_id=self.numerics_id)
        ticket = Ticket(output)
        traits = core.runner.traits
        try:
            ticket.params = check_params(params, traits)
            if self.settings.replay_keep and ticket.params.prompt_logprobs is not None:
                raise InvalidRequest(
                    "bounded replay leaves prompt rows out; set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=off",
                    field="prompt_logprobs",
                )
            if ticket.params.grammar is not None:
                core.check_grammars()
            if ticket.params.stop_strings:
                TextStream(self._codec, ticket.params)  # Refused now, not in the middle of a batch.
            ids = self._encode(item.text, add_bos) if item.token_ids is None else item.token_ids
            ticket.prompt = check_prompt(ids, traits, self.max_model_len)
            output.prompt_token_ids = ticket.prompt.tolist()
            ticket.max_tokens = output_limit(ticket.params, ticket.prompt.size, self.max_model_len)
            core.scheduler.check_fit(output.request_id, ticket.prompt.size, ticket.max_tokens)
        except DeepInferError as error:
            ticket.refuse(error)
        return ticket

    def queue(self, ticket: Ticket, priority: int = 0) -> list[Generation]:
        """Hand a checked request to the loop: one generation for each completion.

        Raises:
            DeepInferError: it was refused; nothing of it is queued.
        """
        params, output, core = ticket.params, ticket.output, self._alive()
        seed = draw_seed() if params.seed is None else params.seed
        output.outputs = [CompletionOutput(index, "", [], seed=seed) for index in range(params.n)]
        # Prompt log-probabilities are the same for every completion.
        rest = replace(params, prompt_logprobs=None)
        queued: list[Generation] = []
        try:
            for index in range(params.n):
                generation = core.add(
                    ticket.part_id(index),
                    ticket.prompt,
                    params if index == 0 else rest,
                    seed=seed,
                    max_tokens=ticket.max_tokens,
                    priority=priority,
                    completion=index,
                    text=TextStream(self._codec, params) if params.stop_strings else None,
                    leader=queued[0] if queued else None,
                )
                queued.append(generation)
        except DeepInferError:
            for generation in queued:
                core.abort(generation.request.request_id)
            raise
        return queued

    def _run(self, running: dict[str, tuple[Ticket, int]], use_tqdm: bool) -> None:
        """Step until every queued completion has ended, taking the ended ones out of `running`."""
        with GenerationProgress(len(running), enabled=use_tqdm) as progress:
            while running:
                changed = self._core.step()
                for generation in changed:
                    if generation.finish_reason is not None:
                        self._fill(*running.pop(generation.request.request_id), generation)
                progress.update(changed)

    def _fill(self, ticket: Ticket, index: int, generation: Generation) -> None:
        """Copy a finished generation to its output."""
        output, completion = ticket.output, ticket.output.outputs[index]
        completion.token_ids = generation.token_ids
        completion.finish_reason = str(generation.finish_reason)
        completion.stop_reason = generation.stop_reason
        completion.text = (
            self._decode(generation.token_ids, generation.params.skip_special_tokens)
            if generation.text is None
            else generation.text.text
        )
        completion.logprobs = self.name_tokens(generation.logprobs)
        completion.cumulative_logprob = generation.cumulative_logprob
        if index == 0:
            output.metrics = generation.metrics
            output.num_cached_tokens = generation.request.num_cached_tokens
            output.prompt_logprobs = self.name_tokens(generation.prompt_logprobs)
        output.error = output.error or generation.error
        output.finished = all(part.finish_reason is not None for part in output.outputs)

    def name_tokens(self, places: Any) -> Any:
        """Log-probabilities with the text of each id."""
        if places is None or self._codec is None:
            return places
        return [
            None
            if place is None
            else {token: replace(found, decoded_token=self._decode([token], False)) for token, found in place.items()}
            for place in places
        ]

    def _encode(self, text: str | None, add_bos: bool) -> list[int]:
        codec = self._codec
        if codec is None:
            raise InvalidRequest(CODEC_ADVICE, field="prompt")
        ids = codec.encode_text(text)
        bos = getattr(codec, "bos_id", None)
        return [bos, *ids] if add_bos and bos is not None and ids else ids

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return "" if self._codec is None else self._codec.decode(ids, skip_special=skip_special)

    @property
    def _codec(self) -> Any:
        return None if self._loaded is None else self._loaded.codec

    def get_tokenizer(self) -> Any:
        """The codec: `encode_text(text) -> ids` and `decode(ids) -> text`; None if no plugin serves the model."""
        return self._codec

    @property
    def traits(self) -> ModelTraits:
        """What the engine knows of the model: vocabulary, special ids, context, page size."""
        traits: ModelTraits = self._alive().runner.traits
        return traits

    @property
    def stats(self) -> Any:
        """Counts of the step loop since the start (`EngineStats`)."""
        return self._alive().stats

    @property
    def load_stats(self) -> ReadStats:
        """Bytes, seconds and GB/s of the checkpoint's reads."""
        stats: ReadStats = self._alive().runner.model.load_stats
        return stats

    def metrics_text(self) -> str:
        """Counters, gauges and latency histograms in the text format of Prometheus; may be called on any thread."""
        return metrics_text({"0": self._alive()})

    def trace(self) -> StepTrace:
        """Record every step from now on; `save` writes what Chrome's tracing page and Perfetto open."""
        trace = self._alive().recorder.trace = StepTrace()
        return trace

    def _alive(self) -> Any:
        if self._loaded is None:
            raise EngineDead("this LLM was closed; make a new one")
        return self._core

    def close(self) -> None:
        """Free caches and weights; a second call does nothing."""
        with self._lock:
            self._loaded = None
            core = self.__dict__.pop("_core", None)
            if core is not None:
                core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Ticket:
    """One request of a call on its way: checked, queued, filled."""

    output: RequestOutput
    params: SamplingParams = SamplingParams()
    prompt: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    max_tokens: int = 0

    def part_id(self, index: int) -> str:
        """The id in the loop of one completion."""
        return self.output.request_id if index == 0 else f"{self.output.request_id}/{index}"

    def refuse(self, error: DeepInferError) -> None:
        """End the request with a typed error."""
        self.output.error = error
        self.output.finished = True
        self.output.outputs = [CompletionOutput(0, "", [], "error")]


def _raise_first(errors: Any) -> None:
    for error in errors:
        if error is not None:
            raise error

"""`LLM`: a model and its engine in this process, with a blocking `generate`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer.engine.chat import CHAT_PARAMS, open_chat, split_conversations
from deepinfer.engine.core import EngineCore
from deepinfer.engine.front_end import FrontEnd, Ticket
from deepinfer.engine.generation import Generation
from deepinfer.engine.handle import EngineHandle
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.engine.local import LocalEngine
from deepinfer.engine.loop import queue_order
from deepinfer.engine.metrics import metrics_text
from deepinfer.engine.outputs import RequestOutput, ScoreOutput
from deepinfer.engine.progress import GenerationProgress
from deepinfer.engine.prompts import Prompt, split_prompts, spread_params, spread_priorities
from deepinfer.errors import DeepInferError, EngineDead, InvalidRequest
from deepinfer.observe.trace import StepTrace
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings, load_settings

__all__ = ["LLM"]


class LLM(EngineHandle):
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
        engine = LocalEngine.build(
            loaded,
            self.settings,
            num_pages=num_pages,
            max_prefill_chunk=max_prefill_chunk,
            poison_released=poison_released,
        )
        self._loaded: LoadedModel | None = loaded
        self._front = FrontEnd(engine.facts, engine.codec)
        self._core = engine.core
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any]] | None = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = True,
        add_bos: bool = True,
        priority: int | Sequence[int] = 0,
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
            priority: for all prompts, or one for each; lower goes first. Never changes what is said.
            raise_errors: None: True for a single prompt that is not in a list, else False.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: the arguments do not fit together; or with `raise_errors` a request is not valid.
            CapacityError, RequestFailed: with `raise_errors`.
            EngineDead: the engine was closed or has failed.
        """
        core = self._alive()
        items, single = split_prompts(prompts, prompt_token_ids)
        params = spread_params(sampling_params, len(items))
        priorities = spread_priorities(priority, len(items))
        tickets = [self._check(core, item, given, add_bos) for item, given in zip(items, params, strict=True)]
        return self._complete(tickets, priorities, single if raise_errors is None else raise_errors, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | dict[str, Any] | Sequence[SamplingParams | dict[str, Any]] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        raise_errors: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, as the model's codec writes and reads them; blocks until all have ended.

        Each completion has the answer in `message`: role, content, and reasoning or tool calls where there are any.

        Args:
            messages: one conversation, a list of messages like {"role": "user", "content": "Hello"}; or a list of
                conversations.
            sampling_params: as in `generate`; None: up to the end of the context.
            tools: functions that the model may call, as in a Chat Completions body.
            options: other fields of such a body that shape the prompt; see `deepinfer.engine.chat.OPTIONS`.
            use_tqdm, priority, raise_errors: as in `generate`; a single conversation raises by default.

        Returns:
            One output per conversation, in order.

        Raises:
            InvalidRequest: no installed codec can write chats for this model, or as in `generate`.
            CapacityError, RequestFailed, EngineDead: as in `generate`.
        """
        core = self._alive()
        conversations, single = split_conversations(messages)
        params = spread_params(CHAT_PARAMS if sampling_params is None else sampling_params, len(conversations))
        priorities = spread_priorities(priority, len(conversations))
        pairs = list(zip(conversations, params, strict=True))
        chats = [open_chat(self._front, conversation, given, tools, options) for conversation, given in pairs]
        tickets = [self._check(core, chat.prompt, given, False) for chat, given in zip(chats, params, strict=True)]
        outputs = self._complete(tickets, priorities, single if raise_errors is None else raise_errors, use_tqdm)
        for chat, output in zip(chats, outputs, strict=True):
            chat.read(output)
        return outputs

    def _complete(
        self, tickets: Sequence[Ticket], priorities: Sequence[int], strict: bool, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Serve checked requests; with `strict` raise the first error."""
        with self._lock:
            core = self._alive()
            if strict:
                _raise_first(ticket.output.error for ticket in tickets)
            queued = [
                (ticket, ticket.order(self._front.next_number(), priority))
                for ticket, priority in zip(tickets, priorities, strict=True)
                if ticket.output.error is None
            ]
            running = {order.part_id(at): (ticket, at) for ticket, order in queued for at in range(ticket.params.n)}
            try:
                for _, order in queued:
                    queue_order(core, order, self._front.codec)
                self._run(core, running, use_tqdm)
            finally:
                for name in running:
                    core.abort(name)
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
                ids, rest = _flat(self._front.ids_of(item, add_bos)), _flat(self._front.ids_of(more, False))
            except DeepInferError as error:
                score.error = error
                continue
            starts.append(max(1, len(ids)) if continuations is not None else 1)
            whole.append([*ids, *rest])
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

    def _check(self, core: EngineCore, item: Prompt, params: Any, add_bos: bool) -> Ticket:
        """Validate one request, its memory included; what is wrong with it goes into its output."""
        ticket = self._front.check(item, params, add_bos, self._front.next_name())
        if ticket.output.error is None:
            try:
                core.scheduler.check_fit(ticket.output.request_id, ticket.prompt.size, ticket.max_tokens)
            except DeepInferError as error:
                ticket.refuse(error)
        return ticket

    def _run(self, core: EngineCore, running: dict[str, tuple[Ticket, int]], use_tqdm: bool) -> None:
        """Step until every queued completion has ended, taking the ended ones out of `running`."""
        with GenerationProgress(len(running), enabled=use_tqdm) as progress:
            while running:
                changed = core.step()
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
            self._front.decode(generation.token_ids, generation.params.skip_special_tokens)
            if generation.text is None
            else generation.text.text
        )
        completion.logprobs = self._front.name_tokens(generation.logprobs)
        completion.cumulative_logprob = generation.cumulative_logprob
        if index == 0:
            output.metrics = generation.metrics
            output.num_cached_tokens = generation.request.num_cached_tokens
            output.prompt_logprobs = self._front.name_tokens(generation.prompt_logprobs)
        output.error = output.error or generation.error
        output.finished = all(part.finish_reason is not None for part in output.outputs)

    @property
    def stats(self) -> Any:
        """Counts of the step loop since the start (`EngineStats`)."""
        return self._alive().stats

    def metrics_text(self) -> str:
        """Counters, gauges and latency histograms in the text format of Prometheus; may be called on any thread."""
        return metrics_text({"0": self._alive()})

    def trace(self) -> StepTrace:
        """Record every step from now on; `save` writes what Chrome's tracing page and Perfetto open."""
        trace = self._alive().recorder.trace = StepTrace()
        return trace

    def _alive(self) -> EngineCore:
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


def _flat(ids: Any) -> Sequence[Any]:
    """Ids that can be put behind one another; each of them is checked later.

    Raises:
        InvalidRequest: no list.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise InvalidRequest(f"{ids!r} is neither text nor a list of token ids", field="prompt_token_ids")
    return ids


def _raise_first(errors: Iterable[DeepInferError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error

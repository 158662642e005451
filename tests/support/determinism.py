"""The requests of the determinism table and the ways of serving them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutput
from deepinfer.conformance.loop_model import WINDOW, write_loop_model
from deepinfer.conformance.sim import SimulatedDevice
from deepinfer.engine import grammars
from deepinfer.engine.build import build_engine
from deepinfer.engine.core import EngineCore
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.engine.loop import queue_order
from deepinfer.engine.messages import Order
from deepinfer.settings import Settings, load_settings

__all__ = [
    "KEEP",
    "MAX_DRAFTS",
    "Bench",
    "Said",
    "Variant",
    "draw_requests",
    "shared_compiler",
]

MAX_DRAFTS = 5
PAGE = 16
KEEP = WINDOW + 2 * (1 + MAX_DRAFTS)
"""The fewest prompt tokens that bounded replay may keep."""

CONTEXT = 192
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "batch_invariant": True,
    "max_model_len": CONTEXT,
    "page_size": PAGE,
    "use_nextn_decode": 0,
    "max_num_seqs": 16,
    "num_threads": 1,
    "prefix_load_seconds": 30.0,
}


# ---- the requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request of the table; its parameters hold seed and length."""

    prompt: list[int]
    params: SamplingParams
    priority: int


KINDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 16},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1},
    {"prompt_logprobs": 2, "logprobs": 0, "min_p": 0.01},
    {"structured_output": StructuredOutput(regex="(ab|ba){2,4}c"), "logprobs": 2},
    {"logit_bias": {7: 4.0, 9: -100.0}, "frequency_penalty": -0.4},
    {"golden_token_ids": [-1, 42, 42], "logprobs": 1, "logprobs_mode": "processed"},
    {"n": 3, "top_p": 0.9, "logprobs": 1},
    {"structured_output": StructuredOutput(choices=["yes", "no", "nobody"]), "logprobs": 1},
    {"banned_token_ids": [*range(100, 300)], "top_k": 20},
    {"stop_token_ids": [*range(200, 320)], "min_tokens": 3, "ignore_eos": False},
    {"stop": ["a", "b", "c", "d", "e", "in"], "include_stop_str_in_output": True},
    {"structured_output": StructuredOutput(json_object=True), "ignore_eos": False},
    {"allowed_token_ids": [*range(3, 90)], "frequency_penalty": 0.7, "logprobs": 0},
    {"structured_output": StructuredOutput(regex="[a-f]{3,9}", trigger=[42]), "golden_token_ids": [-1, 42]},
    {"n": 2, "prompt_logprobs": 0, "logprobs": 3, "top_p": 0.8, "logprobs_mode": "processed"},
)
"""What requests ask for beside a temperature; every 16 requests hold each of them once."""

LENGTHS = (1, 2, KEEP, PAGE - 1, PAGE, PAGE + 1, 33, 50, 141)
"""Of prompts: around the page and what replay keeps, and more positions than a selecting layer takes."""


def draw_requests(count: int) -> list[Request]:
    """Mixed requests, the same at every call: all kinds, temperature 0 and 1, shared prefixes, priorities."""
    rng = random.Random(20260101)
    stems = [[rng.randint(3, 500) for _ in range(length)] for length in (2 * PAGE + 5, 4 * PAGE)]
    requests = []
    for index in range(count):
        prompt = [rng.randint(3, 500) for _ in range(LENGTHS[index % len(LENGTHS)])]
        if index % 4 == 3:
            prompt = stems[index // 4 % 2] + prompt[: 1 + index % 20]
        given = {
            "temperature": 0.0 if (index + index // 16) % 3 == 2 else 1.0,
            "ignore_eos": True,
            "max_tokens": rng.randint(3, 7),
            "seed": 1000 + index,
        }
        params = SamplingParams(**{**given, **KINDS[index % len(KINDS)]})
        requests.append(Request(prompt, params, rng.choice([0, 0, 1])))
    return requests


# ---- what they say -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """Everything of one completion that must be the same to the bit."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Any
    prompt_logprobs: Any


def exact(places: Iterable[Any] | None) -> Any:
    """Log-probabilities by place as (id, bits of the value, rank), in their order."""
    if places is None:
        return None
    return tuple(
        place and tuple((token, found.logprob.hex(), found.rank) for token, found in place.items()) for place in places
    )


def said_by(output: RequestOutput) -> list[Said]:
    """The completions of a request that the public API served."""
    if output.error is not None:
        raise output.error
    prompt = exact(output.prompt_logprobs)
    return [
        Said(tuple(part.token_ids), part.text, part.finish_reason, part.stop_reason, exact(part.logprobs), prompt)
        for part in output.outputs
    ]


# ---- ways of serving them ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One row of the table: what is different around the requests.

    Attributes:
        settings: differing settings. engine: further arguments of `build_engine`.
        by: who turns the loop: "core" (the test), or the public "LLM", "AsyncLLM" or "process".
        order: how the requests are queued. at_once: requests that are in flight at most.
        drafts: rows of a sequence come from a scripted drafter. storm: neighbours come and are aborted that many steps
            later.
        restart: the model is loaded anew.
        rounds: times that the requests go through one engine; the last one counts, so from 2 on prefixes are hot.
        on_disk: prefixes come from a directory in which an engine before left them.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    by: str = "core"
    order: Callable[[list[int]], list[int]] = list
    at_once: int = 1000
    drafts: bool = False
    storm: int = 0
    restart: bool = False
    rounds: int = 1
    on_disk: bool = False


@dataclass(frozen=True)
class Outcome:
    """What every request said under a variant, and the engine's counts of it."""

    said: list[list[Said]]
    stats: Any
    num_cached_tokens: int


class Bench:
    """Serves the requests under any variant, of one replay mode's results at a time.

    Args:
        folder: for the checkpoint and stores.
        requests: what is asked.
    """

    def __init__(self, folder: Path, requests: Sequence[Request]) -> None:
        self.folder = folder
        self.path = write_loop_model(folder / "model")
        self.requests = requests
        self._loaded: dict[tuple[Any, ...], LoadedModel] = {}
        self._alone: dict[bool, list[list[Said]]] = {}

    def alone(self, *, replay: bool) -> list[list[Said]]:
        """What each request says alone on a synchronous loop with all its prompt's rows, computed once."""
        if replay not in self._alone:
            mode = {"yoco_prefill_truncation_mode": "mask", "yoco_prefill_keep_tokens": KEEP} if replay else {}
            settings = {"zero_overhead_scheduling": False, "enable_prefix_caching": False, **mode}
            self._alone[replay] = self.run(Variant(settings, at_once=1), "cpu").said
        return self._alone[replay]

    def run(self, variant: Variant, device: str) -> Outcome:
        """Serve all requests."""
        given = {**SETTINGS, **variant.settings}
        if variant.drafts:
            given["use_nextn_decode"] = given["use_nextn_decode"] or MAX_DRAFTS
        if variant.on_disk:
            given["prefix_disk_dir"] = self.folder / "prefixes"
        given["decode_perf_cache_dir"] = self.folder / "step_costs"
        settings = load_settings(**given)
        requests = [replace(item, params=self._served(item.params, settings)) for item in self.requests]
        if variant.by == "core":
            return self._by_core(variant, settings, device, requests)
        if variant.by == "LLM":
            return self._by_llm(variant, settings, requests)
        return self._by_async(variant, settings, given, device, requests)

    def _served(self, params: SamplingParams, settings: Settings) -> SamplingParams:
        """Bounded replay leaves out the rows that prompt log-probabilities need."""
        return replace(params, prompt_logprobs=None) if settings.replay_keep else params

    def _load(self, variant: Variant, settings: Settings) -> LoadedModel:
        if variant.restart:
            return load_model(self.path, settings)
        key = settings.yoco_prefill_truncation_mode, settings.use_nextn_decode, settings.page_size
        if key not in self._loaded:
            self._loaded[key] = load_model(self.path, settings)
        return self._loaded[key]

    # -- the core, step by step

    def _by_core(self, variant: Variant, settings: Settings, device: str, requests: Sequence[Request]) -> Outcome:
        loaded = self._load(variant, settings)
        options = dict(variant.engine)
        if variant.drafts:
            options["drafter"] = self._drafter(settings.use_nextn_decode or 0, replay=settings.replay_keep > 0)
        devices: list[SimulatedDevice] = []
        if device == "sim":
            options["executor"] = lambda runner: devices.append(SimulatedDevice(runner)) or devices[0]
        core = build_engine(loaded, settings, poison_released=True, **options).core
        for _ in range(variant.rounds):
            running = self._round(variant, core, devices, loaded.codec, requests)
        core.scheduler.assert_idle()
        core.close()
        said = [
            [said_in_loop(generation, parts[0], loaded.codec) for generation in parts]
            for _, parts in sorted(running.items())
        ]
        cached = sum(part.request.num_cached_tokens for parts in running.values() for part in parts)
        return Outcome(said, core.stats, cached)

    def _round(
        self,
        variant: Variant,
        core: EngineCore,
        devices: list[SimulatedDevice],
        codec: Any,
        requests: Sequence[Request],
    ) -> dict[int, list[Any]]:
        """Send every request through an engine once."""
        waiting = variant.order(list(range(len(requests))))
        running: dict[int, list[Any]] = {}
        storm = Storm(core, variant.storm) if variant.storm else None
        while waiting or core.num_unfinished:
            while waiting and core.num_unfinished < variant.at_once:
                index = waiting.pop(0)
                running[index] = queue_order(core, order_of(index, requests[index]), codec)
            if storm is not None:
                storm.blow()
            if devices:
                with devices[0].loop_guard():
                    core.step()
            else:
                core.step()
        return running

    def _drafter(self, num_drafts: int, *, replay: bool) -> Any:
        """A drafter that proposes each completion's own continuation, with mistakes and gaps at scripted places."""
        truth = {
            (request.params.seed, index): (len(request.prompt), said.token_ids)
            for request, parts in zip(self.requests, self.alone(replay=replay), strict=True)
            for index, said in enumerate(parts)
        }

        def draft(anchors: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, records: Any) -> Any:
            ids = torch.full((anchors.shape[0], num_drafts), -1)
            rows = zip(anchors.tolist(), positions.tolist(), slots.clamp(min=0).tolist(), strict=True)
            for row, (anchor, position, slot) in enumerate(rows):
                key = int(records.seed[slot]), int(records.completion[slot])
                length, output = truth.get(key, (0, ()))
                script = random.Random(f"{key} {position}")
                for place, token in enumerate(output[position + 2 - length :][:num_drafts] if anchor >= 0 else ()):
                    if script.random() < 0.1:
                        break
                    ids[row, place] = token if script.random() < 0.8 else (token + 1) % 500
            return SimpleNamespace(ids=ids, confidences=torch.full(ids.shape, 0.7))

        return draft

    # -- the public front ends

    def _by_llm(self, variant: Variant, settings: Settings, requests: Sequence[Request]) -> Outcome:
        loaded = self._load(variant, settings)
        with LLM.from_loaded(loaded, settings, poison_released=True, **variant.engine) as llm:
            for _ in range(variant.rounds):
                outputs = llm.generate(
                    prompt_token_ids=[request.prompt for request in requests],
                    sampling_params=[request.params for request in requests],
                    priority=[request.priority for request in requests],
                    use_tqdm=False,
                )
            return outcome_of(outputs, llm.stats)

    def _by_async(
        self, variant: Variant, settings: Settings, given: dict[str, Any], device: str, requests: Sequence[Request]
    ) -> Outcome:
        if variant.by == "process":
            llm = AsyncLLM(self.path, **given, **variant.engine)
        else:
            sim = {"executor": SimulatedDevice} if device == "sim" else {}
            llm = AsyncLLM.from_loaded(self._load(variant, settings), settings, **sim, **variant.engine)

        async def ask(index: int) -> RequestOutput:
            request = requests[index]
            stream = llm.generate(request.prompt, request.params, priority=request.priority)
            return [output async for output in stream][-1]

        async def ask_all() -> list[RequestOutput]:
            order = variant.order(list(range(len(requests))))
            outputs = dict(zip(order, await asyncio.gather(*map(ask, order)), strict=True))
            return [outputs[index] for index in range(len(requests))]

        with llm:
            for _ in range(variant.rounds):
                outputs = asyncio.run(ask_all())
            return outcome_of(outputs, llm.stats)


def outcome_of(outputs: Sequence[RequestOutput], stats: Any) -> Outcome:
    """Of a public front end."""
    return Outcome([said_by(output) for output in outputs], stats, sum(output.num_cached_tokens for output in outputs))


def order_of(index: int, request: Request) -> Order:
    """A request as front ends send it to the loop."""
    params = request.params
    if params.seed is None or params.max_tokens is None:
        raise ValueError(f"request {index} has no seed or no length")
    prompt = np.array(request.prompt, np.int64)
    return Order(index, str(index), prompt, params, params.seed, params.max_tokens, request.priority)


def said_in_loop(generation: Any, first: Any, codec: Any) -> Said:
    """One completion as the loop holds it; the first one's prompt log-probabilities are those of all."""
    if generation.error is not None:
        raise generation.error
    ids, skip = generation.token_ids, generation.params.skip_special_tokens
    text = codec.decode(ids, skip_special=skip) if generation.text is None else generation.text.text
    return Said(
        tuple(ids),
        text,
        str(generation.finish_reason),
        generation.stop_reason,
        exact(generation.logprobs),
        exact(first.prompt_logprobs),
    )


class Storm:
    """Neighbours that arrive one a step, more urgent than anything else, and are aborted in the middle."""

    def __init__(self, core: EngineCore, lifetime: int, count: int = 12) -> None:
        self._core, self._lifetime, self._left = core, lifetime, count
        self._step = 0

    def blow(self) -> None:
        """Before a step."""
        self._core.abort(f"storm {self._step - self._lifetime}")
        if self._left:
            prompt = np.arange(3, 3 + 11 * (1 + self._step % 4))
            name, params = f"storm {self._step}", SamplingParams(max_tokens=60)
            self._core.add(name, prompt, params, seed=self._step, max_tokens=60, priority=-1)
            self._left -= 1
        self._step += 1


@contextmanager
def shared_compiler() -> Iterator[None]:
    """Inside, all engines of this process compile grammars with the same workers, which take seconds to start."""
    made: dict[str, Any] = {}
    own = grammars.GrammarCompiler

    def shared(vocabulary: Any, **options: Any) -> Any:
        if "compiler" not in made:
            made["compiler"] = own(vocabulary, **options)
            made["compiler"].close = lambda: None
        return made["compiler"]

    grammars.GrammarCompiler = shared  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        grammars.GrammarCompiler = own  # type: ignore[misc]
        if "compiler" in made:
            own.close(made["compiler"])

"""Reuse of prefixes in the engine: hit, miss, from host memory or from disk, the bits are the same."""

from __future__ import annotations

import dataclasses
import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.api.descriptor import API_VERSION, KVStoreDescriptor
from deepinfer.cache.tiers import files
from deepinfer.cache.tiers.memory import MemoryStore
from deepinfer.checkpoint.synthetic import make_checkpoint
from deepinfer.engine.block_copies import LostBlocks
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.errors import ConfigError, RequestFailed
from deepinfer.plugins.registry import Origin, Registry
from deepinfer.settings import load_settings

# ---- on the fake model: it raises where a slot or a page belongs to another prefix ------------------------------

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def complete(core: Any, name: str, prompt: list[int], count: int = 3) -> Any:
    """Run one request to its end."""
    generation = core.add(name, np.array(prompt), GREEDY, seed=0, max_tokens=count)
    while core.num_unfinished:
        core.step()
    return generation


def settled(core: Any) -> None:
    """What is published leaves the device behind the steps, on their thread, and is written on another one."""
    done = threading.Event()
    core.executor.run(done.set)
    assert done.wait(60)
    core.tiers.exchange.flush()


@pytest.fixture
def check(naive_model: Any) -> Callable[..., None]:
    def check(generation: Any) -> None:
        request = generation.request
        assert generation.error is None
        expected = naive_model(request.prompt.tolist(), GREEDY, request.max_tokens, 0)[0]
        assert generation.token_ids == expected

    return check


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_runs_only_what_is_new(fake_model: Any, make_engine: Any, check: Any, asynchronous: bool) -> None:
    core = make_engine(fake_model, zero_overhead_scheduling=asynchronous)
    prompt = list(range(6, 17))
    for name, cached in (("a", 0), ("b", 8), ("c", 8)):
        fake_model.rows_seen.clear()
        generation = complete(core, name, prompt)
        check(generation)
        assert generation.request.num_cached_tokens == cached
        assert sum(fake_model.rows_seen) == len(prompt) - cached + 2
    longer = complete(core, "d", [*prompt, 20, 21])
    check(longer)
    assert longer.request.num_cached_tokens == 8
    core.scheduler.assert_idle()
    stats = core.scheduler.prefix.stats
    assert (stats.lookups, stats.hits, stats.hit_tokens) == (4, 3, 24)
    counters = core.scheduler.prefix.counters()
    assert counters["hit_tokens"] == 24
    assert counters["kept_snapshots"] == counters["taken_snapshots"] == 3, "of two prompts, and of the same output"
    assert counters["cached_pages"] == core.scheduler.pages.num_cached > 0


def test_output_is_reused_by_the_next_turn(fake_model: Any, make_engine: Any, check: Any) -> None:
    """Pages of generated tokens are published, and the end of the last of them is a place to resume from."""
    core = make_engine(fake_model, prefix_snapshots=8)
    first = complete(core, "a", [6, 7, 8, 9, 10], count=9)
    turn = [*first.request.prompt.tolist(), *first.token_ids, 11]
    second = complete(core, "b", turn)
    third = complete(core, "c", [*turn, 12, 13])
    for generation in (first, second, third):
        check(generation)
    assert [item.request.num_cached_tokens for item in (first, second, third)] == [0, 12, 12]


def test_a_request_keeps_only_the_latest_place_in_its_output(fake_model: Any, make_engine: Any) -> None:
    """But for those that a long text leaves: here every 16 tokens."""
    core = make_engine(fake_model, prefix_snapshots=8, prefix_snapshot_interval=16)
    generation = complete(core, "a", [6, 7, 8, 9, 10], count=33)
    text = np.array([*generation.request.prompt.tolist(), *generation.token_ids])
    prefix = core.scheduler.prefix
    nodes, _ = prefix.index.match(text, 100)
    assert [node.depth * 4 for node in nodes if node.snapshot >= 0] == [4, 16, 32, 36]
    assert (prefix.snapshots.num_kept, prefix.snapshots.evicted) == (4, 0)


def test_the_end_of_an_output_goes_to_lower_tiers(fake_model: Any, make_engine: Any, check: Any) -> None:
    """Only the last place of a request that has said all is stored, not every one on the way."""
    core = make_engine(fake_model, prefix_host_bytes=100_000, prefix_load_seconds=10.0)
    saved, save = [], core.tiers.exchange.save
    core.tiers.exchange.save = lambda kind, *rest: (saved.append(kind), save(kind, *rest))
    first = complete(core, "a", [6, 7, 8, 9, 10], count=16)
    settled(core)
    assert (saved.count("page"), saved.count("snapshot")) == (5, 2), "of the prompt and of the output"
    core.scheduler.prefix.clear()
    second = complete(core, "b", [*first.request.prompt.tolist(), *first.token_ids, 11])
    check(second)
    assert second.request.num_cached_tokens == 20
    core.close()


def test_prompt_logprobs_need_every_row(fake_model: Any, make_engine: Any) -> None:
    core = make_engine(fake_model)
    prompt = list(range(6, 17))
    complete(core, "a", prompt)
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    generation = core.add("b", np.array(prompt), params, seed=0, max_tokens=1)
    while core.num_unfinished:
        core.step()
    assert generation.request.num_cached_tokens == 0
    assert all(place is not None for place in generation.prompt_logprobs[1:])


def test_nothing_is_reused_when_switched_off(fake_model: Any, make_engine: Any) -> None:
    for settings in ({"enable_prefix_caching": False}, {"prefix_snapshots": 0}):
        core = make_engine(fake_model, **settings)
        assert core.scheduler.prefix is None
        for name in "ab":
            assert complete(core, name, list(range(6, 17))).request.num_cached_tokens == 0
        assert core.scheduler.pages.num_cached == 0


def test_unsound_numbers_are_never_reused(fake_model: Any, make_engine: Any, check: Any) -> None:
    core = make_engine(fake_model)
    prompt = list(range(6, 17))
    fake_model.poison_logits = lambda state: True
    assert isinstance(complete(core, "a", prompt).error, RequestFailed)
    fake_model.poison_logits = lambda state: False
    generation = complete(core, "b", prompt)
    check(generation)
    assert generation.request.num_cached_tokens == 0


def test_a_failed_step_leaves_nothing_to_find(fake_model: Any, make_engine: Any, check: Any) -> None:
    core = make_engine(fake_model)
    prompt = list(range(6, 17))
    fake_model.fail_on = lambda slots: True
    assert isinstance(complete(core, "a", prompt).error, RequestFailed)
    fake_model.fail_on = lambda slots: False
    generation = complete(core, "b", prompt)
    check(generation)
    assert generation.request.num_cached_tokens == 0
    core.scheduler.assert_idle()


@pytest.mark.parametrize("seed", range(12))
def test_shared_prefixes_under_pressure(
    fake_model: Any, make_engine: Any, naive_model: Any, tmp_path: Path, seed: int
) -> None:
    """Few stems, small pools, preemption, tiers: every request has the tokens that it has alone."""
    rng = random.Random(seed)
    stems = [[rng.randint(6, 36) for _ in range(rng.choice([4, 8, 13]))] for _ in range(3)]
    tiers = rng.choice([{}, {"prefix_host_bytes": 4000}, {"prefix_disk_dir": tmp_path, "prefix_load_seconds": 5.0}])
    core = make_engine(
        fake_model,
        num_pages=rng.randint(11, 24),
        max_prefill_chunk=rng.choice([None, 3]),
        max_num_seqs=rng.randint(1, 4),
        preempt_every=rng.choice([0, 0, 3]),
        prefix_snapshots=rng.choice([1, 2, 9]),
        prefix_snapshot_interval=rng.choice([4, 8, 100]),
        zero_overhead_scheduling=rng.random() < 0.6,
        **tiers,
    )
    running = []
    for index in range(30):
        prompt = [*rng.choice(stems), *(rng.randint(6, 36) for _ in range(rng.randint(0, 6)))]
        count = rng.randint(1, 6)
        running.append(core.add(str(index), np.array(prompt), GREEDY, seed=0, max_tokens=count))
        if rng.random() < 0.1:
            core.abort(str(rng.randint(0, index)))
        for _ in range(rng.randint(0, 6)):
            core.step()
        core.scheduler.prefix.check()
    while core.num_unfinished:
        core.step()
    core.scheduler.assert_idle()
    hits = 0
    for generation in running:
        request = generation.request
        expected = naive_model(request.prompt.tolist(), GREEDY, request.max_tokens, 0)[0]
        assert generation.error is None
        assert generation.token_ids == expected[: len(generation.token_ids)]
        assert generation.finish_reason == "abort" or generation.token_ids == expected
        hits += request.num_cached_tokens
    assert hits > 0
    core.close()


def test_a_prefix_that_did_not_arrive_is_an_error_of_its_request_only(
    fake_model: Any, make_engine: Any, check: Any
) -> None:
    core = make_engine(fake_model, prefix_host_bytes=100_000, prefix_load_seconds=10.0)
    prompt = list(range(6, 17))
    check(complete(core, "a", prompt))
    settled(core)
    core.scheduler.prefix.clear()
    write, core.runner.blocks._write = core.runner.blocks._write, None
    broken = complete(core, "b", prompt)
    assert isinstance(broken.error, RequestFailed)
    assert isinstance(broken.error.__cause__, LostBlocks)
    core.runner.blocks._write = write
    check(complete(core, "c", prompt))
    check(complete(core, "d", prompt))
    core.scheduler.assert_idle()
    core.close()


def test_a_request_that_waits_can_be_aborted_and_others_run(fake_model: Any, make_engine: Any, check: Any) -> None:
    core = make_engine(fake_model, prefix_host_bytes=100_000, prefix_load_seconds=30.0)
    gate = threading.Event()
    (store,) = core.tiers.exchange.stores
    contains = store.contains
    store.contains = lambda key: gate.wait(30) and contains(key)
    core.add("waits", np.arange(6, 17), GREEDY, seed=0, max_tokens=2)
    check(complete_one(core, "short", [7, 8]))
    assert core.num_unfinished == 1
    assert core.abort("waits") is not None
    gate.set()
    check(complete(core, "after", list(range(6, 17))))
    core.scheduler.assert_idle()
    core.close()


def complete_one(core: Any, name: str, prompt: list[int]) -> Any:
    """Run until this request has ended, whatever else waits."""
    generation = core.add(name, np.array(prompt), GREEDY, seed=0, max_tokens=2)
    for _ in range(2000):
        if generation.finish_reason is not None:
            break
        core.step()
    return generation


def test_a_slow_tier_costs_no_more_than_the_limit(fake_model: Any, make_engine: Any, check: Any) -> None:
    core = make_engine(fake_model, prefix_host_bytes=100_000, prefix_load_seconds=0.02)
    gate = threading.Event()
    (store,) = core.tiers.exchange.stores
    store.contains = lambda key: gate.wait(30) and False
    generation = complete(core, "a", list(range(6, 17)))
    check(generation)
    assert core.tiers.exchange.stats.late == 1
    gate.set()
    core.close()


def test_an_unknown_store_is_refused(fake_model: Any, make_engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_stores: no installed plugin offers the KV store 'elsewhere'"):
        make_engine(fake_model, kv_stores="elsewhere")


# ---- on the tiny checkpoint -------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "batch_invariant": True, "max_model_len": 160, "max_num_seqs": 4}
STEM = [(11 * i) % 480 + 3 for i in range(70)]
PROMPTS = [STEM[:40], [*STEM[:50], 5, 6, 7], [*STEM, 9], [(7 * i * i) % 480 + 3 for i in range(33)], STEM[:40], STEM]
PARAMS = [
    SamplingParams(temperature=[0, 1, 0.8][i % 3], seed=i, max_tokens=6, ignore_eos=True, logprobs=2)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Callable[[int], LoadedModel]:
    made: dict[int, LoadedModel] = {}

    def load(page_size: int) -> LoadedModel:
        if page_size not in made:
            made[page_size] = load_model(tiny, load_settings(**OPTIONS, page_size=page_size))
        return made[page_size]

    return load


def engine(model: LoadedModel, *, num_pages: int | None = None, chunk: int | None = None, **settings: Any) -> LLM:
    given = load_settings(**{**OPTIONS, "prefix_load_seconds": 20.0, **settings})
    return LLM.from_loaded(model, given, num_pages=num_pages, max_prefill_chunk=chunk, poison_released=True)


def said(llm: LLM, index: int) -> tuple[Any, int]:
    """What one request says, with log-probabilities, and how many of its tokens were cached."""
    (output,) = llm.generate([PROMPTS[index]], [PARAMS[index]])
    assert output.error is None
    completion = output.outputs[0]
    bits = [{token: item.logprob.hex() for token, item in place.items()} for place in completion.logprobs]
    return (completion.token_ids, bits), output.num_cached_tokens


@pytest.fixture(scope="module")
def cold(loaded: Callable[[int], LoadedModel]) -> list[Any]:
    with engine(loaded(16), enable_prefix_caching=False) as llm:
        found = [said(llm, index) for index in range(len(PROMPTS))]
    assert all(cached == 0 for _, cached in found)
    return [bits for bits, _ in found]


@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (16, {}),
        (16, {"chunk": 7}),
        (16, {"zero_overhead_scheduling": False, "prefix_snapshot_interval": 16}),
        (16, {"num_pages": 10, "max_num_seqs": 1, "prefix_snapshots": 2}),
        (2, {"chunk": 5}),
        (32, {"max_num_batched_tokens": 24}),
    ],
)
def test_hit_or_miss_the_bits_are_the_same(
    loaded: Any, cold: list[Any], page_size: int, options: dict[str, Any]
) -> None:
    with engine(loaded(page_size), **options) as llm:
        cached = 0
        for _ in range(2):
            for index, bits in enumerate(cold):
                found, tokens = said(llm, index)
                assert found == bits
                cached += tokens
        assert cached >= 100
        scheduler = llm._core.scheduler
        scheduler.assert_idle()
        pages = scheduler.pages
        assert pages.num_free + pages.num_cached == pages.capacity


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_overhead_scheduling": False},
        {"use_nextn_decode": 0},
        {"use_nextn_decode": 0, "zero_overhead_scheduling": False, "max_num_seqs": 1},
    ],
)
def test_the_next_turn_resumes_behind_the_answer(loaded: Any, options: dict[str, Any]) -> None:
    """Also where a step writes rows past the page's end that may be taken back; the bits are those of a cold run."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=52, ignore_eos=True, logprobs=1)
    with engine(loaded(16), **options) as llm, engine(loaded(16), enable_prefix_caching=False) as fresh:
        answer = llm.generate([STEM[:40]], [params])[0].outputs[0]
        turn = [*STEM[:40], *answer.token_ids, 5, 6, 7]
        warm, cold = llm.generate([turn], [params])[0], fresh.generate([turn], [params])[0]
    assert (warm.num_cached_tokens, cold.num_cached_tokens) == (80, 0)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.outputs[0].logprobs == cold.outputs[0].logprobs


def test_a_ring_used_by_another_request_in_between(loaded: Any, cold: list[Any]) -> None:
    """H2: A, B, A in the only slot; the state comes from A's snapshot, not from what B left in the ring."""
    with engine(loaded(16), max_num_seqs=1) as llm:
        for index, cached in ((0, 0), (3, 0), (0, 32), (3, 32), (0, 32)):
            assert said(llm, index) == (cold[index], cached)


def test_short_prompts_hit_too(loaded: Any) -> None:
    """H3: the granularity is one page, whatever the compression ratios and the ring length."""
    with engine(loaded(2)) as llm:
        prompts = [STEM[:24]] * 2
        outputs = [llm.generate([prompt], [PARAMS[0]])[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == [0, 22]
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_after_eviction_everything_is_computed_again(loaded: Any, cold: list[Any]) -> None:
    with engine(loaded(16), num_pages=10, max_num_seqs=1) as llm:
        assert said(llm, 0) == (cold[0], 0)
        assert said(llm, 0) == (cold[0], 32)
        llm.generate([[(5 * i) % 480 + 3 for i in range(140)]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert said(llm, 0) == (cold[0], 0)
        assert llm._core.scheduler.prefix.index.evicted > 0


def test_from_host_memory(loaded: Any, cold: list[Any]) -> None:
    with engine(loaded(16), prefix_host_bytes=1 << 24) as llm:
        assert said(llm, 2) == (cold[2], 0)
        settled(llm._core)
        llm._core.scheduler.prefix.clear()
        assert said(llm, 2) == (cold[2], 64)
        stats = llm._core.tiers.exchange.stats
        assert (stats.loads, stats.loaded_pages, stats.late) == (2, 4, 0)
        assert said(llm, 2) == (cold[2], 64)
        assert stats.loads == 2, "now the device has it"
        llm._core.scheduler.assert_idle()


@pytest.fixture
def stored(loaded: Any, cold: list[Any], tmp_path: Path) -> Iterator[Path]:
    """A directory in which an engine has left its prefixes."""
    with engine(loaded(16), prefix_disk_dir=tmp_path) as llm:
        assert said(llm, 2) == (cold[2], 0)
    return tmp_path


def test_from_disk_after_a_restart(loaded: Any, tiny: Path, cold: list[Any], stored: Path) -> None:
    again = load_model(tiny, load_settings(**OPTIONS, page_size=16))
    with engine(again, prefix_disk_dir=stored) as llm, engine(loaded(16), prefix_disk_dir=stored) as beside:
        assert said(llm, 2) == (cold[2], 64)
        assert said(beside, 2) == (cold[2], 64), "two engines share the directory"
        assert said(beside, 5) == (cold[5], 64)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "snapshot gone"])
def test_damaged_files_are_misses(loaded: Any, cold: list[Any], stored: Path, damage: str) -> None:
    rng = random.Random(damage)
    for path in stored.glob("??/*"):
        content = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(content[: rng.randrange(1, len(content))])
        elif damage == "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        elif damage == "empty":
            path.write_bytes(b"")
        elif path.suffix == ".snapshot":
            path.unlink()
    with engine(loaded(16), prefix_disk_dir=stored) as llm:
        assert said(llm, 2) == (cold[2], 0)
    with engine(loaded(16), prefix_disk_dir=stored) as llm:
        assert said(llm, 2) == (cold[2], 64), "what was damaged has been written anew"


def test_other_numerics_are_a_miss(loaded: Any, cold: list[Any], stored: Path) -> None:
    other = dataclasses.replace(loaded(16), numerics_id="other numerics")
    with engine(other, prefix_disk_dir=stored) as llm:
        assert said(llm, 2) == (cold[2], 0)
    with engine(loaded(16), prefix_disk_dir=stored) as llm:
        assert said(llm, 2) == (cold[2], 64)


def test_another_checkpoint_is_a_miss(tmp_path: Path, cold: list[Any], stored: Path) -> None:
    path = make_checkpoint(tmp_path / "models" / "tiny", "tiny")
    with engine(load_model(path, load_settings(**OPTIONS, page_size=16)), prefix_disk_dir=stored) as llm:
        assert said(llm, 2)[1] == 0


def test_a_full_disk_stops_nothing(
    loaded: Any, cold: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with engine(loaded(16), prefix_disk_dir=tmp_path) as llm:
        assert said(llm, 2) == (cold[2], 0)
        settled(llm._core)
        assert said(llm, 2) == (cold[2], 64)
    assert [record.levelname for record in caplog.records if "is not written to any more" in record.message] == [
        "WARNING"
    ]


PLUGIN_STORES: list[MemoryStore] = []


def make_plugin_store(settings: Any) -> MemoryStore:
    """What the descriptor below names."""
    PLUGIN_STORES.append(MemoryStore(1 << 24))
    return PLUGIN_STORES[-1]


def test_a_store_of_a_plugin_is_used(loaded: Any, cold: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[KVStoreDescriptor] = Registry("KV store", KVStoreDescriptor)
    registry.begin(Origin("acme", __name__, "acme-store", "1.0"))
    registry.add(KVStoreDescriptor("acme", API_VERSION, f"{__name__}:make_plugin_store"))
    registry.end()
    monkeypatch.setattr(
        "deepinfer.plugins.host.default_host", lambda: SimpleNamespace(kv_stores=registry, observers=(), variables=dict)
    )
    with engine(loaded(16), kv_stores="acme") as llm:
        store = PLUGIN_STORES[-1]
        assert said(llm, 2) == (cold[2], 0)
        settled(llm._core)
        assert len(store) == 5
        llm._core.scheduler.prefix.clear()
        assert said(llm, 2) == (cold[2], 64)

"""Every array group of ops.npz against the op references: quantisers exactly, the rest 1e-6 relative to the array."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from support.golden import missing_golden, ops_file
from torch import Tensor

from deepinfer.checkpoint.formats import dequantise_fp4, dequantise_fp8
from deepinfer.models.deepseek_v41.engram_map import engram_multipliers
from deepinfer.models.deepseek_v41.engram_primes import engram_primes
from deepinfer.ops.attention import attend
from deepinfer.ops.compress import group_entries, pool_groups
from deepinfer.ops.elementary import softplus
from deepinfer.ops.engram import EngramHash, engram_gate, engram_hash
from deepinfer.ops.handles import Mixes
from deepinfer.ops.hyper_connection import hyper_connection_collapse, hyper_connection_expand, mixes_from_logits
from deepinfer.ops.indexer import candidate_blocks, restrict_to_blocks, select_topk
from deepinfer.ops.moe import gated_activation, route
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import (
    FP4_BLOCK16,
    FP4_BLOCK32,
    FP8_BLOCK32,
    RowFormat,
    fp4_block16_quantise,
    fp4_block32_quantise,
    fp8_block32_quantise,
    pack_rows,
    unpack_rows,
)
from deepinfer.ops.rope import plain_frequencies, rope, rope_angles, yarn_frequencies


@functools.cache
def _arrays() -> dict[str, np.ndarray]:
    if not ops_file().is_file():
        missing_golden()
    with np.load(ops_file()) as archive:
        return {name: archive[name] for name in archive.files}


def _get(name: str) -> Tensor:
    return torch.from_numpy(np.array(_arrays()[name]))


def _near(ours: Tensor, name: str, rtol: float = 1e-6) -> None:
    recorded = _get(name)
    assert ours.shape == recorded.shape, name
    scale = float(recorded.abs().max())
    assert float((ours.double() - recorded.double()).abs().max()) <= rtol * scale, name


def _same(ours: Tensor, name: str) -> None:
    np.testing.assert_array_equal(ours.numpy(), _arrays()[name], err_msg=name)


@pytest.mark.parametrize(
    ("group", "quantise", "scale"),
    [
        ("fp8_b32", fp8_block32_quantise, "scale_e8m0"),
        ("fp4_b32", fp4_block32_quantise, "scale_e8m0"),
        ("fp4_b16", fp4_block16_quantise, "scale_e4m3"),
    ],
)
def test_quantisers(group: str, quantise, scale: str) -> None:
    codes, scales = quantise(_get(f"{group}.x"))
    _same(codes.view(torch.uint8), f"{group}.codes")
    _same(scales, f"{group}.{scale}")


@pytest.mark.parametrize(
    ("group", "name"), [("fp8_b32", FP8_BLOCK32), ("fp4_b32", FP4_BLOCK32), ("fp4_b16", FP4_BLOCK16)]
)
def test_packed_rows_mean_the_dequantised_values(group: str, name: str) -> None:
    x = _get(f"{group}.x")
    row_format = RowFormat(name, x.shape[1])
    _same(unpack_rows(pack_rows(x, row_format), row_format, torch.float32), f"{group}.dequant")


def test_stored_weights() -> None:
    fp8 = _get("weight_fp8.bytes").view(torch.float8_e4m3fn)
    _same(dequantise_fp8(fp8, _get("weight_fp8.scale"), "w").float(), "weight_fp8.value")
    _same(dequantise_fp4(_get("weight_fp4.bytes"), _get("weight_fp4.scale"), "w").float(), "weight_fp4.value")


def _mixes(iterations: int, group: str = "sinkhorn", dtype: torch.dtype = torch.float32) -> Mixes:
    base, scale = _get("sinkhorn.base"), _get("sinkhorn.scale")
    return mixes_from_logits(_get(f"{group}.mixes").to(dtype), base, scale, iterations, 1e-6)


def test_sinkhorn() -> None:
    mixes = _mixes(20)
    for part in ("pre", "post", "comb"):
        _near(getattr(mixes, part), f"sinkhorn.{part}")
    _near(_mixes(20, dtype=torch.float64).comb, "sinkhorn.comb_f64", 1e-9)


@pytest.mark.parametrize("iterations", [1, 2, 19, 20])
def test_sinkhorn_iterations(iterations: int) -> None:
    _near(_mixes(iterations, "sinkhorn_hard").comb, f"sinkhorn_hard.comb_{iterations}")


def test_hyper_connection() -> None:
    streams, mixes = _get("mhc.X"), _mixes(20)
    flat = streams.flatten(1)
    logits = (flat @ _get("mhc.fn").T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    _near(logits, "mhc.mixes")
    _near(hyper_connection_collapse(streams, mixes.pre), "mhc.collapsed")
    _near(hyper_connection_expand(streams, _get("mhc.branch"), mixes), "mhc.expanded")


@pytest.mark.parametrize("suffix", ["", "_vl"])
def test_router(suffix: str) -> None:
    logits = _get("gate.x") @ _get("gate.weight").T
    image = _get("gate.image_mask") if suffix else torch.zeros(logits.shape[0], dtype=torch.bool)
    ids, weights = route(logits, _get("gate.bias"), _get("gate.bias_vl"), image, 4, 1.5)
    _same(ids.to(torch.int32), f"gate.ids{suffix}")
    _near(weights, f"gate.weights{suffix}")


def test_router_scores() -> None:
    _near(torch.sqrt(softplus(_get("gate.x") @ _get("gate.weight").T)), "gate.scores")
    _near(torch.sqrt(softplus(_get("gate.sqrtsoftplus_in"))), "gate.sqrtsoftplus_out")


@pytest.mark.parametrize("kind", ["local", "yarn"])
def test_rope(kind: str) -> None:
    frequencies = (
        plain_frequencies(64, 10000.0) if kind == "local" else yarn_frequencies(64, 160000.0, 16.0, 32.0, 1.0, 65536)
    )
    np.testing.assert_allclose(frequencies.numpy(), _arrays()[f"rope.{kind}.inv_freq"], rtol=2e-7)
    cos, sin = rope_angles(_get("rope.positions"), _get(f"rope.{kind}.inv_freq"))
    # One ulp apart in places: the release's table is built with polar.
    np.testing.assert_allclose(cos.numpy(), _arrays()[f"rope.{kind}.cos"], rtol=0, atol=6.1e-8)
    np.testing.assert_allclose(sin.numpy(), _arrays()[f"rope.{kind}.sin"], rtol=0, atol=6.1e-8)
    x = _get(f"rope.{kind}.x")
    _near(rope(x, cos, sin), f"rope.{kind}.rotated")
    _near(rope(x, cos, sin, inverse=True), f"rope.{kind}.inverse")


def test_attention() -> None:
    indices = _get("attn.indices").long()
    keys = _get("attn.kv")[indices.clamp(min=0)]
    out = attend(_get("attn.q"), keys, indices >= 0, _get("attn.sink"), 32**-0.5)
    _near(out, "attn.out")
    assert bool((out[0] == 0).all())
    assert bool((indices[0] < 0).all())


def test_compression() -> None:
    latent, gate = _get("compress.kv"), _get("compress.gate")
    rows = latent.shape[0]
    positions, zeros = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    state = torch.full((2, 7, 2, latent.shape[1]), float("nan"))
    pooled = pool_groups(latent, gate, state, zeros + 1, positions, zeros, zeros, 2)
    done = group_entries(positions, 2) >= 0
    _near(pooled[done], "compress.pooled")
    _near(rms_norm(pooled[done], _get("compress.norm_weight"), 1e-20), "compress.latent")
    _same(group_entries(positions, 2)[done] * 2, "compress.positions")


def _scores() -> Tensor:
    products = torch.einsum("thd,kd->thk", _get("index.q"), _get("index.k")).relu()
    return (products * _get("index.w")[..., None]).sum(1) * (32 * 8) ** -0.5


def test_index_scores() -> None:
    _near(_scores(), "index.scores")


@pytest.mark.parametrize("block", [4, 8, 16])
def test_candidates(block: int) -> None:
    visible = _get("index.visible").long()
    scores = _get("index.scores")
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
    kept = candidate_blocks(scores, visible, block, int(_arrays()[f"cand{block}.topk_blocks"]))
    _same_blocks(kept, f"cand{block}.blocks")
    best = select_topk(restrict_to_blocks(scores, kept, block), 6)
    _same(best.to(torch.int32), f"cand{block}.top6")


def test_candidate_ties() -> None:
    visible, block = _get("cand_tie.visible").long(), int(_arrays()["cand_tie.block"])
    scores = _get("cand_tie.scores")
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
    kept = candidate_blocks(scores, visible, block, int(_arrays()["cand_tie.topk_blocks"]))
    _same_blocks(kept, "cand_tie.blocks")


def _same_blocks(kept: Tensor, name: str) -> None:
    recorded = _arrays()[name]
    ours = np.stack([np.isin(np.arange(recorded.shape[1]), row) for row in kept.numpy()])
    np.testing.assert_array_equal(ours, recorded, err_msg=name)


def test_ngram_constants() -> None:
    primes = np.array(engram_primes(16_000_000, 4, 8, 2))
    np.testing.assert_array_equal(primes, _arrays()["engram.primes"])
    flat = primes.reshape(2, -1)
    np.testing.assert_array_equal(np.cumsum(flat, 1) - flat, _arrays()["engram.offsets"])
    multipliers = np.stack([engram_multipliers(layer, 99092, 4) for layer in (1, 14)])
    np.testing.assert_array_equal(multipliers, _arrays()["engram.multipliers"])


@pytest.mark.parametrize("name", ["rows", "rows_dead"])
def test_ngram_rows(name: str) -> None:
    tokens = _get("engram.compressed_ids").long()
    dead = _get("engram.dead") if name == "rows_dead" else torch.zeros(tokens.shape[0], dtype=torch.bool)
    known = torch.where(dead, -1, tokens)
    history = torch.stack(
        [torch.cat((torch.full((back,), -1), known[: known.shape[0] - back])) for back in (1, 2, 3)], 1
    )
    for index in range(2):
        constants = EngramHash(
            token_map=torch.arange(int(tokens.max()) + 1),
            multipliers=_get("engram.multipliers")[index],
            primes=_get("engram.primes")[index].flatten().long(),
            offsets=_get("engram.offsets")[index].long(),
            pad=int(_arrays()["engram.pad"]),
        )
        ours = engram_hash(tokens, history, ~dead, constants)
        np.testing.assert_array_equal(ours.numpy(), _arrays()[f"engram.{name}"][:, index])


def test_ngram_gate() -> None:
    key, value = _get("engram_gate.key"), _get("engram_gate.value")
    key_value = torch.cat((key.flatten(1), value), dim=1)
    live = torch.ones(key.shape[0], dtype=torch.bool)
    gate = _get("engram_gate.q_weight") * _get("engram_gate.k_weight")
    hidden = _get("engram_gate.hidden")
    _near(engram_gate(hidden, key_value, gate, live, 1e-20), "engram_gate.out")
    # The gate itself, as what it adds of a value of ones to streams that it does not change.
    strength = engram_gate(hidden.double(), key_value.double(), gate, live, 1e-20) - hidden.double()
    ours = (strength * value[:, None].double()).sum(-1) / value[:, None].double().square().sum(-1)
    _near(ours, "engram_gate.gate")
    assert float(ours[7, 0]) == pytest.approx(float(torch.sigmoid(torch.tensor(1e-3))), abs=1e-6)


def test_ngram_gate_of_a_dead_row_is_zero() -> None:
    key, value = _get("engram_gate.key"), _get("engram_gate.value")
    hidden = _get("engram_gate.hidden")
    dead = torch.zeros(key.shape[0], dtype=torch.bool)
    key_value = torch.cat((key.flatten(1), value), dim=1)
    assert torch.equal(engram_gate(hidden, key_value, torch.ones(4, hidden.shape[-1]), dead, 1e-20), hidden)


def test_gated_activation() -> None:
    gate_up = torch.cat((_get("swiglu.gate"), _get("swiglu.up")), dim=1)
    _near(gated_activation(gate_up, float(_arrays()["swiglu.limit"]), None), "swiglu.out")


def test_norm() -> None:
    _near(rms_norm(_get("rmsnorm.x"), _get("rmsnorm.weight"), 1e-20), "rmsnorm.out")


def test_every_group_of_the_file_is_compared() -> None:
    groups = {name.split(".")[0] for name in _arrays()}
    compared = {"fp8_b32", "fp4_b32", "fp4_b16", "weight_fp8", "weight_fp4", "sinkhorn", "sinkhorn_hard", "mhc", "gate"}
    compared |= {"rope", "attn", "compress", "index", "cand4", "cand8", "cand16", "cand_tie", "engram", "engram_gate"}
    assert groups == compared | {"swiglu", "rmsnorm"}

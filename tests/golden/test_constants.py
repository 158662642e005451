"""Constants that follow from a checkpoint's files: n-gram hashing, rope tables, tokenizer, dequantised weights."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
import safetensors.torch
import torch
from support.golden import GoldenSet
from support.weights import check_unpack

from deepinfer.checkpoint import Checkpoint
from deepinfer.checkpoint.formats import dequantise_fp4, dequantise_fp8
from deepinfer.cpu.backend import create_backend
from deepinfer.models.deepseek_v41.engram_map import EngramMap
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.ops.rope import plain_frequencies, yarn_frequencies


def _model(golden: GoldenSet) -> DeepseekV41:
    return golden.model(torch.float32, "off")


@pytest.mark.parametrize("name", ["token_map", "primes", "offsets", "multipliers"])
def test_ngram_constants(golden: GoldenSet, name: str) -> None:
    ours = EngramMap.build(_model(golden).config, golden.path)
    np.testing.assert_array_equal(getattr(ours, name), golden.arrays[f"engram.{name}"])


def test_ngram_constants_reach_the_graph(golden: GoldenSet) -> None:
    tables = [layer.engram_hash for layer in _model(golden).weights.layers if layer.engram_hash is not None]
    assert len(tables) == len(golden.arrays["engram.multipliers"])
    for index, table in enumerate(tables):
        np.testing.assert_array_equal(table.multipliers.numpy(), golden.arrays["engram.multipliers"][index])
        np.testing.assert_array_equal(table.primes.numpy(), golden.arrays["engram.primes"][index].ravel())
        np.testing.assert_array_equal(table.offsets.numpy(), golden.arrays["engram.offsets"][index])


def test_rope_frequencies(golden: GoldenSet) -> None:
    config = _model(golden).config
    scaling = config.rope_scaling
    assert scaling is not None
    plain = plain_frequencies(config.qk_rope_head_dim, config.rope_theta)
    yarn = yarn_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        scaling.factor,
        scaling.beta_fast,
        scaling.beta_slow,
        scaling.original_max_position_embeddings,
    )
    np.testing.assert_allclose(plain.numpy(), golden.arrays["rope.local.inv_freq"], rtol=2e-7)
    np.testing.assert_allclose(yarn.numpy(), golden.arrays["rope.yarn.inv_freq"], rtol=2e-7)


def test_tokenizer_cases(golden: GoldenSet) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    codec = tokenizers.Tokenizer.from_file(str(golden.path / "tokenizer.json"))
    assert golden.manifest["tokenizer_cases"]
    for case in golden.manifest["tokenizer_cases"]:
        assert codec.encode(case["text"], add_special_tokens=False).ids == case["ids"]
        assert codec.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_dequantised_weights_equal_the_float32_twin(golden: GoldenSet) -> None:
    twin = safetensors.torch.load(lzma.decompress((golden.path / "model_fp32.safetensors.xz").read_bytes()))
    backend = create_backend()
    model = _model(golden)
    checkpoint = Checkpoint.open(golden.path)
    seen = set()
    for placement in model.weights.placements:
        names = [part.name for part in placement.group.parts]
        raw = checkpoint.read(names)
        handle = backend.load(placement, raw)
        values = backend.unpack(placement, handle)
        for name in names:
            if name.endswith(".scale"):
                continue
            seen.add(name)
            torch.testing.assert_close(_value(name, values, placement.group.kind), twin[name], rtol=0, atol=0)
    assert {name for name in twin if ".experts." in name or name.endswith(("wq_b.weight", "wo_b.weight"))} <= seen


def _value(name: str, raw: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    scale = raw.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return raw[name].float()
    if kind == "fp8_rows":
        return raw[name].float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return (dequantise_fp4 if kind == "fp4_experts" else dequantise_fp8)(raw[name], scale, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_handle_gives_the_stored_bytes_back(golden: GoldenSet, dtype: torch.dtype) -> None:
    check_unpack(create_backend(), golden.path, dtype)

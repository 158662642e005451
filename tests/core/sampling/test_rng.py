"""Known answers, an independent twin in NumPy, accuracy of the logarithms, and the tails of the noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.sampling import rng

U32 = st.integers(0, 2**32 - 1)


def twin_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 with Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def twin_log(x: NDArray[np.float32], correction: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The same fixed sequence of float32 operations in NumPy."""
    one, two, f32 = np.float32(1), np.float32(2), np.float32
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - one
    s = f / (f + two)
    z = s * s
    series = z * (f32(2 / 3) + z * (f32(2 / 5) + z * (f32(2 / 7) + z * f32(2 / 9))))
    k = exponent.astype(np.float32)
    low = k * f32(math.log(2) - 45426 / 65536)
    if correction is not None:
        low = low + correction
    return k * f32(45426 / 65536) + (f - (s * (f - series) - low))


def twin_exponential(words: NDArray[np.int64]) -> NDArray[np.float32]:
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    w = np.float32(1) - u
    with np.errstate(divide="ignore", invalid="ignore"):
        result = -twin_log(w, (-u - (w - np.float32(1))) / w)
    return np.where(w == 0, np.float32(np.inf), result)


def tensors(*values: int) -> tuple[Any, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert tuple(int(word) for word in rng.philox4x32(tensors(*counter), tensors(*key))) == words
    assert twin_philox(counter, key) == words


@settings(max_examples=100, deadline=None)
@given(counter=st.tuples(U32, U32, U32, U32), key=st.tuples(U32, U32))
def test_philox_equals_its_twin(counter: Any, key: Any) -> None:
    assert tuple(int(word) for word in rng.philox4x32(tensors(*counter), tensors(*key))) == twin_philox(counter, key)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    completion=st.integers(0, 100),
    vocab=st.integers(1, 40),
    token=st.integers(0, 39),
)
def test_word_of_a_token(seed: int, position: int, completion: int, vocab: int, token: int) -> None:
    token %= vocab
    signed = seed - 2**64 if seed >= 2**63 else seed
    words = rng.random_words(*tensors(signed, position, completion), vocab_size=vocab)
    expected = twin_philox((token >> 2, position, 256 * completion, 0), (seed % 2**32, seed >> 32))[token & 3]
    assert words.shape == (1, vocab)
    assert int(words[0, token]) == expected


def test_rows_are_independent_of_their_call() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (7,), generator=generator)
    positions, completions = torch.arange(7) * 1000, torch.arange(7) % 2
    together = rng.noise(seeds, positions, completions, 1001)
    for row in range(7):
        one = slice(row, row + 1)
        alone = rng.noise(seeds[one], positions[one], completions[one], 1001)
        assert torch.equal(together[one], alone)
        # A longer vocabulary only adds ids.
        assert torch.equal(rng.noise(seeds[one], positions[one], completions[one], 1500)[:, :1001], alone)


def some_words() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = (2 ** (32 * torch.rand(300_000, generator=generator, dtype=torch.float64))).long() - 1
    edges = torch.arange(50_000)
    return torch.cat([torch.randint(0, 2**32, (300_000,), generator=generator), spread, edges, 2**32 - 1 - edges])


def ulps(result: torch.Tensor, exact: torch.Tensor) -> float:
    spacing = np.spacing(np.abs(exact.numpy().astype(np.float32))).astype(np.float64)
    return float(np.max(np.abs(result.double().numpy() - exact.numpy()) / spacing))


def test_logarithms_are_within_two_ulp_and_bits_equal_the_twin() -> None:
    words = some_words()
    u = (words.float() + 0.5) * 2.0**-32
    noise = rng.exponential(words)
    finite = u < 1
    assert ulps(noise[finite], -torch.log1p(-u[finite].double())) <= 2
    assert np.array_equal(noise.numpy(), twin_exponential(words.numpy()))
    logs = rng.log(noise)
    assert ulps(logs[finite], torch.log(noise[finite].double())) <= 2
    assert np.array_equal(logs[finite].numpy(), twin_log(noise[finite].numpy()))
    near_one = torch.linspace(0.5, 2, 300_001)
    near_one = near_one[near_one != 1]
    assert ulps(rng.log(near_one), torch.log(near_one.double())) <= 2


def test_ends_of_the_noise() -> None:
    words = torch.tensor([0, 1, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    noise = rng.exponential(words)
    assert noise[0] == 2.0**-33
    assert noise[1] == 1.5 * 2.0**-32
    assert torch.isfinite(noise[2])
    assert torch.isinf(noise[3:]).all()
    assert torch.isinf(rng.log(noise)[3:]).all()
    assert (rng.exponential(some_words()) > 0).all()


def test_noise_is_exponential_in_body_and_tails() -> None:
    """P(E < t) = 1 - exp(-t) at the quantiles that decide draws from a vocabulary of 129,280."""
    count = 129_280
    seeds = torch.arange(16)
    words = rng.random_words(seeds, torch.zeros_like(seeds), torch.zeros_like(seeds), count)
    noise = rng.exponential(words).flatten().double()
    total = noise.numel()
    for probability in (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1 / count):
        low = int((noise < -math.log1p(-probability)).sum())
        high = int((noise > -math.log(probability)).sum())
        deviation = 5 * math.sqrt(total * probability)
        assert abs(low - total * probability) < deviation
        assert abs(high - total * probability) < deviation
    # The smallest noise of a row is exponential with rate V: what wins among equal logits is uniform.
    winners = rng.noise(seeds, torch.zeros_like(seeds), torch.zeros_like(seeds), count).argmin(-1)
    assert len(set(winners.tolist())) == 16


def test_the_winner_of_a_flat_vocabulary_is_found_by_every_id() -> None:
    """With a float32 uniform the winning noise would tie at few values; here the least words stay distinct."""
    seeds = torch.arange(12)
    noise = rng.noise(seeds, seeds * 0, seeds * 0, 129_280)
    best = noise.topk(2, largest=False, dim=-1).values
    assert (best[:, 0] < best[:, 1]).all()

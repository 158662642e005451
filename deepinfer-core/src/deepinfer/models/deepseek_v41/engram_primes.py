"""Bucket primes of the Engram tables (spec/model 3.9): plain integers, no array library."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["engram_primes", "engram_row_counts"]

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(number: int) -> bool:
    """Miller-Rabin with the twelve witnesses that decide every number below 3.3e24."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def engram_primes(
    vocab_size: int, max_ngram_size: int, n_heads: int, num_layers: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes `[layer][n - 2][head]`: for every n the search restarts at `vocab_size`, and no prime is used twice."""
    seen: set[int] = set()
    layers = []
    for _ in range(num_layers):
        sizes = []
        for _ in range(2, max_ngram_size + 1):
            current = vocab_size - 1
            heads = []
            for _ in range(n_heads):
                current += 1
                while current in seen or not _is_prime(current):
                    current += 1
                seen.add(current)
                heads.append(current)
            sizes.append(tuple(heads))
        layers.append(tuple(sizes))
    return tuple(layers)


def engram_row_counts(primes: Sequence[Sequence[Sequence[int]]]) -> tuple[int, ...]:
    """Rows of each layer's table: the sum of its primes, nothing is padded."""
    return tuple(sum(sum(heads) for heads in sizes) for sizes in primes)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.errors import GrammarError
from deepinfer.grammar import MaskFiller, MaskRequest, Vocabulary

EOS = 1
Compile = Callable[..., Any]
Encode = Callable[[str], list[int]]


def _scene(compile_grammar: Compile, encode: Encode, vocabulary: Vocabulary) -> list[tuple[Any, list[int]]]:
    """Matchers in every state, with drafts that pass, fail, are unknown, end the text or complete a marker."""
    digits, text = compile_grammar(regex="[0-9]{1,3}"), compile_grammar(json_object=True)
    marked = compile_grammar(regex="ab", trigger=[7])
    forced = compile_grammar(regex="a", trigger=[7, 8], bound_token_id=7)
    blocked = compile_grammar(regex="abc").matcher(
        stop_token_ids=[token for token, piece in enumerate(vocabulary.tokens) if piece.startswith(b"c")]
    )
    stuck = blocked.fork()
    stuck.commit(encode("ab"))
    ended, free = digits.matcher(), digits.matcher(free_after_end=True)
    for matcher in (ended, free):
        matcher.commit([*encode("1"), EOS])
    return [
        (digits.matcher(), encode("12")),
        (digits.matcher(), []),
        (digits.matcher(), [*encode("1"), -1, *encode("3")]),
        (digits.matcher(), encode("1234")),
        (text.matcher(), encode('{"a')),
        (marked.matcher(), [5, 7, *encode("ab")]),
        (marked.matcher(), [5, 6]),
        (forced.matcher(), [7, 8, *encode("a"), EOS]),
        (blocked, encode("ab")),
        (stuck, encode("d")),
        (ended, [EOS, 5]),
        (free, [5, 6]),
        (digits.matcher(), [-1, -1]),
    ]


@pytest.mark.parametrize("batch_from", [1, 4, 1000])
def test_batch_is_the_same_as_one_by_one(
    batch_from: int, compile_grammar: Compile, encode: Encode, vocabulary: Vocabulary
) -> None:
    scene = _scene(compile_grammar, encode, vocabulary)
    rows = sum(len(drafts) + 1 for _, drafts in scene) + 2
    mask = torch.full((rows, vocabulary.words), 0x33333333, dtype=torch.int32)
    requests, first = [], 1
    for matcher, drafts in scene:
        requests.append(MaskRequest(matcher, first, drafts))
        first += len(drafts) + 1
    lengths = [matcher.length for matcher, _ in scene]
    report = MaskFiller(vocabulary, mask, threads=2, batch_from=batch_from).fill(requests)
    assert lengths == [matcher.length for matcher, _ in scene]
    assert (mask[0] == 0x33333333).all()
    assert (mask[-1] == 0x33333333).all()
    assert not report.constrained[[0, -1]].any()
    for request, reachable, error in zip(requests, report.reachable, report.errors, strict=True):
        expected = np.zeros((len(request.drafts) + 1, vocabulary.words), np.int32)
        rows_here = slice(request.first_row, request.first_row + len(expected))
        if error is None:
            assert request.matcher.fill_masks_for(request.drafts, expected) == reachable
        else:
            with pytest.raises(GrammarError, match=str(error)):
                request.matcher.fill_masks_for(request.drafts, expected)
        assert (mask[rows_here].numpy() == expected).all()
        free = (expected == -1).all(axis=1)
        assert (report.constrained[rows_here] == ~free).all()
    assert sum(error is not None for error in report.errors) == 1


def test_failure_of_the_native_batch_is_found_one_by_one(
    compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode
) -> None:
    good, bad = compile_grammar(regex="ab").matcher(), compile_grammar(regex="cd").matcher()

    bad._native = object()  # as a matcher of another process would be
    mask = np.full((4, vocabulary.words), -1, np.int32)
    requests = [MaskRequest(bad, 0, [5]), MaskRequest(good, 2, encode("a"))]
    report = MaskFiller(vocabulary, mask, batch_from=1).fill(requests)
    assert "has no attribute 'fill_next_token_bitmask'" in str(report.errors[0])
    assert report.errors[1] is None
    assert not mask[:2].any()
    assert report.constrained.all()
    assert report.reachable == [0, 2]


def test_nothing_to_fill(tiny_vocabulary: Vocabulary) -> None:
    filler = MaskFiller(tiny_vocabulary, np.zeros((2, tiny_vocabulary.words), np.int32))
    report = filler.fill([])
    assert not report.constrained.any()
    assert report.reachable == report.errors == []


def test_mask_of_the_wrong_shape(tiny_vocabulary: Vocabulary) -> None:
    for wrong in (np.zeros((2, 15), np.int32), np.zeros((2, 16), np.int64), np.zeros(16, np.int32)):
        with pytest.raises(ValueError, match=r"expected int32 \[rows, 16\]"):
            MaskFiller(tiny_vocabulary, wrong)

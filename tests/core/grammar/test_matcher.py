from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer.grammar import Vocabulary
from deepinfer.sampling.structured import StructuredOutput

EOS = 1
Compile = Callable[..., Any]
Allowed = Callable[[Any], list[int]]
Encode = Callable[[str], list[int]]

GRAMMARS = [
    {"regex": r"[a-c]{2,4}(x|yz)*"},
    {"choices": ["no", "not at all", "yes", ""]},
    {"json_object": True},
    {"ebnf": 'root ::= "(" root ")" | [a-z]+'},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 1}},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: next(iter(g)))
def test_mask_is_what_accept_accepts(
    grammar: dict[str, Any], compile_grammar: Compile, allowed: Allowed, vocabulary: Vocabulary
) -> None:
    matcher = compile_grammar(**grammar).matcher()
    generator = np.random.default_rng(5)
    for _ in range(12):
        mask = allowed(matcher)
        accepted = [token for token in range(vocabulary.size) if _try(matcher, token)]
        assert mask == accepted
        assert matcher.length <= 12
        choices = [token for token in mask if token != EOS]
        if not choices:
            break
        assert matcher.accept(int(generator.choice(choices)))


def _try(matcher: Any, token: int) -> bool:
    accepted = matcher.accept(token)
    matcher.rollback(int(accepted))
    return accepted


def test_end_of_text(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    matcher = compile_grammar(regex="ab?").matcher()
    assert not matcher.accept(EOS)
    matcher.commit(encode("a"))
    assert EOS in allowed(matcher)
    matcher.commit(encode("b"))
    assert allowed(matcher) == [EOS]
    assert not matcher.is_terminated
    assert matcher.accept(EOS)
    assert matcher.is_terminated
    assert not matcher.is_constrained
    assert allowed(matcher) == [EOS]
    assert not matcher.accept(encode("a")[0])
    assert matcher.accept(EOS)
    matcher.rollback(2)
    assert not matcher.is_terminated
    assert allowed(matcher) == [EOS]


def test_text_goes_on_freely_where_eos_is_ignored(
    compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode
) -> None:
    matcher = compile_grammar(regex="a").matcher(free_after_end=True)
    matcher.commit([*encode("a"), EOS])
    row = np.zeros(vocabulary.words, np.int32)
    assert not matcher.fill_mask(row)
    assert (row == -1).all()
    assert all(matcher.accept(token) for token in (5, EOS, 300, 0))
    matcher.rollback(4)
    assert matcher.is_terminated
    matcher.rollback(1)
    assert matcher.fill_mask(row)


def test_own_stop_ids_end_the_text(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    (newline,), (a,) = encode("\n"), encode("a")
    matcher = compile_grammar(regex="a\n?").matcher(stop_token_ids=[2, newline])
    assert allowed(matcher)[0] not in (EOS, 2)
    assert newline not in allowed(matcher)
    matcher.commit([a])
    assert {EOS, 2, newline} <= set(allowed(matcher))
    assert matcher.accept(newline)
    assert matcher.is_terminated
    assert allowed(matcher) == sorted((EOS, 2, newline))


def test_stop_id_that_the_text_needs_fails_closed(
    compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode
) -> None:
    by_text = {text: token for token, text in enumerate(vocabulary.tokens) if text}
    blockers = [token for text, token in by_text.items() if b"}".startswith(text)]
    matcher = compile_grammar(regex=r"\}x").matcher(stop_token_ids=blockers)
    row = np.full(vocabulary.words, -1, np.int32)
    with pytest.raises(GrammarError, match="structured_output.regex: no token can follow after 0 tokens"):
        matcher.fill_mask(row)
    assert not row.any()


@pytest.mark.parametrize("token", [-1, -5, 512, 2**31, 2**40])
def test_ids_outside_the_vocabulary_are_refused(compile_grammar: Compile, token: int) -> None:
    for grammar in ({"regex": ".*"}, {"regex": "a", "trigger": [7]}, {"regex": "a", "trigger": "xy"}):
        matcher = compile_grammar(**grammar).matcher(free_after_end=True)
        assert not matcher.accept(token)
        assert matcher.length == 0
    with pytest.raises(InvalidRequest, match=f"stop_token_ids: {token} is not an id"):
        compile_grammar(regex="a").matcher(stop_token_ids=[token])


def test_special_tokens_are_no_text(compile_grammar: Compile, vocabulary: Vocabulary, allowed: Allowed) -> None:
    matcher = compile_grammar(regex=r"(.|\n)*").matcher()
    special = {token for token, text in enumerate(vocabulary.tokens) if not text}
    assert special & set(allowed(matcher)) == {EOS}
    assert not any(matcher.accept(token) for token in special - {EOS})


def test_commit_names_the_token(compile_grammar: Compile, encode: Encode) -> None:
    matcher = compile_grammar(regex="ab").matcher()
    message = f"structured_output.regex: token {encode('c')[0]} after 1 tokens is not what the grammar allows"
    with pytest.raises(GrammarError, match=message):
        matcher.commit(encode("ac"))
    assert matcher.length == 1
    matcher.commit(encode("b"))


def test_rollback_is_exact(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    grammar = compile_grammar(json_object=True)
    tokens = [*encode('{"a": [1, {"b": "é"}], "c": null}'), EOS]
    masks, matcher = [], grammar.matcher()
    for token in tokens:
        masks.append(allowed(matcher))
        matcher.commit([token])
    for count in (1, 2, 5, len(tokens)):
        matcher.rollback(count)
        assert allowed(matcher) == masks[len(tokens) - count]
        matcher.commit(tokens[len(tokens) - count :])
    for length in reversed(range(len(tokens))):
        matcher.rollback(1)
        assert allowed(matcher) == masks[length]
    assert matcher.length == 0
    with pytest.raises(ValueError, match="cannot forget 1 of 0 accepted tokens"):
        matcher.rollback(1)
    with pytest.raises(ValueError, match="cannot forget -1"):
        matcher.rollback(-1)


def test_fork_is_independent(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    matcher = compile_grammar(regex="a(b|c)d?", trigger="#").matcher()
    matcher.commit(encode("#a"))
    twin = matcher.fork()
    before = allowed(matcher)
    twin.commit(encode("bd"))
    assert allowed(matcher) == before
    matcher.commit([*encode("c"), EOS])
    assert matcher.is_terminated
    assert not twin.is_terminated
    assert allowed(twin) == [EOS]
    twin.rollback(4)
    assert twin.length == 0
    assert matcher.length == 4


def test_drafts_are_cut_at_the_first_that_may_not_come(
    compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode, allowed: Allowed
) -> None:
    matcher = compile_grammar(regex="abcd").matcher()
    rows = np.full((5, vocabulary.words), 0x0F0F0F0F, np.int32)
    assert matcher.fill_masks_for(encode("abcd"), rows) == 5
    expected = [rows[index].copy() for index in range(5)]
    assert matcher.length == 0
    for bad in (encode("x")[0], -1, 2**33, EOS):
        drafts = [*encode("ab"), bad, *encode("d")]
        assert matcher.fill_masks_for(drafts, rows) == 3
        assert (rows[:3] == np.stack(expected[:3])).all()
        assert (rows[3:] == expected[2]).all()
    assert matcher.fill_masks_for([-1] * 4, rows) == 1
    assert (rows == expected[0]).all()
    assert matcher.fill_masks_for([], rows[:1]) == 1


def test_drafts_past_the_end(compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode, bits_of: Any) -> None:
    matcher = compile_grammar(regex="a").matcher()
    rows = np.zeros((4, vocabulary.words), np.int32)
    assert matcher.fill_masks_for([*encode("a"), EOS, EOS], rows) == 4
    assert [bits_of(row) for row in rows[1:]] == [[EOS], [EOS], [EOS]]
    assert matcher.fill_masks_for([*encode("a"), EOS, 300], rows) == 3
    assert not matcher.is_terminated


def test_a_dead_end_behind_drafts_ends_the_block(
    compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode, bits_of: Any
) -> None:
    matcher = compile_grammar(regex="abc").matcher(stop_token_ids=_starting_with(vocabulary, b"c"))
    rows = np.full((3, vocabulary.words), -1, np.int32)
    assert matcher.fill_masks_for(encode("ab"), rows) == 2
    assert (rows[2] == rows[1]).all()
    assert encode("b")[0] in bits_of(rows[1])
    assert matcher.length == 0
    matcher.commit(encode("ab"))
    with pytest.raises(GrammarError, match="no token can follow after 2 tokens"):
        matcher.fill_masks_for(encode("c"), rows)
    assert not rows.any()
    assert matcher.length == 2


def _starting_with(vocabulary: Vocabulary, text: bytes) -> list[int]:
    return [token for token, piece in enumerate(vocabulary.tokens) if piece.startswith(text)]


def test_token_marker(compile_grammar: Compile, vocabulary: Vocabulary, allowed: Allowed, encode: Encode) -> None:
    marker = [7, 8, 7, 9]
    matcher = compile_grammar(regex="ab", trigger=marker).matcher()
    assert allowed(matcher)[: vocabulary.size] == list(range(vocabulary.words * 32))[: vocabulary.size]
    matcher.commit([5, EOS, 7, 8, 7, 8, 7])
    assert not matcher.is_constrained
    matcher.commit([9])
    assert matcher.is_constrained
    assert encode("a")[0] in allowed(matcher)
    assert not matcher.accept(5)
    matcher.rollback(3)
    assert not matcher.is_constrained
    matcher.commit([8, 7, 9, *encode("ab"), EOS])
    assert matcher.is_terminated


def test_bound_token_forces_the_rest_of_the_marker(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    matcher = compile_grammar(regex="a", trigger=[7, 8, 9], bound_token_id=8).matcher()
    matcher.commit([7])
    assert not matcher.is_constrained
    assert len(allowed(matcher)) > 500
    matcher.commit([8])
    assert allowed(matcher) == [9]
    assert not matcher.accept(7)
    matcher.commit([9])
    assert not matcher.accept(9)
    matcher.rollback(3)
    matcher.commit([8])
    for token in (7, 8, 9):
        assert allowed(matcher) == [token]
        matcher.commit([token])
    matcher.commit(encode("a"))
    twin = matcher.fork()
    twin.rollback(3)
    assert allowed(twin) == [8]


def test_marker_ids_outside_the_vocabulary(compile_grammar: Compile) -> None:
    with pytest.raises(InvalidRequest, match="structured_output.trigger: 512 is not an id of a vocabulary of 512"):
        compile_grammar(regex="a", trigger=[512])
    with pytest.raises(InvalidRequest, match="structured_output.bound_token_id: 600 is not an id"):
        compile_grammar(regex="a", trigger=[5], bound_token_id=600)
    with pytest.raises(InvalidRequest, match="structured_output.trigger: 257 bytes of text, at most 256"):
        compile_grammar(regex="a", trigger="x" * 257)


def test_text_marker_that_is_an_added_token(compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode) -> None:
    matcher = compile_grammar(regex="a", trigger="</think>").matcher()
    matcher.commit([*encode("</thin"), vocabulary.added["</think>"]])
    assert matcher.is_constrained
    other = compile_grammar(regex="a", trigger="</think>").matcher()
    other.commit(encode("<</think>"))
    assert other.is_constrained
    other.commit(encode("a"))


@pytest.mark.parametrize("marker", ["e", "the", "aa", "aab", "in ", "\n", "é"])
def test_text_marker_anywhere_in_tokens(
    marker: str, compile_grammar: Compile, vocabulary: Vocabulary, allowed: Allowed
) -> None:
    """However the text is cut into tokens, what follows the first marker is what the grammar accepts."""
    pattern = r"[a-m ]{0,3}"
    grammar = compile_grammar(regex=pattern, trigger=marker)
    spelled, size = vocabulary.spelled, vocabulary.size
    generator = np.random.default_rng(3)
    for _ in range(8):
        matcher, text = grammar.matcher(), b""
        while not matcher.is_constrained and len(text) < 60:
            mask = set(allowed(matcher))
            for token in range(size):
                cut = (text + spelled[token]).partition(marker.encode())
                fits = not cut[1] or (all(byte in b"abcdefghijklm " for byte in cut[2]) and len(cut[2]) <= 3)
                assert (token in mask) == fits, (text, spelled[token])
            token = int(generator.choice(sorted(mask & set(range(3, size)))))
            if _try(matcher, token):
                matcher.commit([token])
                text += spelled[token]
        if matcher.is_constrained:
            rest = text.partition(marker.encode())[2]
            while len(rest) < 3:
                assert matcher.accept(vocabulary.tokens.index(b"b"))
                rest += b"b"
            assert allowed(matcher) == [EOS]


def test_drafts_across_a_marker(compile_grammar: Compile, vocabulary: Vocabulary, encode: Encode, bits_of: Any) -> None:
    matcher = compile_grammar(regex="ab", trigger=[7]).matcher()
    rows = np.zeros((5, vocabulary.words), np.int32)
    assert matcher.fill_masks_for([5, 7, *encode("ab")], rows) == 5
    assert (rows[:2] == -1).all()
    assert encode("a")[0] in bits_of(rows[2])
    assert bits_of(rows[4]) == [EOS]
    assert matcher.length == 0
    assert matcher.fill_masks_for([-1, 7, *encode("ab")], rows) == 1
    assert (rows == -1).all()


def test_a_failing_library_is_this_sequence_only(compile_grammar: Compile, vocabulary: Vocabulary) -> None:
    matcher = compile_grammar(regex="a").matcher()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: Any) -> None:
                raise RuntimeError("[23:00:00] /src/parser.cc:12: no more states\n")

            return fail

    matcher._native = Broken()
    row = np.full(vocabulary.words, -1, np.int32)
    with pytest.raises(GrammarError, match="^structured_output.regex: no more states$"):
        matcher.fill_mask(row)
    assert not row.any()
    with pytest.raises(GrammarError, match="no more states"):
        matcher.accept(5)


def test_same_request_in_another_life(compile_grammar: Compile, allowed: Allowed, encode: Encode) -> None:
    """A matcher is restored from the tokens that were emitted."""
    request = StructuredOutput(json_object=True, trigger="->")
    tokens = encode('well ->{"a": 1')
    first, second = compile_grammar(request).matcher(), compile_grammar(request).matcher()
    first.commit(tokens)
    second.commit(tokens)
    assert allowed(first) == allowed(second)

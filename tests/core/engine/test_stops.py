"""Text streams: one boundary for text and ids, however tokens and stop strings are cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.stops import TextStream
from deepinfer.errors import InvalidRequest
from deepinfer.sampling.params import SamplingParams


class Pieces:
    """A codec whose ids stand for given pieces of text; a stream may hold the end of a piece back."""

    def __init__(self, pieces: list[str], held: int = 0) -> None:
        self.pieces, self.held = pieces, held

    def decode_stream(self, *, skip_special: bool = True) -> Any:
        codec, waiting = self, [""]

        class Stream:
            def push(self, ids: Iterable[int]) -> str:
                text = waiting[0] + "".join(codec.pieces[token] for token in ids)
                cut = max(0, len(text) - codec.held)
                waiting[0] = text[cut:]
                return text[:cut]

            def finish(self) -> str:
                rest, waiting[0] = waiting[0], ""
                return rest

        return Stream()


def run(pieces: list[str], held: int = 0, **params: Any) -> tuple[TextStream, list[str], int]:
    """The stream, its deltas and the tokens that it took."""
    stream = TextStream(Pieces(pieces, held), SamplingParams(**params))
    deltas = []
    for token in range(len(pieces)):
        stopped = stream.push(token)
        deltas.append(stream.take())
        if stopped:
            return stream, deltas, token + 1
    stream.finish()
    deltas.append(stream.take())
    return stream, deltas, len(pieces)


def test_the_stop_string_that_is_completed_first_wins() -> None:
    stream, deltas, taken = run(["ab", "cd", "ef"], stop=["ef", "bcd"])
    assert (stream.text, stream.stop, taken, deltas) == ("a", "bcd", 2, ["a", ""])
    stream, _, _ = run(["abcd"], stop=["d", "cd", "x"])
    assert (stream.text, stream.stop) == ("ab", "cd")
    stream, _, taken = run(["a", "b", "c"], stop=["b"], include_stop_str_in_output=True)
    assert (stream.text, taken) == ("ab", 2)
    with pytest.raises(RuntimeError, match="the text has ended"):
        stream.push(2)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream, deltas, _ = run(["x<", "/to", "ol", "?", "</tool", ">"], stop=["</tool>"])
    assert deltas == ["x", "", "", "</tool?", "", ""]
    assert stream.stop == "</tool>"
    _, deltas, _ = run(["x<", "/tool"], stop=["</tool>"])
    assert deltas == ["x", "", "</tool"]


def test_min_tokens_passes_stop_strings_over() -> None:
    stream, _, taken = run(["a", "b", "a", "b"], stop="b", min_tokens=3)
    assert (stream.text, taken) == ("aba", 4)
    stream, _, taken = run(["a", "b", "c"], stop="b", min_tokens=3)
    assert (stream.text, stream.stop, taken) == ("abc", None, 3)
    # Begun before, completed after: it counts.
    stream, _, taken = run(["a", "b", "c"], stop="bc", min_tokens=3)
    assert (stream.text, taken) == ("a", 3)


def test_a_stop_string_in_what_the_decoder_held_back() -> None:
    stream, deltas, taken = run(["ab", "c"], held=1, stop="c")
    assert (stream.text, stream.stop, taken, "".join(deltas)) == ("ab", "c", 2, "ab")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    cuts=st.sets(st.integers(1, 13)),
    include=st.booleans(),
    held=st.integers(0, 2),
)
def test_nothing_depends_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: set[int], include: bool, held: int
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    stream, deltas, taken = run(pieces, held, stop=stops, include_stop_str_in_output=include)
    assert "".join(deltas) == stream.text
    if not ends:
        assert (stream.text, stream.stop) == (text, None)
        return
    end, start, stop = min(ends)
    assert (stream.text, stream.stop) == (text[: end if include else start], stop)
    if held == 0:
        assert taken == next(index for index, place in enumerate(places) if place >= end)


def test_a_codec_without_a_stream() -> None:
    with pytest.raises(InvalidRequest, match="use stop_token_ids"):
        TextStream(None, SamplingParams(stop="a"))

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from deepinfer_recipe import CodecError, RecipeCodec, TextCodec
from deepinfer_recipe.detokenize import byte_alphabet

from .conftest import BOS, DSML, EOS, USER, cuts, write_model

TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aeiн杭州🙂𠜎é<|｜> \n")), max_size=24
)


def stream_of(codec: TextCodec, groups: list[list[int]], **options: Any) -> str:
    stream = codec.decode_stream(**options)
    return "".join([stream.push(group) for group in groups]) + stream.finish()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_text_comes_back_whole_under_any_cut(codec: RecipeCodec, data: st.DataObject, text: str) -> None:
    ids = codec.encode_text(text)
    points = data.draw(st.lists(st.integers(1, max(1, len(ids))), max_size=6))
    stream = codec.decode_stream()
    parts = [stream.push(group) for group in cuts(ids, points)] + [stream.finish()]
    assert "".join(parts) == text == codec.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts), "a piece ended inside a character"


def test_every_cut_of_a_short_text(codec: RecipeCodec) -> None:
    text = "a 🙂杭é"
    ids = codec.encode_text(text)
    assert len(ids) <= 12
    for count in range(len(ids)):
        for points in itertools.combinations(range(1, len(ids)), count):
            assert stream_of(codec, cuts(ids, points)) == text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_decode_alike_under_any_cut(codec: RecipeCodec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, codec.vocabulary.size - 1), max_size=30))
    points = data.draw(st.lists(st.integers(1, 30), max_size=6))
    skip = data.draw(st.booleans())
    whole = codec.decode(ids, skip_special=skip)
    assert stream_of(codec, cuts(ids, points), skip_special=skip) == whole
    if not skip:
        assert whole == codec.vocabulary.tokenizer.decode(ids, skip_special_tokens=False)


def test_unfinished_character_is_held_and_then_replaced(codec: RecipeCodec) -> None:
    ids = codec.encode_text("ok 🙂")
    stream = codec.decode_stream()
    text = stream.push(ids[:-1])
    assert text == "ok "
    assert stream.held
    assert stream.finish() == "\ufffd"
    assert not stream.held


def test_stream_is_new_after_finish(codec: RecipeCodec) -> None:
    stream = codec.decode_stream()
    stream.push(codec.encode_text("🙂")[:1])
    stream.finish()
    assert stream.push(codec.encode_text("abc")) + stream.finish() == "abc"


def test_special_tokens_are_hidden_on_request(codec: RecipeCodec, ids_of: Any) -> None:
    ids = ids_of(f"{BOS}{USER}hi<think>x</think>{EOS}")
    assert codec.decode(ids) == "hi<think>x</think>"
    assert codec.decode(ids, skip_special=False) == f"{BOS}{USER}hi<think>x</think>{EOS}"
    assert codec.decode(ids_of(f"<{DSML} calls>")) == f"<{DSML} calls>"


def test_hidden_token_inside_a_character_does_not_break_it(codec: RecipeCodec, ids_of: Any) -> None:
    (eos,) = ids_of(EOS)
    ids = codec.encode_text("🙂")
    assert len(ids) > 1
    assert codec.decode([ids[0], eos, *ids[1:]]) == "🙂"


def test_id_without_a_token_is_visible(codec: RecipeCodec) -> None:
    padding = codec.vocabulary.size
    assert padding < codec.vocab_size
    assert codec.decode([*codec.encode_text("a"), padding, *codec.encode_text("b")]) == "a\ufffdb"


@pytest.mark.parametrize("bad", [-1, 10_000_000, 2**40])
def test_id_outside_the_vocabulary_is_refused(codec: RecipeCodec, bad: int) -> None:
    with pytest.raises(CodecError, match=rf"token id {bad} is outside the vocabulary \(0\.\.{codec.vocab_size - 1}\)"):
        codec.decode([bad])
    stream = codec.decode_stream()
    with pytest.raises(CodecError):
        stream.push([*codec.encode_text("ab"), bad])
    assert stream.push(codec.encode_text("c")) == "c", "a refused push must leave no trace"


def test_id_of_another_type_is_refused(codec: RecipeCodec) -> None:
    for bad, kind in (("1", "str"), (1.0, "float"), (None, "NoneType"), (True, "bool")):
        with pytest.raises(CodecError, match=f"must be an integer, not {kind}"):
            codec.decode([bad])  # type: ignore[list-item]


def test_integers_of_other_libraries_are_ids(codec: RecipeCodec) -> None:
    assert codec.decode(np.array(codec.encode_text("ok 杭"))) == "ok 杭"  # type: ignore[arg-type]


def test_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


def metaspace_model(path: Path) -> None:
    """A Llama-like tokenizer: spaces as a visible mark, unknown characters as byte tokens."""
    words = ["▁the", "▁a", "▁", "t", "h", "e", "a", "b", "杭", "."]
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{value:02X}>": len(vocab) + value for value in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    vocab |= {"th": len(vocab), "the": len(vocab) + 1}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))


def word_piece_model(path: Path) -> None:
    vocab = {"[UNK]": 0, "[CLS]": 1, "a": 2, "##b": 3, "the": 4, "##re": 5, ".": 6, "b": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]"])
    tokenizer.save(str(path))


@pytest.fixture(scope="module", params=[metaspace_model, word_piece_model])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("other")
    request.param(directory / "tokenizer.json")
    return TextCodec(directory, directory / "tokenizer.json")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=st.text(st.sampled_from("the ab.杭🙂é"), max_size=16))
def test_other_tokenizers_decode_alike_under_any_cut(other: TextCodec, data: st.DataObject, text: str) -> None:
    ids = other.encode_text(text)
    points = data.draw(st.lists(st.integers(1, max(1, len(ids))), max_size=6))
    stream = other.decode_stream()
    parts = [stream.push(group) for group in cuts(ids, points)] + [stream.finish()]
    whole = other.vocabulary.tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(parts) == whole == other.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_undecodable_run_of_another_tokenizer_is_not_held_for_ever(tmp_path: Path) -> None:
    metaspace_model(tmp_path / "tokenizer.json")
    codec = TextCodec(tmp_path, tmp_path / "tokenizer.json")
    stream = codec.decode_stream()
    half = codec.vocabulary.id_of("<0xE6>")
    assert half is not None
    shown = sum(len(stream.push([half])) for _ in range(200))
    assert shown > 100
    assert shown + len(stream.finish()) == 200


def test_fused_byte_level_decoder_is_recognised(tmp_path: Path) -> None:
    from .conftest import byte_level

    tokenizer = byte_level(decoder={"type": "Sequence", "decoders": [byte_level()["decoder"], {"type": "Fuse"}]})
    codec = TextCodec(*write_model(tmp_path, tokenizer))
    assert codec.decode(codec.encode_text("杭🙂")) == "杭🙂"
    assert json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["decoder"]["type"] == "Sequence"

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import CheckpointError, InvalidRequest
from deepinfer_recipe import CodecError, RecipeCodec, TextCodec

from .conftest import BOS, DSML, EOS, IMAGE, USER, V41_TOKENS, byte_level, id_in, write_model

MARKUP = st.lists(st.one_of(st.sampled_from(V41_TOKENS), st.text(max_size=4)), max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=MARKUP)
def test_plain_text_never_becomes_a_special_token(codec: RecipeCodec, text: str) -> None:
    ids = codec.encode_text(text)
    assert not set(ids) & set(codec.vocabulary.added.values())
    assert codec.decode(ids) == text


def test_special_tokens_only_on_request(codec: RecipeCodec) -> None:
    think = codec.vocabulary.added["<think>"]
    assert codec.encode_text("<think>", allow_special=True) == [think]
    assert len(codec.encode_text("<think>")) > 1


def test_markers_listed_in_the_base_vocabulary_stay_out_of_reach(tmp_path: Path) -> None:
    tokenizer = byte_level(words=("<think>",))
    tokenizer["pre_tokenizer"]["use_regex"] = False
    target = id_in(tokenizer, "<think>")
    assert target < len(tokenizer["model"]["vocab"])
    codec = RecipeCodec(*write_model(tmp_path, tokenizer))
    assert target not in codec.encode_text("<think>")
    assert codec.encode_text("<think>", allow_special=True) == [target]


def test_begin_of_sequence_only_on_request(codec: RecipeCodec) -> None:
    bos = codec.vocabulary.added[BOS]
    assert codec.bos_id == bos
    assert codec.encode_text("a", add_bos=True) == [bos, *codec.encode_text("a")]
    assert bos not in codec.encode_text("a")
    assert codec.encode_text("") == []


def test_stored_truncation_padding_and_template_do_not_act(tmp_path: Path) -> None:
    tokenizer = byte_level(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<｜▁pad▁｜>",
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [id_in(byte_level(), BOS)], "tokens": [BOS]}},
        },
    )
    codec = RecipeCodec(*write_model(tmp_path, tokenizer))
    for special in (False, True):
        ids = codec.encode_text("a long enough text", allow_special=special)
        assert codec.decode(ids) == "a long enough text"
        assert codec.bos_id not in ids


def test_text_limits_and_types(model: tuple[Path, Path]) -> None:
    codec = RecipeCodec(*model, max_text_bytes=10)
    assert codec.decode(codec.encode_text("杭州ab")) == "杭州ab"
    with pytest.raises(CodecError, match="the text has 12 bytes; the limit is 10") as caught:
        codec.encode_text("杭州abcdef")
    assert (caught.value.status, caught.value.param) == (413, "prompt")
    with pytest.raises(CodecError, match="must be a string, not bytes"):
        codec.encode_text(b"ab")  # type: ignore[arg-type]
    for special in (False, True):
        with pytest.raises(CodecError, match="lone surrogate") as caught:
            codec.encode_text("a\ud800b", allow_special=special)
        assert caught.value.status == 400


def test_odd_but_valid_texts(codec: RecipeCodec) -> None:
    for text in ("\0", "\r\n\t ", "a" * 5000, "\n" * 3000, "\U0010ffff", "é" * 100, "e\u0301", "👨‍👩‍👧"):
        assert codec.decode(codec.encode_text(text)) == text


def test_ids_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    codec = RecipeCodec(*write_model(tmp_path, tokenizer, {"vocab_size": id_in(tokenizer, BOS)}))
    assert codec.encode_text("plain")
    with pytest.raises(CodecError, match=r"'<｜User｜>' has id \d+, outside the model"):
        codec.encode_text(USER, allow_special=True)


def test_end_ids_come_from_every_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    directory, path = write_model(tmp_path, tokenizer, {"text_config": {"vocab_size": 600, "eos_token_id": 5}})
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert RecipeCodec(directory, path).eos_ids == {3, 4, 5, id_in(tokenizer, EOS)}
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": USER}, "bos_token": BOS}))
    plain = TextCodec(directory, path)
    assert plain.eos_ids == {3, 4, 5, id_in(tokenizer, USER)}
    assert plain.bos_id == id_in(tokenizer, BOS)


def test_model_without_begin_of_sequence(tmp_path: Path) -> None:
    codec = TextCodec(*write_model(tmp_path, byte_level(tokens=()), {}))
    assert codec.bos_id is None
    assert codec.eos_ids == frozenset()
    assert codec.vocab_size == codec.vocabulary.size
    with pytest.raises(CodecError, match="no begin-of-sequence token"):
        codec.encode_text("a", add_bos=True)


def test_tokenizer_without_v41_tokens_serves_text_and_refuses_chats(tmp_path: Path) -> None:
    directory, path = write_model(tmp_path, byte_level(tokens=(BOS, EOS, USER)), {"vocab_size": 600})
    codec = RecipeCodec(directory, path, ("flash",))
    assert codec.decode(codec.encode_text("hi <｜User｜> 杭🙂")) == "hi <｜User｜> 杭🙂"
    with pytest.raises(CodecError) as caught:
        codec.encode_chat("chat", {"model": "flash", "messages": [{"role": "user", "content": "x"}]})
    message = str(caught.value)
    for token in ("<｜System｜>", "<｜Assistant｜>", "<think>", "</think>", DSML):
        assert token in message
    assert USER not in message
    assert str(path) in message
    assert "use the checkpoint's own tokenizer.json, or send text prompts" in message
    assert caught.value.code == "chat_not_supported"


def test_plain_codec_refuses_chats_by_name(tmp_path: Path) -> None:
    codec = TextCodec(*write_model(tmp_path, byte_level(), {"model_type": "llama"}))
    for protocol in ("chat", "responses", "messages"):
        with pytest.raises(InvalidRequest, match="chats are not supported for model_type 'llama'"):
            codec.encode_chat(protocol, {})  # type: ignore[arg-type]


def test_plain_codec_keeps_added_words_and_hides_added_markup(tmp_path: Path) -> None:
    tokenizer = byte_level(tokens=("<tool>", "   ", "[ROLE]", "covid", "<|end|>", IMAGE))
    codec = TextCodec(*write_model(tmp_path, tokenizer, {}))
    for word in ("   ", "covid"):
        assert codec.encode_text(word) == [id_in(tokenizer, word)]
    for marker in ("<tool>", "[ROLE]", "<|end|>", IMAGE):
        assert id_in(tokenizer, marker) not in codec.encode_text(marker)
        assert codec.encode_text(marker, allow_special=True) == [id_in(tokenizer, marker)]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Nonsense"}}'])
def test_broken_tokenizer_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextCodec(tmp_path, tmp_path / "tokenizer.json")


def test_added_tokens_with_ids_that_will_not_hold(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer["added_tokens"][0]["id"] += 100
    with pytest.raises(CheckpointError, match=r"added tokens do not get the ids(.|\n)*the file says"):
        TextCodec(*write_model(tmp_path, tokenizer))


def test_missing_tokenizer_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a model directory needs a tokenizer\.json"):
        TextCodec(tmp_path, tmp_path / "tokenizer.json")
    directory, path = write_model(tmp_path)
    (directory / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds a list, expected a JSON object"):
        RecipeCodec(directory, path)


def test_native_handles_are_not_pickled(codec: RecipeCodec) -> None:
    with pytest.raises(TypeError, match="build one in each process from its paths"):
        pickle.dumps(codec)


def test_errors_travel_between_processes() -> None:
    error = CodecError(413, "messages", "too long", "messages", code="request_too_large")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "messages: too long"
    assert (
        copy.body()
        == error.body()
        == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "messages: too long"},
        }
    )
    assert json.loads(CodecError(400, "chat", "no", "top_k").body_json()) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "top_k", "code": "invalid_request_error"}
    }


def test_many_threads_encode_alike(codec: RecipeCodec) -> None:
    texts = [f"the {i} 杭州 🙂 " * 40 for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(codec.encode_text, texts)) == [codec.encode_text(text) for text in texts]


def run_python(code: str, *arguments: Any) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_plain_codec_needs_no_recipe(model: tuple[Path, Path]) -> None:
    code = """
import sys
sys.modules["deepseek_recipe"] = None
from deepinfer_recipe import TextCodec
codec = TextCodec(sys.argv[1], sys.argv[2])
print(codec.decode(codec.encode_text("it works")))
"""
    assert run_python(code, *model).strip() == "it works"


def test_descriptors_are_light(model: tuple[Path, Path]) -> None:
    code = """
import sys
import deepinfer_recipe.descriptor as recipe, deepinfer_recipe.text_descriptor as plain
heavy = {"torch", "numpy", "tokenizers", "deepseek_recipe", "pydantic"} & set(sys.modules)
assert not heavy, heavy
from pathlib import Path
directory, path = Path(sys.argv[1]), Path(sys.argv[2])
assert recipe.deepinfer_make_codec(directory, "llama", path, ()) is None
assert plain.deepinfer_make_codec(directory, "llama", directory / "none.json", ()) is None
assert not {"tokenizers", "deepseek_recipe"} & set(sys.modules)
print(type(recipe.deepinfer_make_codec(directory, "deepseek_v41", path, ("a",))).__name__)
print(type(plain.deepinfer_make_codec(directory, "llama", path, ())).__name__)
"""
    assert run_python(code, *model).split() == ["RecipeCodec", "TextCodec"]


def test_hooks_choose_the_codec(model: tuple[Path, Path]) -> None:
    from deepinfer.plugins.host import PluginHost
    from deepinfer.plugins.registry import Origin

    host = PluginHost()
    for name in ("text_descriptor", "descriptor"):
        record = host.load(
            Origin(
                entry_point=name,
                module=f"deepinfer_recipe.{name}",
                distribution="deepinfer-recipe-bindings",
                version="0",
            )
        )
        assert record.status == "loaded", record.error
    directory, path = model
    for model_type, kind in (("deepseek_v41", RecipeCodec), ("other", TextCodec)):
        made = host.manager.hook.deepinfer_make_codec(
            model_dir=directory, model_type=model_type, tokenizer_json=path, served_names=("a",)
        )
        assert type(made) is kind

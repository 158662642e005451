"""The tokenizer of the golden checkpoint, against ids that were made independently of this code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_recipe import RecipeCodec, TextCodec


@pytest.mark.parametrize("kind", [RecipeCodec, TextCodec])
def test_recorded_ids(golden: Path, kind: type[TextCodec]) -> None:
    codec = kind(golden, golden / "tokenizer.json")
    cases = json.loads((golden / "manifest.json").read_text("utf-8"))["tokenizer_cases"]
    assert cases
    for case in cases:
        assert codec.encode_text(case["text"], allow_special=True) == case["ids"]
        assert codec.decode(case["ids"], skip_special=False) == case["text"]
        plain = codec.encode_text(case["text"])
        assert codec.decode(plain) == case["text"]
        if "<" not in case["text"]:
            assert plain == case["ids"]


def test_special_ids_come_from_the_checkpoint(golden: Path) -> None:
    codec = RecipeCodec(golden, golden / "tokenizer.json", ("flash",))
    config = json.loads((golden / "config.json").read_text("utf-8"))
    assert codec.vocab_size == config["text_config"]["vocab_size"]
    assert codec.bos_id == config["bos_token_id"]
    assert codec.eos_ids == {config["eos_token_id"]}
    assert codec.image_id == config["image_token_id"]
    assert codec.missing_tokens == ()


def test_a_chat_runs_through(golden: Path) -> None:
    codec = RecipeCodec(golden, golden / "tokenizer.json", ("flash",))
    body = {"model": "flash", "messages": [{"role": "user", "content": "日本語🙂"}]}
    chat = codec.encode_chat("chat", body)
    assert codec.decode(chat.token_ids).endswith("日本語🙂<think>")
    stream = codec.open_stream(chat, id="r")
    for token in codec.encode_text("hm</think>日本語🙂", allow_special=True):
        stream.push([token])
    stream.finish("stop")
    assert stream.result()["choices"][0]["message"]["content"] == "日本語🙂"

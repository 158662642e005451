"""Tokenizers of synthetic checkpoints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.tokenizer_file import SpecialIds, tokenizer_json
from deepinfer_recipe import RecipeCodec


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> RecipeCodec:
    directory = tmp_path_factory.mktemp("synthetic")
    tokenizer = tokenizer_json(512, SpecialIds(bos=0, eos=1, pad=2, system=400, image=401))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "image_token_id": 401}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return RecipeCodec(directory, directory / "tokenizer.json", ("tiny",))


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_comes_back(synthetic: RecipeCodec, text: str) -> None:
    assert synthetic.decode(synthetic.encode_text(text)) == text


def test_chats_work(synthetic: RecipeCodec) -> None:
    assert synthetic.missing_tokens == ()
    assert synthetic.image_id == 401
    chat = synthetic.encode_chat("chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert chat.token_ids[:2] == [0, 400]

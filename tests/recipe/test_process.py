"""Forked and spawned processes: an encode after a fork must neither hang nor differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys, threading
from deepinfer_recipe import RecipeCodec
codec = RecipeCodec(sys.argv[1], sys.argv[2], ("flash",))
body = {"model": "flash", "messages": [{"role": "user", "content": "hello 杭州 " * 2000}]}
texts = (codec.encode_text("the " * 5000), codec.encode_chat("chat", body).token_ids)
parent = (codec._handles.get(), codec.vocabulary.tokenizer)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    again = (codec.encode_text("the " * 5000), codec.encode_chat("chat", body).token_ids)
    own = codec._handles.get() is not parent[0] and codec.vocabulary.tokenizer is not parent[1]
    quiet = os.environ["TOKENIZERS_PARALLELISM"] == "false"
    os.write(writer, b"ok" if again == texts and own and quiet else b"no")
    os._exit(0)
os.close(writer)
print(os.read(reader, 2).decode())
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("asked", [None, "true"])
def test_forked_child_encodes(model: tuple[Path, Path], asked: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    if asked is not None:
        environment["TOKENIZERS_PARALLELISM"] = asked
    result = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, model)],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip
    assert result.stdout.strip() == "ok", result.stderr


def test_thread_pool_is_off_unless_asked_for(model: tuple[Path, Path]) -> None:
    code = """
import os, sys
from deepinfer_recipe import TextCodec
TextCodec(sys.argv[1], sys.argv[2])
print(os.environ["TOKENIZERS_PARALLELISM"])
"""
    for asked, found in ((None, "false"), ("true", "true")):
        environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
        environment |= {} if asked is None else {"TOKENIZERS_PARALLELISM": asked}
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, model)],
            capture_output=True, text=True, timeout=60, check=True, env=environment,
        )  # fmt: skip
        assert result.stdout.strip() == found

"""The migration page names what there is, and what it says of the official names is what happens."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.errors import ConfigError, InvalidRequest
from deepinfer.settings import Settings, load_settings

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "migration.md"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([A-Za-z_]+)(?:=[^`]*)?`", cell)


def test_every_argument_exists() -> None:
    known = {*inspect.signature(LLM).parameters, *Settings.model_fields}
    table = rows("`LLM(...)`")
    assert len(table) > 10
    for official, here, *_ in table:
        assert set(names(here)) <= known, here
        if here == "none":
            for name in set(names(official)) - {"dummy"}:
                with pytest.raises(ConfigError, match=f"{name}: is not a setting"):
                    load_settings(**{name: 1})


def test_every_sampling_parameter_exists() -> None:
    known = set(SamplingParams.__dataclass_fields__)
    table = rows("`SamplingParams`")
    assert len(table) > 8
    for official, here, *_ in table:
        wanted = names(official) if here == "same" else names(here)
        assert {name.removesuffix("_mode") for name in wanted} <= known | {"penalties"}, here
    with pytest.raises(InvalidRequest, match="max_tokens: 0 is not an integer in 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(TypeError, match="eos_id"):
        SamplingParams(eos_id=1)  # type: ignore[call-arg]


def test_every_variable_is_served_or_named_as_missing() -> None:
    table = rows("Variables")
    assert len(table) > 8
    served = {name.upper() for name in Settings.model_fields}
    for official, here in table:
        upper = {name for name in names(official) if name.isupper()}
        if here.startswith("same"):
            assert upper <= served
        elif here.startswith("none"):
            assert not upper & served, f"{upper & served} exist by now"


def test_every_argument_of_generate_and_chat_exists() -> None:
    text = " ".join(here for _, here in rows("`generate`"))
    for method in ("priority", "raise_errors"):
        assert method in text
        assert method in inspect.signature(LLM.generate).parameters
        assert method in inspect.signature(LLM.chat).parameters
    for name in ("prompt_token_ids", "use_tqdm"):
        assert name in inspect.signature(LLM.generate).parameters
    assert "prompt_token_ids" in inspect.signature(AsyncLLM.generate).parameters

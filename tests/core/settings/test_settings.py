"""Settings: typed values, falsy words, messages, unknown variables, the table for the documentation."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import ConfigError
from deepinfer.settings import Settings, load_settings, settings_table


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)


def test_defaults_are_the_release():
    settings = load_settings()
    numerics = settings.numerics()
    assert numerics.compute_dtype is torch.bfloat16
    assert numerics.activation_quant
    assert numerics.cache_quant
    assert not numerics.batch_invariant
    assert settings.accelerator == "auto"
    assert settings.use_nextn_decode is None
    assert (settings.draft_verification, settings.enable_mtp_varlen) == ("coupled", False)
    assert settings.page_size == 128


@pytest.mark.parametrize("word", ["no", "off", "false", "0", "", "NO", "Off", "False", " 0 ", "n", "f"])
def test_falsy_words(monkeypatch, word):
    monkeypatch.setenv("DEEPINFER_CACHE_QUANT", word)
    assert load_settings().cache_quant is False


@pytest.mark.parametrize("word", ["yes", "on", "true", "1", "TRUE"])
def test_truthy_words(monkeypatch, word):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", word)
    assert load_settings().batch_invariant is True


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("DEEPINFER_FALLBACK", "sometimes", ["'sometimes'", "allow, warn, error"]),
        ("DEEPINFER_COMPUTE_DTYPE", "float16", ["'float16'", "bfloat16, float32"]),
        ("DEEPINFER_CACHE_QUANT", "perhaps", ["'perhaps'", "true", "off"]),
        ("DEEPINFER_PAGE_SIZE", "1", ["'1'", ">= 2"]),
        ("DEEPINFER_PAGE_SIZE", "many", ["'many'", "integer"]),
        ("DEEPINFER_PAGE_SIZE", "", ["''", "integer"]),
        ("DEEPINFER_MEMORY_UTILIZATION", "1.5", ["'1.5'", "<= 1.0"]),
    ],
)
def test_wrong_value_names_variable_value_and_allowed_values(monkeypatch, variable, value, parts):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert caught.value.field == variable
    assert str(caught.value).startswith(f"{variable}: ")
    for part in parts:
        assert part in str(caught.value)


def test_all_wrong_values_are_listed(monkeypatch):
    monkeypatch.setenv("DEEPINFER_FALLBACK", "x")
    monkeypatch.setenv("DEEPINFER_PAGE_SIZE", "y")
    with pytest.raises(ConfigError, match=r"DEEPINFER_FALLBACK: 'x'.*; DEEPINFER_PAGE_SIZE: 'y'"):
        load_settings()


def test_argument_wins_and_none_means_not_given(monkeypatch):
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    assert load_settings(accelerator="CPU").accelerator == "cpu"
    assert load_settings(accelerator=None).accelerator == "nvidia"


def test_wrong_argument_is_named_as_the_user_wrote_it():
    with pytest.raises(ConfigError, match=r"^page_size: 'x' is not allowed"):
        load_settings(page_size="x")
    with pytest.raises(ConfigError, match=r"^falback: is not a setting; did you mean fallback\?"):
        load_settings(falback="warn")


def test_budget_must_hold_every_sequence():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3 cannot hold one row for each of max_num_seqs=4"):
        load_settings(max_num_batched_tokens=3, max_num_seqs=4)
    assert load_settings(max_num_seqs=200).token_budget(5) == 1200
    assert load_settings(max_num_batched_tokens=64).token_budget(5) == 64


def test_confidence_temperatures(monkeypatch):
    assert load_settings().confidence_temperatures == (1.0,)
    monkeypatch.setenv("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0.5, 2")
    assert load_settings().confidence_temperatures == (0.5, 2.0)
    for wrong in ("0", "1,-2", "warm", "1,,2", "nan"):
        monkeypatch.setenv("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", wrong)
        with pytest.raises(ConfigError, match=f"'{wrong}' is not allowed; allowed: one positive number, or a comma"):
            load_settings()


def test_unknown_variable_is_warned_with_the_nearest_name(monkeypatch, caplog):
    monkeypatch.setenv("DEEPINFER_FALBACK", "warn")
    monkeypatch.setenv("DEEPINFER_QQQQQQQQ", "1")
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        load_settings()
    assert (
        "DEEPINFER_FALBACK is not a variable of DeepInfer and has no effect; did you mean DEEPINFER_FALLBACK?"
        in caplog.text
    )
    assert "DEEPINFER_QQQQQQQQ is not a variable of DeepInfer and has no effect\n" in caplog.text


def test_known_variables_are_not_warned(monkeypatch, caplog):
    monkeypatch.setenv("DEEPINFER_FALLBACK", "allow")
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert load_settings().fallback == "allow"
    assert not caplog.records


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_settings().page_size = 64


def test_table_has_every_setting_once_with_a_meaning():
    rows = settings_table()
    assert [row.variable for row in rows] == ["DEEPINFER_" + name.upper() for name in Settings.model_fields]
    assert all(row.meaning.endswith(".") and row.type for row in rows)
    by_name = {row.variable: row for row in rows}
    assert by_name["DEEPINFER_FALLBACK"].type == "allow | warn | error"
    assert by_name["DEEPINFER_CACHE_QUANT"].default == "1"
    assert by_name["DEEPINFER_MAX_MODEL_LEN"].default == "empty"
    assert str(Path.home()) not in by_name["DEEPINFER_CACHE_DIR"].default


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_any_text_gives_a_value_or_a_config_error(text):
    for field in ("batch_invariant", "page_size", "fallback", "max_model_len", "memory_utilization"):
        found = None
        try:
            load_settings(**{field: text})
        except ConfigError as error:
            found = error.field
        assert found in (None, field)


def test_settings_import_no_torch():
    code = "import sys, deepinfer.settings as s; s.load_settings(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_setting_is_read_by_something():
    core = Path(__file__).parents[3] / "deepinfer-core" / "src" / "deepinfer"
    text = "\n".join(file.read_text() for file in core.rglob("*.py"))
    read_at_start = {"plugins", "log_level", "log_format"}
    idle = [name for name in Settings.model_fields if not re.search(rf"(settings|self)\.{name}\b", text)]
    assert set(idle) <= read_at_start


def test_the_temperature_of_confidences_may_be_a_number() -> None:
    for value, text in ((2, "2"), (0.5, "0.5"), ("1,2", "1,2")):
        assert load_settings(dflash_confidence_head_temperature=value).dflash_confidence_head_temperature == text
    for bad in (0, -1.5, float("nan"), True):
        with pytest.raises(ConfigError, match="dflash_confidence_head_temperature"):
            load_settings(dflash_confidence_head_temperature=bad)

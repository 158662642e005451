"""The bar appears on a terminal only and counts requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from deepinfer.engine import progress
from deepinfer.engine.progress import GenerationProgress, StartProgress


def grown(reason: str | None) -> SimpleNamespace:
    return SimpleNamespace(error=None, finish_reason=reason)


def test_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with GenerationProgress(2, enabled=True) as bar:
        bar.update([grown(None), grown("stop")])
    assert capsys.readouterr() == ("", "")


def test_counts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=120, record=True)
    monkeypatch.setattr("rich.console.Console", lambda stderr: console)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    with GenerationProgress(2, enabled=True) as bar:
        bar.update([grown(None), grown("stop")])
        bar.update([grown("length")])
    text = console.export_text()
    assert "2/2" in text
    assert "tokens/s" in text
    with GenerationProgress(2, enabled=False) as bar:
        bar.update([grown("stop")])
    assert console.export_text() == ""


def test_a_start_elsewhere_shows_what_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO", logger="deepinfer"), StartProgress() as silent:
        silent.show("loading tiny")
    assert caplog.messages == ["loading tiny"]
    assert capsys.readouterr() == ("", "")
    console = Console(force_terminal=True, width=120, record=True)
    monkeypatch.setattr("rich.console.Console", lambda stderr: console)
    with StartProgress() as shown:
        shown.show("loading tiny")
        shown.show("allocating caches")
    assert "allocating caches" in console.export_text()

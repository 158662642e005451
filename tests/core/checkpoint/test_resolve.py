from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint import DEFAULT_MODEL, resolve_model
from deepinfer.errors import CheckpointError
from deepinfer.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    return load_settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Calls of a hub client that always finds the model."""
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_preset_is_made_once(settings: Settings) -> None:
    folder = resolve_model("tiny", settings)
    assert folder.is_relative_to(settings.cache_dir)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny", settings) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")] == [folder.name]


def _resolve_tiny(cache_dir: str) -> str:
    return str(resolve_model("tiny", load_settings(cache_dir=cache_dir)))


@pytest.mark.slow
def test_two_processes_make_one_preset(settings: Settings) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(_resolve_tiny, [str(settings.cache_dir)] * 2)
    assert folders[0] == folders[1]


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="set DEEPINFER_CACHE_DIR to a writable folder"):
        resolve_model("tiny", load_settings(cache_dir=tmp_path / "file"))


def test_folders(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(tmp_path / "tiny", settings) == tmp_path / "tiny"
    assert resolve_model("./tiny", settings) == Path("tiny")
    (tmp_path / "weights.safetensors").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give the checkpoint folder"):
        resolve_model("weights.safetensors", settings)


@pytest.mark.parametrize("name", ["nope", "./no/such", "/no/such/folder", "a/b/c", "", "../no-such-folder"])
def test_unknown_names(settings: Settings, name: str, hub: list[Any]) -> None:
    if name == "":
        assert resolve_model(name, settings) == Path(".")  # the empty path is the current folder
        return
    with pytest.raises(CheckpointError, match=r"not a folder, not a preset \(tiny, small, wide\), not a hub id"):
        resolve_model(name, settings)
    assert hub == []


def test_a_path_object_is_never_a_hub_id(settings: Settings, hub: list[Any]) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        resolve_model(Path("owner/name"), settings)
    assert hub == []


def test_hub_fetches_weights_and_json_only(settings: Settings, tmp_path: Path, hub: list[Any]) -> None:
    assert resolve_model("owner/name", settings) == tmp_path / "downloaded"
    assert resolve_model(None, settings) == tmp_path / "downloaded"
    assert [name for name, _ in hub] == ["owner/name", DEFAULT_MODEL]
    assert hub[0][1] == {"allow_patterns": ["*.safetensors", "*.json"], "ignore_patterns": ["*/*"]}


def test_model_dir_setting(settings: Settings, tmp_path: Path, hub: list[Any]) -> None:
    folder = tmp_path / "local"
    chosen = load_settings(cache_dir=settings.cache_dir, hf_model_dir=folder)
    with pytest.raises(CheckpointError, match=r"DEEPINFER_HF_MODEL_DIR=.*local is not a folder"):
        resolve_model(None, chosen)
    folder.mkdir()
    assert resolve_model(None, chosen) == folder
    assert resolve_model("owner/name", chosen) == tmp_path / "downloaded"


@pytest.mark.parametrize("offline", ["1", "0"])
def test_offline_says_what_to_set(settings: Settings, monkeypatch: pytest.MonkeyPatch, offline: str) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no")

    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(None, settings)
    text = str(caught.value)
    for word in (DEFAULT_MODEL, "DEEPINFER_HF_MODEL_DIR", "--model PATH", "HF_HUB_OFFLINE", "--model tiny"):
        assert word in text


def test_other_hub_failures_keep_their_reason(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(name: str, **options: Any) -> str:
        raise RuntimeError("disk full\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="owner/name is not available: RuntimeError: disk full\n") as caught:
        resolve_model("owner/name", settings)
    assert isinstance(caught.value.__cause__, RuntimeError)

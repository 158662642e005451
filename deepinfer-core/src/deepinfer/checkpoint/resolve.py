"""From what a user names (a folder, a preset, a hub id, nothing) to a local checkpoint folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.presets import FORMAT_VERSION, PRESETS
from deepinfer.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer.settings import Settings

__all__ = ["DEFAULT_MODEL", "resolve_model"]

DEFAULT_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
"""Hub id that is used when nothing is named."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PRESET_SEED = 0
_WAYS = (
    "set DEEPINFER_HF_MODEL_DIR to a folder that holds the checkpoint",
    "or give the folder with --model PATH (model=PATH in Python)",
    "or use --model tiny, a synthetic checkpoint that needs no network",
)

_logger = logging.getLogger("deepinfer")


def resolve_model(name: str | Path | None, settings: Settings) -> Path:
    """The checkpoint folder for `name`.

    Args:
        name: a preset (`tiny`, `small`, `wide`: made in `settings.cache_dir` on first use), an existing folder, or a
            hub id (`owner/name`: fetched, weights and JSON files only). None means `settings.hf_model_dir` if set,
            else `DEFAULT_MODEL` from the hub. A folder that is called like a preset is written `./tiny`.

    Raises:
        CheckpointError: there is no such folder, or the hub cannot be reached; the message says what to set.
    """
    if name is None:
        if settings.hf_model_dir is None:
            return _from_hub(DEFAULT_MODEL)
        folder = settings.hf_model_dir.expanduser()
        if not folder.is_dir():
            raise CheckpointError(
                f"DEEPINFER_HF_MODEL_DIR={settings.hf_model_dir} is not a folder; set it to the folder that holds "
                "config.json and the safetensors files, or unset it"
            )
        return folder
    text = str(name)
    if isinstance(name, str) and name in PRESETS:
        return _preset(name, settings.cache_dir)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{text} is a file; give the checkpoint folder that holds it")
    if isinstance(name, str) and _HUB_ID.fullmatch(text):
        return _from_hub(text)
    raise CheckpointError(
        f"no model {text!r}: not a folder, not a preset ({', '.join(PRESETS)}), not a hub id (owner/name)"
    )


def _preset(preset: str, cache_dir: Path) -> Path:
    """The cached synthetic checkpoint; made once even if several processes ask at the same time."""
    # making one needs the model's tensor table, which is built on this room
    from deepinfer.checkpoint.synthetic import make_checkpoint

    folder = cache_dir.expanduser() / "checkpoints" / f"{preset}-seed{_PRESET_SEED}-v{FORMAT_VERSION}"
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.parent / f".{folder.name}.lock"):
            if not _is_complete(folder):
                _logger.warning("making the synthetic %r checkpoint in %s", preset, folder)
                make_checkpoint(folder, preset, _PRESET_SEED)
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent} cannot be used ({error.strerror or error}); set DEEPINFER_CACHE_DIR to a writable folder"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    # folders appear by one rename, so an existing config.json means that all of it is there
    return (folder / "config.json").is_file()


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`; without lock support the atomic rename alone decides who wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(hub_id: str) -> Path:
    """Fetch (or find in the hub's cache) the weights and JSON files of `hub_id`; never anything that is code."""
    import huggingface_hub

    _logger.info("looking for %s on the hub", hub_id)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # the client raises many kinds: no network, no such repository, gated, disk full
        raise CheckpointError(f"{hub_id} is not available: {_reason(error)}", problems=_WAYS) from error


def _reason(error: Any) -> str:
    """One line for what the hub client reports."""
    kind = type(error).__name__
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reason = f"{kind}: {first_line[:200]}"
    if kind == "LocalEntryNotFoundError":
        reason = "the hub cannot be reached and the model is not in its local cache"
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            reason += " (HF_HUB_OFFLINE is set: unset it to download)"
        else:
            reason += " (on a machine without network, set HF_HUB_OFFLINE=1 to skip the attempt)"
    return reason

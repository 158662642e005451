"""Hook specifications: every one says who calls it, when and how often. None is called inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from deepinfer.api.descriptor import (
        BackendDescriptor,
        CodecDescriptor,
        KVStoreDescriptor,
        ModelDescriptor,
        ObserverDescriptor,
    )
    from deepinfer.plugins.registry import Registry

__all__ = [
    "PROJECT",
    "deepinfer_extend_cli",
    "deepinfer_make_codec",
    "deepinfer_register_backends",
    "deepinfer_register_codecs",
    "deepinfer_register_kv_stores",
    "deepinfer_register_models",
    "deepinfer_register_observers",
]

PROJECT = "deepinfer"

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def deepinfer_register_backends(registry: Registry[BackendDescriptor]) -> None:
    """Call `registry.add(BackendDescriptor(...))`. Called once per process, right after the module was imported."""


@hookspec
def deepinfer_register_models(registry: Registry[ModelDescriptor]) -> None:
    """Call `registry.add(ModelDescriptor(...))`. Called once per process, right after the module was imported."""


@hookspec
def deepinfer_register_codecs(registry: Registry[CodecDescriptor]) -> None:
    """Call `registry.add(CodecDescriptor(...))`. Called once per process, right after the module was imported."""


@hookspec
def deepinfer_register_kv_stores(registry: Registry[KVStoreDescriptor]) -> None:
    """Call `registry.add(KVStoreDescriptor(...))`. Called once per process, right after the module was imported."""


@hookspec
def deepinfer_register_observers(registry: Registry[ObserverDescriptor]) -> None:
    """Call `registry.add(ObserverDescriptor(...))`. Called once per process, right after the module was imported."""


@hookspec
def deepinfer_extend_cli(app: Any) -> None:
    """Add commands to the typer application. Called once, when the `deepinfer` command starts."""


@hookspec(firstresult=True)
def deepinfer_make_codec(model_dir: Path, model_type: str, tokenizer_json: Path, served_names: tuple[str, ...]) -> Any:
    """Build the codec of a checkpoint, or return None to leave it to the next plugin.

    Called once per engine (and once by a front end), never per token: the codec's own methods are plain calls.
    The arguments are paths and names, never live objects, so that the call can be repeated in another process.
    """

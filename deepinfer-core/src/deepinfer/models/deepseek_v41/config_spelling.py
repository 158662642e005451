"""Other spellings of the same config, brought to the released one before anything reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.errors import ConfigError

__all__ = ["normalise_spelling"]

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_FLAT_ONLY = ("dim", "n_layers", "moe_inter_dim", "n_heads")


def normalise_spelling(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` in the released spelling.

    Known variants: `torch_dtype` for `dtype`; token ids repeated in `text_config`; `rope_parameters` (flat, or with
    `main` and `compress`) for `rope_theta`, `compress_rope_theta` and `rope_scaling`; `type` for `rope_type`;
    `layer_types` with `compress_rates` for `compress_ratios`; `partial_rotary_factor` for `qk_rope_head_dim`;
    `mlp_layer_types` where every layer is `moe`.

    Raises:
        ConfigError: two spellings of one thing disagree, or a variant is incomplete. No value is ever made up.
    """
    top = dict(raw)
    flat = [key for key in _FLAT_ONLY if key in top]
    if flat and "text_config" not in top:
        raise ConfigError(
            "this is a flat inference config; point at the folder whose config.json has text_config", field=flat[0]
        )
    _rename(top, "torch_dtype", "dtype", "")
    if not isinstance(top.get("text_config"), Mapping):
        return top
    text = dict(top["text_config"])
    top["text_config"] = text
    _rename(text, "torch_dtype", "dtype", "text_config.")
    for name in _TOKEN_IDS:
        _hoist(top, text, name)
    _normalise_rope(text)
    _normalise_ratios(text)
    factor = text.pop("partial_rotary_factor", None)
    if factor is not None:
        _take_rotary(text, factor, "partial_rotary_factor")
    kinds = text.pop("mlp_layer_types", None)
    if kinds is not None and (not isinstance(kinds, (list, tuple)) or any(kind != "moe" for kind in kinds)):
        raise ConfigError(
            f"{kinds!r}; every layer of this model routes with 'moe'", field="text_config.mlp_layer_types"
        )
    return top


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _merge(target: dict[str, Any], name: str, value: Any, source: str, prefix: str = "text_config.") -> None:
    """Put `value`, found under `source`, at `name`; a different value that is already there is a contradiction."""
    if target.get(name) is not None and not _same(target[name], value):
        raise ConfigError(f"{value!r} contradicts {name} = {target[name]!r}; keep one of them", field=prefix + source)
    target[name] = value


def _rename(target: dict[str, Any], old: str, new: str, prefix: str) -> None:
    if old in target:
        value = target.pop(old)
        if value is not None:
            _merge(target, new, value, old, prefix)


def _hoist(top: dict[str, Any], text: dict[str, Any], name: str) -> None:
    if name in text:
        value = text.pop(name)
        if value is not None:
            _merge(top, name, value, name)


def _normalise_rope(text: dict[str, Any]) -> None:
    if text.get("rope_scaling") is not None:
        text["rope_scaling"] = _plain_scaling(text["rope_scaling"], "rope_scaling")
    parameters = text.pop("rope_parameters", None)
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{parameters!r} is not an object", field="text_config.rope_parameters")
    groups = [name for name in ("main", "compress") if name in parameters]
    text.setdefault("rope_scaling", None)
    if not groups:
        _take_scaling(text, parameters, "rope_theta", "rope_parameters")
        return
    extra = sorted(set(parameters) - {"main", "compress"})
    if extra:
        raise ConfigError(f"unknown field {extra[0]!r} beside {groups}", field="text_config.rope_parameters")
    for name in groups:
        group = parameters[name]
        path = f"rope_parameters.{name}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"{group!r} is not an object", field=f"text_config.{path}")
        if name == "compress":
            _take_scaling(text, group, "compress_rope_theta", path)
        else:
            if group.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"{group['rope_type']!r}; layers without compressed keys use plain frequencies ('default')",
                    field=f"text_config.{path}.rope_type",
                )
            _take_scaling(text, group, "rope_theta", path)


def _take_scaling(text: dict[str, Any], group: Mapping[str, Any], theta: str, path: str) -> None:
    """Spread one rope object over `theta` and, unless it is plain, `rope_scaling`."""
    rest = dict(group)
    for key, target in (("rope_theta", theta), ("compress_rope_theta", "compress_rope_theta")):
        value = rest.pop(key, None)
        if value is not None:
            _merge(text, target, value, f"{path}.{key}")
    factor = rest.pop("partial_rotary_factor", None)
    if factor is not None:
        _take_rotary(text, factor, f"{path}.partial_rotary_factor")
    scaling = _plain_scaling(rest, path)
    if scaling is not None:
        _merge(text, "rope_scaling", scaling, path)


def _take_rotary(text: dict[str, Any], factor: Any, path: str) -> None:
    """`factor` x head_dim is the rope width."""
    head_dim = text.get("head_dim")
    numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in (factor, head_dim))
    width = factor * head_dim if numbers else None
    if width is None or width != int(width):
        raise ConfigError(f"{factor!r} x head_dim {head_dim!r} is not a whole rope width", field=f"text_config.{path}")
    _merge(text, "qk_rope_head_dim", int(width), path)


def _plain_scaling(raw: Any, path: str) -> Any:
    """`raw` with `type` renamed; None for plain frequencies."""
    if not isinstance(raw, Mapping):
        return raw
    scaling = dict(raw)
    _rename(scaling, "type", "rope_type", f"text_config.{path}.")
    if scaling.get("rope_type", "default") == "default" and set(scaling) <= {"rope_type"}:
        return None
    return scaling


def _normalise_ratios(text: dict[str, Any]) -> None:
    types, rates = text.pop("layer_types", None), text.pop("compress_rates", None)
    if types is None and rates is None:
        return
    if types is None or rates is None:
        given, lacking = ("compress_rates", "layer_types") if types is None else ("layer_types", "compress_rates")
        if text.get("compress_ratios") is None or types is None:
            raise ConfigError(
                f"given without {lacking}; both are needed to know each layer's ratio", field=f"text_config.{given}"
            )
    if not isinstance(types, (list, tuple)):
        raise ConfigError(f"{types!r} is not a list", field="text_config.layer_types")
    if rates is None:
        _check_types_agree(list(types), text["compress_ratios"])
        return
    ratios = [_ratio(kind, rates, index, len(types)) for index, kind in enumerate(types)]
    stages = text.get("num_nextn_predict_layers")
    if isinstance(stages, int) and len(ratios) == text.get("num_hidden_layers"):
        # layer_types may list the backbone only; a draft stage has no compressed keys by definition
        ratios += [0] * stages
    _merge(text, "compress_ratios", ratios, "layer_types")


def _ratio(kind: Any, rates: Any, index: int, count: int) -> int:
    path = f"text_config.layer_types[{index}]"
    if not isinstance(kind, str):
        raise ConfigError(f"{kind!r} is not the name of a layer type", field=path)
    if isinstance(rates, Mapping):
        if kind == "sliding_attention":
            if rates.get(kind):
                raise ConfigError(
                    f"{rates[kind]!r}; layers without compressed keys have rate 0",
                    field=f"text_config.compress_rates.{kind}",
                )
            return 0
        if not rates.get(kind):
            raise ConfigError(f"{kind!r} has no rate in compress_rates {dict(rates)!r}", field=path)
        return rates[kind]
    if not isinstance(rates, (list, tuple)) or len(rates) != count:
        raise ConfigError(
            f"{rates!r} is neither an object by layer type nor a list of {count} rates",
            field="text_config.compress_rates",
        )
    rate = rates[index]
    if kind == "sliding_attention":
        if rate:
            raise ConfigError(f"{kind!r} contradicts rate {rate!r}", field=f"text_config.compress_rates[{index}]")
        return 0
    if not rate:
        raise ConfigError(f"{kind!r} contradicts rate {rate!r}", field=f"text_config.compress_rates[{index}]")
    return rate


def _check_types_agree(types: list[Any], ratios: Any) -> None:
    if not isinstance(ratios, (list, tuple)) or len(types) > len(ratios):
        raise ConfigError(
            f"{len(types)} entries do not fit compress_ratios {ratios!r}", field="text_config.layer_types"
        )
    for index, kind in enumerate(types):
        if (kind == "sliding_attention") != (ratios[index] == 0):
            raise ConfigError(
                f"{kind!r} contradicts compress_ratios[{index}] = {ratios[index]!r}",
                field=f"text_config.layer_types[{index}]",
            )

"""Every `DEEPINFER_*` variable, once: type, default, meaning; the documentation table is made from this model."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.backend.numerics import Numerics

__all__ = ["PREFIX", "SettingRow", "Settings", "load_settings", "settings_table", "unknown_variables"]

PREFIX = "DEEPINFER_"

_logger = logging.getLogger("deepinfer")


def _user_cache_dir() -> Path:
    """The platform's directory for files that may be deleted and made again."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "deepinfer"


class Settings(BaseSettings):
    """Typed, frozen view of the environment; arguments of the public API override it.

    Each field `name` is the variable `DEEPINFER_NAME`. Build it with `load_settings`, which turns every mistake
    into a `ConfigError` that names the variable.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", case_sensitive=False, validate_default=False
    )

    # Where the model comes from and where it runs.
    accelerator: str = Field(
        "auto", description="Backend that runs the model: `auto`, `cpu`, `nvidia`, `ascend` or any installed name."
    )
    plugins: str = Field(
        "", description="Comma list of plugin names to load; `-name` leaves one out. Empty loads every installed one."
    )
    hf_model_dir: Path | None = Field(
        None, description="Local directory of the checkpoint; used instead of a download when no model path is given."
    )
    cache_dir: Path = Field(
        default_factory=_user_cache_dir,
        description="Directory for synthetic checkpoints and other files that can be made again.",
        json_schema_extra={"default_text": "user cache directory of the platform, `deepinfer`"},
    )

    # Numerics: what is rounded where.
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Dtype of activations between operations; the release computes in bfloat16."
    )
    activation_quant: bool = Field(
        True, description="Round the inputs of quantised linears to FP8 in groups of 32, as the release does."
    )
    cache_quant: bool = Field(
        True, description="Keep window, compressed and index rows of the caches in their packed formats."
    )
    batch_invariant: bool = Field(
        False, description="Bind only kernels whose rows do not depend on their neighbours; an error if one is missing."
    )

    # Kernel table.
    fallback: Literal["allow", "warn", "error"] = Field(
        "warn", description="What to do when a backend lacks an operation and the plain PyTorch reference would run."
    )
    ops: str = Field(
        "",
        description="Source of single operations: `op=source,...` with source `native`, `reference`, `composite` or a "
        "backend name; `*` stands for every operation that is not named.",
    )

    # Scheduler and caches.
    page_size: int = Field(128, ge=2, description="Tokens per cache page; a multiple of the largest compress ratio.")
    max_num_seqs: int = Field(32, ge=1, description="Most sequences that run at the same time.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Most rows of one step. Empty: enough for one draft block per sequence, at least 512.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Most tokens of prompt and output together. Empty: what the model and the memory allow."
    )

    # Speculation.
    use_nextn_decode: int | None = Field(
        None,
        ge=0,
        description="Most draft tokens per sequence and step (N), up to the block size that the checkpoint was trained "
        "for; 0 turns speculation off. Empty: the block size, 5 in the release.",
    )
    enable_mtp_varlen: bool = Field(
        False,
        description="Verify as many drafts of each sequence as pay off, from the drafter's confidences and the "
        "measured time of steps. Off: all of them.",
    )
    draft_verification: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="`coupled` accepts a draft if it is the token that the model itself draws there: speculation never "
        "changes a token. `rejection` accepts more at temperatures above 0 and keeps the distribution, not the tokens.",
    )
    dflash_confidence_head_temperature: str = Field(
        "1.0",
        description="Temperature of the drafter's confidences: one number, or a comma list with one for each position "
        "of the block.",
    )
    decode_perf_cache_dir: Path | None = Field(
        None,
        description="Directory for the measured times of decode steps, which `enable_mtp_varlen` needs. Empty: "
        "`step_costs` in `cache_dir`.",
    )
    decode_perf_cache_ttl_sec: float = Field(
        3600.0, gt=0.0, description="Seconds after which these times are measured anew."
    )

    yoco_prefill_truncation_mode: Literal["off", "mask", "compact"] = Field(
        "off",
        description="Bounded replay: run only the last tokens of a prompt through the second half of the layers "
        "(`compact`), or all of them with the same visibility (`mask`, its oracle). Changes results a little.",
    )
    yoco_prefill_keep_tokens: int = Field(
        0, ge=0, description="Prompt tokens that bounded replay keeps: at least the window + 2 (N + 1), so 140."
    )
    zero_overhead_scheduling: bool = Field(
        True,
        description="Plan and launch the next step while one runs (asynchronous loop), where the backend can. Never "
        "changes a token.",
    )
    enforce_eager: bool = Field(
        False,
        description="Launch every kernel of a step instead of replaying captured graphs, where the backend has them. "
        "Slower; for debugging.",
    )

    scheduling_policy: str = Field(
        "",
        description="`module:factory` of a scheduling policy (`deepinfer.scheduler.policy.Policy`), called without "
        "arguments. Empty: by priority, then by arrival, with bounded waiting.",
    )

    # Preemption.
    preemption_host_bytes: int = Field(
        4 << 30,
        ge=0,
        description="Host memory for the state of requests that had to make room for others. When it is spent, such a "
        "request runs its prompt and output again. Never changes a token with row-invariant kernels.",
    )

    # Reuse of prefixes.
    enable_prefix_caching: bool = Field(
        True,
        description="Keep the pages of finished requests and resume prompts that begin like earlier ones. With "
        "row-invariant kernels (`DEEPINFER_BATCH_INVARIANT`) a hit never changes a bit; without them a hit, like any "
        "other change of the batch, may.",
    )
    prefix_snapshots: int | None = Field(
        None,
        ge=0,
        description="Copies of state slots from which prompts can resume. Empty: two for each of `max_num_seqs`, in at "
        "most a tenth of the cache memory; 0 turns reuse off.",
    )
    prefix_snapshot_interval: int = Field(
        4096, ge=1, description="Tokens between the copies that a long prompt leaves; rounded down to whole pages."
    )
    prefix_host_bytes: int = Field(
        0, ge=0, description="Host memory for pages and state copies that outlive the device's; 0 turns it off."
    )
    prefix_disk_dir: Path | None = Field(
        None,
        description="Directory for pages and state copies that outlive the process; engines on one machine may share "
        "it. Empty turns it off.",
    )
    prefix_disk_bytes: int = Field(16 << 30, ge=1, description="Most bytes in `prefix_disk_dir`.")
    prefix_load_seconds: float = Field(
        0.5, ge=0.0, description="Longest time that a request waits for its prefix from host memory, disk or a store."
    )
    kv_stores: str = Field(
        "", description="Comma list of stores of installed plugins that keep pages and state copies, fastest first."
    )

    # Structured outputs.
    xgrammar_timeout: float = Field(
        20.0, gt=0.0, description="Seconds that compiling one grammar may take; then its request fails, no other."
    )
    xgrammar_cache_limit_bytes: int = Field(
        1 << 30, ge=0, description="Host memory for compiled grammars that are kept for requests that repeat them."
    )

    # Memory and loading.
    memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="Share of the free device memory that weights, workspaces and caches may take."
    )
    cache_memory: int | None = Field(
        None, ge=1, description="Bytes for pages and state slots. Empty: what is left after weights and workspaces."
    )
    num_threads: int | None = Field(
        None, ge=1, description="Threads of the CPU backend. Empty: the default of PyTorch. Never changes a bit."
    )

    # Reports.
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="Level of the logger.")
    log_format: Literal["text", "json"] = Field(
        "text", description="How the command writes its log: for people, or one JSON object a line."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_empty(cls, value: Any, info: Any) -> Any:
        """An empty variable is False for a switch, nothing for an optional value and an empty text for a text."""
        if not (isinstance(value, str) and not value.strip()):
            return value.strip() if isinstance(value, str) else value
        annotation = cls.model_fields[info.field_name].annotation
        if annotation is bool:
            return False
        return None if type(None) in get_args(annotation) else ""

    @field_validator("accelerator")
    @classmethod
    def _lower(cls, value: str) -> str:
        return value.lower() or "auto"

    @field_validator("dflash_confidence_head_temperature", mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        """An argument may be a plain number."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("dflash_confidence_head_temperature")
    @classmethod
    def _check_temperatures(cls, value: str) -> str:
        try:
            allowed = all(0 < float(part) < float("inf") for part in value.split(","))
        except ValueError:
            allowed = False
        if not allowed:
            raise ValueError("one positive number, or a comma list of them")
        return value

    @model_validator(mode="after")
    def _check_budget(self) -> Settings:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold one row for each of "
                f"max_num_seqs={self.max_num_seqs} sequences; use at least {self.max_num_seqs}, and as many again for "
                "every draft (DEEPINFER_USE_NEXTN_DECODE)"
            )
        return self

    @property
    def replay_keep(self) -> int:
        """Prompt tokens that bounded replay keeps; 0 without it."""
        return 0 if self.yoco_prefill_truncation_mode == "off" else self.yoco_prefill_keep_tokens

    def token_budget(self, num_drafts: int) -> int:
        """Rows of one step: the setting, or enough for every sequence's draft block and a useful prompt chunk."""
        return self.max_num_batched_tokens or max(512, self.max_num_seqs * (1 + num_drafts))

    @property
    def confidence_temperatures(self) -> tuple[float, ...]:
        """Temperatures of the drafter's confidences: one, or one for each position of its block."""
        return tuple(float(part) for part in self.dflash_confidence_head_temperature.split(","))

    def numerics(self) -> Numerics:
        """The numerics settings as backends take them (imports torch)."""
        import torch

        from deepinfer.backend.numerics import Numerics

        return Numerics(
            compute_dtype=getattr(torch, self.compute_dtype),
            activation_quant=self.activation_quant,
            cache_quant=self.cache_quant,
            batch_invariant=self.batch_invariant,
        )


def load_settings(**overrides: Any) -> Settings:
    """Read the environment; arguments that are not None win over it.

    Unknown `DEEPINFER_*` variables are logged as warnings with the nearest known name.

    Raises:
        ConfigError: an unknown argument, or a value that its setting does not allow. The message names the variable
            (or the argument), the value found and the allowed values.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in given:
        if name not in Settings.model_fields:
            raise ConfigError(f"is not a setting{_nearest(name, Settings.model_fields)}", field=name)
    for name, hint in unknown_variables(os.environ).items():
        _logger.warning("%s is not a variable of DeepInfer and has no effect%s", name, hint)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise _as_config_error(error, given) from None


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of our prefix that neither core nor an installed plugin reads, each with a hint to the nearest name.

    `DEEPINFER_TEST_*` belongs to the test suite.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    ours = [name for name in environ if name.startswith(PREFIX) and not name.startswith(PREFIX + "TEST_")]
    unknown = [name for name in ours if name not in known]
    if unknown:  # Only now is it worth looking at what plugins declare.
        from deepinfer.plugins.host import default_host

        known |= default_host().variables().keys()
    return {name: _nearest(name, known) for name in sorted(unknown) if name not in known}


@dataclass(frozen=True)
class SettingRow:
    """One line of the settings table of the documentation."""

    variable: str
    type: str
    default: str
    meaning: str


def settings_table() -> list[SettingRow]:
    """All settings in the order of their declaration, as texts ready for a table."""
    rows = []
    for name, info in Settings.model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and "default_text" in extra:
            default = str(extra["default_text"])
        else:
            default = _show(info.default)
        rows.append(SettingRow(PREFIX + name.upper(), _type_text(info.annotation), default, info.description or ""))
    return rows


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return "empty" if value is None or value == "" else str(value)


def _type_text(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in get_args(annotation) if part is not type(None)) + " (optional)"
    names = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
    return names.get(annotation, str(annotation))


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint to the most similar known name, or nothing; the common prefix does not count as similarity."""
    bare = {word.removeprefix(PREFIX): word for word in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), list(bare), n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def _as_config_error(error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    """One error for all problems; `field` is the first one's name as the user wrote it."""
    problems: list[tuple[str, str]] = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "max_num_batched_tokens"
        shown = name if name in given else PREFIX + name.upper()
        problems.append((shown, _problem_text(name, item)))
    first, text = problems[0]
    rest = "".join(f"; {name}: {more}" for name, more in problems[1:])
    return ConfigError(text + rest, field=first)


def _problem_text(name: str, item: Any) -> str:
    if not item["loc"]:
        return str(item["ctx"]["error"])
    annotation, context = Settings.model_fields[name].annotation, item.get("ctx") or {}
    if "error" in context:
        allowed = str(context["error"])
    elif annotation is bool:
        allowed = "1, true, yes, on, 0, false, no, off or empty"
    elif get_origin(annotation) is Literal:
        allowed = ", ".join(get_args(annotation))
    else:
        bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        limits = [f"{bounds[key]} {value}" for key, value in context.items() if key in bounds]
        allowed = " ".join([_type_text(annotation), *limits])
    return f"{item['input']!r} is not allowed; allowed: {allowed}"

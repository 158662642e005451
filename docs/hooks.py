"""Fill `<!-- generated: NAME -->` lines of the documentation from the code, so that tables cannot go stale."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from types import FunctionType
from typing import Any

__all__ = ["GENERATORS", "on_page_markdown"]

_MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page.

    Raises:
        KeyError: a page asks for something that nothing generates.
    """
    return _MARK.sub(lambda match: GENERATORS[match.group(1)](), markdown)


def settings() -> str:
    """Every variable with its type, default and meaning."""
    from deepinfer.settings import settings_table

    def default(text: str) -> str:
        return text if text == "empty" or " " in text else f"`{text}`"

    rows = ((f"`{row.variable}`", row.type, default(row.default), row.meaning) for row in settings_table())
    return _table(("variable", "type", "default", "meaning"), rows)


def operations() -> str:
    """Every operation contract by family."""
    from deepinfer.backend.kernels import all_contracts
    from deepinfer.ops.contract import contracts_by_family

    all_contracts()
    parts = []
    for family, contracts in sorted(contracts_by_family().items()):
        parts.append(f"## {family}")
        for contract in contracts:
            function = contract.reference or contract.compose
            call = inspect.signature(function) if function and contract.reference else None
            facts = [f"determinism: **{contract.determinism}**"]
            if contract.tolerance.rtol or contract.tolerance.bf16_rtol:
                facts.append(_tolerance(contract.tolerance))
            if contract.uses:
                facts.append("composed of " + ", ".join(f"`{name}`" for name in contract.uses))
            if contract.mutates:
                facts.append("writes " + ", ".join(f"`{name}`" for name in contract.mutates) + " in place")
            parts += [f"### {contract.name}", f"*{' · '.join(facts)}*"]
            if call is not None:
                parts.append(f"```python\n{_call(contract.name, call)}\n```")
            parts.append(_docstring(contract.doc))
    return "\n\n".join(parts)


def _tolerance(tolerance: Any) -> str:
    """Allowed distance to the float64 result, in one phrase."""
    text = f"within {tolerance.rtol:.0e} (float32), {tolerance.bf16_rtol:.0e} (bfloat16) of float64"
    return text + (f", codes flip in at most {tolerance.flip_share:.0e}" if tolerance.flip_share else "")


def hooks() -> str:
    """Every hook specification with its arguments."""
    from deepinfer.plugins import hookspecs

    parts = []
    for name in hookspecs.__all__:
        function = getattr(hookspecs, name)
        if callable(function):
            parts += [f"### {name}", f"```python\n{_call(name, inspect.signature(function))}\n```"]
            parts.append(_docstring(function.__doc__ or ""))
    return "\n\n".join(parts)


def descriptors() -> str:
    """Every class that a descriptor module uses."""
    from deepinfer.api import descriptor

    return _classes(descriptor, descriptor.__all__)


def backend() -> str:
    """The classes that a backend implements or uses."""
    from deepinfer.api import backend as api

    return _classes(api, api.__all__)


def kv_store() -> str:
    """The classes that a store of cache blocks implements or uses."""
    from deepinfer.api import kv_store as api

    return _classes(api, api.__all__)


def observer() -> str:
    """What an observer is told."""
    from deepinfer.api import observer as api

    return _classes(api, ["StepRecord"])


def errors() -> str:
    """Every error class with its meaning."""
    from deepinfer import errors as module

    rows = []
    for name in module.__all__:
        error = getattr(module, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        rows.append((f"`{name}`", bases, _one_line(error.__doc__)))
    return _table(("error", "is a", "meaning"), rows)


def commands() -> str:
    """Every command of `deepinfer` with its arguments and options."""
    import typer

    from deepinfer.cli import build_app

    return "\n\n".join(_command(typer.main.get_command(build_app()), "deepinfer"))


GENERATORS: dict[str, Callable[[], str]] = {
    "backend": backend,
    "kv-store": kv_store,
    "observer": observer,
    "commands": commands,
    "descriptors": descriptors,
    "errors": errors,
    "hooks": hooks,
    "operations": operations,
    "settings": settings,
}


def _command(command: Any, path: str) -> list[str]:
    """Sections of one command and of those below it."""
    children = getattr(command, "commands", {})
    parts = []
    if not children:
        arguments = [item for item in command.params if item.param_type_name == "argument"]
        options = [item for item in command.params if item.param_type_name == "option"]
        usage = " ".join([path, *(["[OPTIONS]"] if options else []), *(_argument(item) for item in arguments)])
        parts += [f"## {path}", _one_line(command.help), f"```console\n$ {usage}\n```"]
        rows = [(f"`{_argument(item)}`", getattr(item, "help", None) or "") for item in arguments]
        rows += [(f"`{', '.join([*item.opts, *item.secondary_opts])}`", _option_help(item)) for item in options]
        if rows:
            parts.append(_table(("argument", "meaning"), rows))
    for name, child in sorted(children.items()):
        parts += _command(child, f"{path} {name}")
    return parts


def _argument(item: Any) -> str:
    name = item.metavar or item.name.upper()
    name += "..." if item.nargs == -1 else ""
    return name if item.required or name.startswith("[") else f"[{name}]"


def _option_help(item: Any) -> str:
    shown = item.default is not None and not callable(item.default) and item.default not in (False, ())
    return (item.help or "") + (f" Default: `{item.default}`." if shown else "")


def _classes(module: Any, names: Sequence[str]) -> str:
    """Docstring, fields and methods of the classes among `names`, constants and functions in front."""
    parts = []
    for name in sorted(names, key=lambda name: (inspect.isclass(getattr(module, name)), name)):
        value = getattr(module, name)
        if inspect.isclass(value):
            parts += _class(name, value)
        elif inspect.isfunction(value):
            parts += [f"### {name}", f"```python\n{_call(name, inspect.signature(value))}\n```"]
            parts.append(_docstring(value.__doc__ or ""))
    return "\n\n".join(parts)


def _class(name: str, value: type) -> list[str]:
    parts = [f"### {name}"]
    if hasattr(value, "__dataclass_fields__"):
        lines = [f"    {item.name}: {_plain(item.type)}{_default(item)}" for item in fields(value)]
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        head = f"class {name}({', '.join(bases)}):" if bases else f"class {name}:"
        parts.append("```python\n" + "\n".join([head, *lines]) + "\n```")
    parts.append(_docstring(value.__doc__ or ""))
    for member, function in vars(value).items():
        if member.startswith("_") or not isinstance(function, FunctionType | classmethod):
            continue
        if member in getattr(value, "__dataclass_fields__", {}):
            continue
        signature = _call(f"{name}.{member}", inspect.signature(getattr(value, member)))
        kind = " *(abstract)*" if getattr(function, "__isabstractmethod__", False) else ""
        parts += [f"#### {member}{kind}", f"```python\n{signature}\n```"]
        parts.append(_docstring(getattr(value, member).__doc__ or ""))
    return parts


def _default(item: Any) -> str:
    if item.default is not MISSING:
        return f" = {item.default.__name__ if callable(item.default) else repr(item.default)}"
    return " = ..." if item.default_factory is not MISSING else ""


def _call(name: str, signature: inspect.Signature) -> str:
    """A call as code, one parameter a line if it is long."""
    arguments: list[str] = []
    for item in signature.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not any(argument.startswith("*") for argument in arguments):
            arguments.append("*")
        if item.name not in ("self", "cls"):
            bare = item if item.annotation is item.empty else item.replace(annotation=_Bare(item.annotation))
            arguments.append(str(bare))
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {_plain(result)}"
    line = f"{name}({', '.join(arguments)}){arrow}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){arrow}"


class _Bare:
    """An annotation that prints as it is written in the source."""

    def __init__(self, annotation: Any) -> None:
        self._text = _plain(annotation)

    def __repr__(self) -> str:
        return self._text


def _plain(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _docstring(text: str) -> str:
    """A docstring as markdown: its sections (Args, Returns, ...) become lists."""
    lines, out, section = inspect.cleandoc(text).splitlines(), [], False
    for line in lines:
        heading = re.fullmatch(r"(Args|Attributes|Raises|Returns):", line)
        entry = re.match(r"    (?! )(.*)", line) if section else None
        if heading:
            out += ["", f"**{heading.group(1)}**", ""]
            section = True
        elif entry and re.match(r"[\w.,* ]+: ", entry.group(1)):
            name, _, rest = entry.group(1).partition(": ")
            out.append(f"- `{name}`: {rest}")
        elif section and line.startswith("        "):
            out.append("  " + line.strip())
        elif entry:
            out.append(entry.group(1))
        else:
            section = section and not line
            out.append(line)
    return "\n".join(out)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)

"""Tables and plot of a result of `cpu.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
LABELS = {"engine": "engine", "straight": "same kernels, straight line", "plain": "plain products, straight line"}
COLOURS = {"engine": "#33658a", "straight": "#86bbd8", "plain": "#c9c9c9"}


def tables(result: dict[str, Any]) -> str:
    """All tables as Markdown."""
    parts = [_machine(result)]
    for kind in ("decode", "prefill"):
        parts.append(f"### {kind.capitalize()}\n\n" + _throughput(result, kind))
    parts.append("### Price of row-invariant products\n\n" + _products(result))
    parts.append("### Where a decode step goes\n\n" + _profile(result))
    return "\n\n".join(parts)


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    equal = [run["straight_equals_engine_bits"] for preset in result["presets"] for run in preset["runs"]]
    return _table(
        ("what", "value"),
        [
            ("date", machine["date"]),
            ("processor", f"{machine['processor']}, {machine['capability']}, {machine['cores']} cores"),
            ("threads", machine["threads"]),
            ("Python, torch, NumPy", f"{machine['python']}, {machine['torch']}, {machine['numpy']}"),
            ("deepinfer-core", machine["deepinfer"]),
            ("load average before and after", f"{machine['load_before']:.1f}, {machine['load_after']:.1f}"),
            ("seconds", f"{machine['seconds']:.0f}"),
            ("logits of engine and straight line equal bit for bit", f"in {sum(equal)} of {len(equal)} measurements"),
        ],
    )


def _throughput(result: dict[str, Any], kind: str) -> str:
    rows = []
    for preset in result["presets"]:
        for run in preset["runs"]:
            if kind == "prefill" and run["sampling"] != "greedy":
                continue
            entry = run[kind]
            sampling = "" if run["sampling"] == "greedy" else f", {run['sampling']}"
            prompt = f" × {run['prompt_length']} tokens" if kind == "prefill" else sampling
            rows.append(
                (
                    preset["preset"],
                    f"{run['batch']}{prompt}",
                    *(f"{entry[who]['tokens_per_cpu_second']:,.1f}" for who in LABELS),
                    f"{entry['engine']['tokens_per_wall_second']:,.1f}",
                    _ratio(entry["engine_over_straight"]),
                    _ratio(entry["straight_over_plain"]),
                    entry["steps"],
                )
            )
    head = ("preset", "batch", *LABELS.values(), "engine, wall clock", "engine / straight", "straight / plain", "steps")
    return _table(head, rows)


def _ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['p25']:.3f}–{spread['p75']:.3f})"


def _products(result: dict[str, Any]) -> str:
    rows = []
    for preset in result["presets"]:
        for entry in preset["products"]:
            tile, plain = entry["seconds"]["tile"], entry["seconds"]["plain"]
            rows.append(
                (
                    preset["preset"],
                    entry["rows"],
                    entry["products"],
                    f"{1e3 * tile:.2f}",
                    f"{1e3 * plain:.2f}",
                    f"{tile / plain:.2f}",
                )
            )
    return _table(("preset", "rows", "products", "row-invariant, ms", "plain, ms", "ratio"), rows)


def _profile(result: dict[str, Any]) -> str:
    columns = [(preset["preset"], entry) for preset in result["presets"] for entry in preset["profile"]]
    names = list(dict.fromkeys(name for _, entry in columns for name in entry["by_operation"]))
    names.sort(key=lambda name: -sum(entry["by_operation"].get(name, 0) for _, entry in columns))
    head = ("operation", *(f"{preset}, batch {entry['batch']}" for preset, entry in columns))
    rows = [(f"`{name}`", *(f"{entry['by_operation'].get(name, 0):.1%}" for _, entry in columns)) for name in names]
    rows.append(("processor time of a step, ms", *(f"{1e3 * entry['seconds']:.1f}" for _, entry in columns)))
    rows.append(("calls of small operations in a step", *(f"{entry['small_calls']:,.0f}" for _, entry in columns)))
    small = []
    for preset, entry in columns:
        listed = ", ".join(f"`{op['name']}` {op['share']:.0%} ({op['calls']:,.0f})" for op in entry["small"][:6])
        small.append((f"{preset}, batch {entry['batch']}", listed))
    below = _table(("step", "busiest small operations: share of their total, and calls in a step"), small)
    return _table(head, rows) + "\n\n" + below


def _table(head: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def replace_tables(page: Path, result: dict[str, Any]) -> None:
    """Put the tables between the markers of a page."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(result)}\n\n{END}{after}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput of the three contenders and the shares of the large operations."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), width_ratios=(1, 1, 1.2))
    for axis, kind in zip(axes, ("decode", "prefill"), strict=False):
        runs = [(p["preset"], run) for p in result["presets"] for run in p["runs"] if run["sampling"] == "greedy"]
        for offset, who in enumerate(LABELS):
            heights = [run[kind][who]["tokens_per_cpu_second"] for _, run in runs]
            places = [index + 0.27 * (offset - 1) for index in range(len(runs))]
            axis.bar(places, heights, 0.27, label=LABELS[who], color=COLOURS[who])
        axis.set_xticks(range(len(runs)), [f"{preset}\n{run['batch']}" for preset, run in runs])
        axis.set_yscale("log")
        axis.set_title(f"{kind}, tokens per processor second")
        axis.set_ylim(top=5 * axis.get_ylim()[1])
        axis.legend(fontsize=8, loc="upper right")
    _plot_shares(axes[2], result, plt)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _plot_shares(axis: Any, result: dict[str, Any], plt: Any) -> None:
    columns = [(p["preset"], entry) for p in result["presets"] for entry in p["profile"]]
    names = list(dict.fromkeys(name for _, entry in columns for name in entry["by_operation"]))
    names.sort(key=lambda name: -sum(entry["by_operation"].get(name, 0) for _, entry in columns))
    left = [0.0] * len(columns)
    for number, name in enumerate(names[:9]):
        shares = [entry["by_operation"].get(name, 0) for _, entry in columns]
        axis.barh(range(len(columns)), shares, left=left, label=name, color=plt.cm.tab10(number))
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set_yticks(range(len(columns)), [f"{preset}, batch {entry['batch']}" for preset, entry in columns])
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.set_title("share of a decode step")
    axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))

"""The text format that Prometheus reads, and a small server for it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

from deepinfer.errors import ConfigError
from deepinfer.observe.histogram import Histogram

__all__ = ["CONTENT_TYPE", "Family", "MetricsServer", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP answer with this text says that it is."""

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass
class Family:
    """One metric: its name, meaning and values.

    Attributes:
        name: without a unit suffix missing: seconds end in `_seconds`, counters in `_total`.
        kind: of the metric.
        help: one sentence.
        values: numbers with their labels, for counters and gauges.
        histograms: with their labels, for histograms.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    values: list[tuple[Mapping[str, str], float]] = field(default_factory=list)
    histograms: list[tuple[Mapping[str, str], Histogram]] = field(default_factory=list)


def exposition(families: Iterable[Family]) -> str:
    """All families as text.

    Raises:
        ValueError: a name that the format does not allow, or one that comes twice.
    """
    lines: list[str] = []
    seen: set[str] = set()
    for family in families:
        if not NAME.fullmatch(family.name) or family.name in seen:
            raise ValueError(f"{family.name!r} is not a new metric name")
        seen.add(family.name)
        escaped = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {escaped}", f"# TYPE {family.name} {family.kind}"]
        lines += [_line(family.name, labels, value) for labels, value in family.values]
        for labels, histogram in family.histograms:
            lines += _histogram_lines(family.name, labels, histogram)
    return "\n".join([*lines, ""])


def _histogram_lines(name: str, labels: Mapping[str, str], histogram: Histogram) -> list[str]:
    counts, total, lines = list(histogram.counts), 0, []
    for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
        total += count
        lines.append(_line(f"{name}_bucket", {**labels, "le": _number(bound)}, total))
    return [*lines, _line(f"{name}_sum", labels, histogram.sum), _line(f"{name}_count", labels, total)]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


class MetricsServer:
    """Answers `GET /metrics` on a thread of its own until it is closed.

    Args:
        render: makes the text; called for every request.
        port: 0 takes a free one; see `address`.
        host: address to listen on; others than this machine's own are the caller's decision.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, render: Callable[[], str], *, port: int = 0, host: str = "127.0.0.1") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = render().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:
                """Scrapes are no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}", field="port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="deepinfer-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop answering; a second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

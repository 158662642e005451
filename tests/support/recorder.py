"""A kernel table that keeps what its ops got and gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from deepinfer.backend.kernels import KernelTable
from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.ops.contract import CONTRACTS

__all__ = ["Call", "Recorder", "recording_graph"]


class Call(NamedTuple):
    """One call of an op."""

    args: tuple[Any, ...]
    result: Any


class Recorder:
    """Ops of a bound table as attributes; large ops are composed anew, so that their finer ops are seen.

    Attributes:
        calls: by op name, in order; only of the ops in `names`.
    """

    def __init__(self, table: KernelTable, names: tuple[str, ...]) -> None:
        self._table, self._names = table, names
        self.numerics = table.numerics
        self.calls: dict[str, list[Call]] = defaultdict(list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        compose = CONTRACTS[name].compose
        function = getattr(self._table, name) if compose is None else compose(self)
        if name in self._names:
            function = self._recorded(name, function)
        vars(self)[name] = function
        return function

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.calls[name].append(Call(args + tuple(kwargs.values()), result))
            return result

        return call


def recording_graph(model: DeepseekV41, *names: str) -> tuple[Graph, Recorder]:
    """A graph over the model's weights whose named ops are recorded."""
    recorder = Recorder(model.table, names)
    return Graph(model.config, model.weights, recorder), recorder

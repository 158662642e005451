"""Every golden test that names `golden`, `prompt` or `mode` runs over all sets that were found."""

from __future__ import annotations

import pytest
from support.golden import golden_required, golden_sets, missing_message

MODES = ("off", "on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "recorded(name): only prompts and modes for which the set has such an array")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sets, names = golden_sets(), metafunc.fixturenames
    modes = MODES if "mode" in names else ("",)
    subject = "prompt" if "prompt" in names else "golden"
    if subject not in names:
        return
    marker = metafunc.definition.get_closest_marker("recorded")
    values = []
    for golden in sets:
        for mode in modes:
            for item in golden.prompts if subject == "prompt" else (golden,):
                if marker is not None and not item.names(f"{mode}.{marker.args[0]}"):
                    continue
                parts = (golden.name, getattr(item, "key", ""), mode)
                values.append(pytest.param(item, mode, id="-".join(part for part in parts if part)))
    if not values:
        if golden_required():
            raise pytest.UsageError(missing_message())
        values = [pytest.param(None, "", marks=pytest.mark.skip(reason=missing_message()), id="none")]
    if modes == MODES:
        metafunc.parametrize((subject, "mode"), values)
    else:
        metafunc.parametrize(
            subject, [pytest.param(value.values[0], id=value.id, marks=value.marks) for value in values]
        )

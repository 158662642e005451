"""Every golden test that names `golden` or `prompt` runs over all sets that were found."""

from __future__ import annotations

import pytest
from support.golden import golden_root, golden_sets


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sets = golden_sets()
    if "prompt" in metafunc.fixturenames:
        prompts = [(golden, prompt) for golden in sets for prompt in golden.prompts]
        values = [pytest.param(prompt, id=f"{golden.name}-{prompt.key}") for golden, prompt in prompts]
        _parametrize(metafunc, "prompt", values)
    elif "golden" in metafunc.fixturenames:
        _parametrize(metafunc, "golden", [pytest.param(golden, id=golden.name) for golden in sets])
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", ["off", "on"])


def _parametrize(metafunc: pytest.Metafunc, name: str, values: list) -> None:
    if not values:
        mark = pytest.mark.skip(reason=f"no golden sets in {golden_root()}; set DEEPINFER_TEST_GOLDEN")
        values = [pytest.param(None, marks=mark, id="none")]
    metafunc.parametrize(name, values)

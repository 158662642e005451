"""Every example runs, the smallest backend through the installed entry point that a user would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer.checkpoint import resolve_model
from deepinfer.settings import load_settings

ROOT = Path(__file__).parents[2]
MINIMAL = ROOT / "examples" / "minimal-backend"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that holds the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("cache")
    resolve_model("tiny", load_settings(cache_dir=folder))
    return folder


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata that installing the example would leave."""
    project = tomllib.loads((MINIMAL / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
        for group, points in project["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder


def run(*arguments: str, cache: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    environment |= {"DEEPINFER_CACHE_DIR": str(cache), "DEEPINFER_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def path_of(acme: Path) -> str:
    return os.pathsep.join([str(acme), str(MINIMAL / "src"), os.environ.get("PYTHONPATH", "")])


def test_offline_generate(cache):
    lines = dict(
        line.split(":", 1) for line in run(str(ROOT / "examples" / "offline_generate.py"), cache=cache).splitlines()
    )
    assert lines["repeated"].strip() == "same tokens"
    assert "seed 7" in lines["ended by"]
    assert lines["numerics"].strip().startswith("n1-")


def test_many_prompts(cache):
    lines = run(str(ROOT / "examples" / "many_prompts.py"), cache=cache).splitlines()
    assert len(lines) == 4
    assert all(line.endswith("alone the same tokens") for line in lines[:3])
    assert lines[3].startswith("[-5] is refused: InvalidRequest: prompt_token_ids: id -5 at index 0")


def test_async_stream(cache):
    lines = run(str(ROOT / "examples" / "async_stream.py"), cache=cache).splitlines()
    assert lines[0].startswith("finished: 24 tokens, abandoned: after ")
    assert lines[1:] == ["EngineDead: make a new AsyncLLM", "after a restart: the same tokens"]


def test_the_minimal_backend_is_found_and_binds_its_kernel(cache, acme):
    out = run("-m", "deepinfer", "backends", "ops", "acme", "--json", cache=cache, PYTHONPATH=path_of(acme))
    bound = {row["op"]: row for row in json.loads(out)["ops"]}
    assert (bound["rms_norm"]["kind"], bound["rms_norm"]["backend"]) == ("native", "acme")
    assert bound["linear"]["kind"] == "reference"


def test_the_minimal_backend_generates_what_the_cpu_generates(cache, acme):
    common = [
        "-m",
        "deepinfer",
        "generate",
        "Hello",
        "--model",
        "tiny",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
    ]
    variables = {"DEEPINFER_COMPUTE_DTYPE": "float32", "DEEPINFER_FALLBACK": "allow", "PYTHONPATH": path_of(acme)}
    outputs = [json.loads(run(*common, "--accelerator", name, cache=cache, **variables)) for name in ("acme", "cpu")]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert outputs[0]["numerics_id"] != outputs[1]["numerics_id"]


def test_the_minimal_backend_gives_the_checkpoint_back(cache, monkeypatch):
    monkeypatch.syspath_prepend(str(MINIMAL / "src"))
    import torch

    from acme_deepinfer.backend import create_backend
    from deepinfer.api.backend import Numerics, Shard
    from deepinfer.checkpoint import Checkpoint
    from deepinfer.models.deepseek_v41.config import parse_config
    from deepinfer.models.deepseek_v41.weights import weight_groups

    checkpoint = Checkpoint.open(resolve_model("tiny", load_settings(cache_dir=cache)))
    groups = list(weight_groups(parse_config(checkpoint.config)).values())
    backend = create_backend()
    for placement in backend.plan_weights(groups, Shard(), Numerics()):
        raw = checkpoint.read([part.name for part in placement.group.parts])
        back = backend.unpack(placement, backend.load(placement, raw))
        assert list(back) == list(raw)
        for name, tensor in raw.items():
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_minimal_backend_says_when_its_board_is_absent(cache, acme):
    out = run("-m", "deepinfer", "backends", "list", "--json", cache=cache, PYTHONPATH=path_of(acme), ACME_BOARDS="0")
    rows = {row["name"]: row for row in json.loads(out)["backends"]}
    assert rows["acme"]["status"] == "no_match"
    assert rows["acme"]["reasons"] == ["no Acme board in this machine (ACME_BOARDS=0)"]


def test_every_example_is_tested():
    programs = {path.name for path in (ROOT / "examples").iterdir()}
    assert programs == {"async_stream.py", "offline_generate.py", "many_prompts.py", "minimal-backend"}

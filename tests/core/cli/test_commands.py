"""The commands that describe the machine: content, JSON, exit status, one red message instead of a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from deepinfer.cli import backends, build_app, doctor, env, main
from deepinfer.plugins.host import PluginHost
from deepinfer.plugins.registry import Origin

LIGHT = ("backends", "doctor", "env")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def invoke(*words):
    return CliRunner().invoke(build_app(words), list(words))


@pytest.fixture
def host(monkeypatch):
    """A host of its own for the commands, with core loaded."""
    host = PluginHost()
    host.load(Origin("cpu", "deepinfer.cpu.descriptor", "deepinfer-core", "0.1.0"))
    host.load(Origin("deepseek_v41", "deepinfer.models.deepseek_v41.descriptor", "deepinfer-core", "0.1.0"))
    for module in (backends, doctor, env):
        monkeypatch.setattr(module, "default_host", lambda: host)
    return host


def test_list(host):
    done = invoke("backends")
    assert done.exit_code == 0
    assert "cpu *" in done.stdout
    assert "* would run (no accelerator plugin is installed)" in done.stdout
    assert invoke("backends", "list").stdout == done.stdout
    report = json.loads(invoke("backends", "list", "--json").stdout)
    assert report["selection"] == {
        "asked": "auto",
        "selected": "cpu",
        "because": "no accelerator plugin is installed",
        "notices": [],
    }
    assert [row["name"] for row in report["backends"]] == ["cpu"]


def test_list_shows_failed_plugins_and_why_nothing_would_run(host):
    host.load(Origin("acme", "no_such_descriptor", "acme-dist", "1.4"))
    done = invoke("backends")
    assert done.exit_code == 0
    assert "Plugins that are not used" in done.stdout
    assert "acme-dist" in done.stdout
    assert "No module named 'no_such_descriptor'" in done.stdout
    assert "DEEPINFER_ACCELERATOR=cpu" in done.stdout


def test_info(host):
    report = json.loads(invoke("backends", "info", "cpu", "--json").stdout)
    assert report["capabilities"]["row_invariant"] is True
    assert report["api"] == [1, 0]
    assert report["distribution"] == "deepinfer-core"
    assert "Capabilities" in invoke("backends", "info", "cpu").stdout


def test_ops(host, monkeypatch):
    report = json.loads(invoke("backends", "ops", "cpu", "--json").stdout)
    rows = {row["op"]: row for row in report["ops"]}
    assert rows["linear"]["kind"] == "native"
    assert rows["moe_block"]["kind"] == "composite"
    assert report["unreachable"] == []
    monkeypatch.setenv("DEEPINFER_OPS", "linear=reference")
    changed = json.loads(invoke("backends", "ops", "cpu", "--json").stdout)
    assert {row["op"]: row for row in changed["ops"]}["linear"]["reasons"] == ["override linear=reference"]
    assert changed["numerics_id"] != report["numerics_id"]
    assert "override linear=reference" in invoke("backends", "ops", "cpu").stdout


def test_unknown_backend_gives_the_pip_line(host):
    done = invoke("backends", "ops", "nvidia")
    assert "there is no backend 'nvidia'; installed: cpu; to install it: pip install deepinfer-backend-cuda" in str(
        done.exception
    )


def test_doctor_is_content(host):
    done = invoke("doctor")
    assert done.exit_code == 0, done.stdout
    assert "0 failures" in done.stdout
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["ok"] is True


def statuses():
    done = invoke("doctor", "--json")
    report = json.loads(done.stdout)
    return done.exit_code, {check["name"]: check for check in report["checks"]}


def test_doctor_warns_about_unknown_variables(host, monkeypatch):
    monkeypatch.setenv("DEEPINFER_ACELERATOR", "cpu")
    code, checks = statuses()
    assert code == 0
    found = checks["variable DEEPINFER_ACELERATOR"]
    assert found["status"] == "warning"
    assert "did you mean DEEPINFER_ACCELERATOR?" in found["detail"]


def test_doctor_fails_on_wrong_settings_and_failed_plugins(host, monkeypatch):
    monkeypatch.setenv("DEEPINFER_FALLBACK", "perhaps")
    host.load(Origin("acme", "no_such_descriptor", "acme-dist", "1.4"))
    code, checks = statuses()
    assert code == 1
    assert checks["settings"]["status"] == "failure"
    assert "DEEPINFER_FALLBACK: 'perhaps'" in checks["settings"]["detail"]
    assert checks["plugin acme"]["status"] == "failure"
    assert "acme-dist 1.4" in checks["plugin acme"]["detail"]
    assert "DEEPINFER_PLUGINS=-acme" in checks["plugin acme"]["fix"]
    assert checks["selection"]["status"] == "failure"


def test_doctor_fails_on_a_kernel_that_no_graph_reaches(host, monkeypatch):
    monkeypatch.setattr("deepinfer.cli.reports.graph_ops", lambda host: ["embedding"])
    code, checks = statuses()
    assert code == 1
    assert checks["kernel linear"]["status"] == "failure"
    assert "backend 'cpu' registers it, but no graph can ever reach it" in checks["kernel linear"]["detail"]


def test_doctor_survives_a_backend_that_fails_in_any_way(host, monkeypatch):
    def fail(name):
        raise MemoryError("no luck")

    monkeypatch.setattr(host, "load_backend", fail)
    code, checks = statuses()
    assert code == 1
    assert checks["backend cpu"]["detail"] == "MemoryError: no luck"


def test_env(host):
    report = json.loads(invoke("env", "--json").stdout)
    assert report["versions"]["torch"].startswith("2.")
    assert report["plugins"]["cpu"] == "loaded, deepinfer-core 0.1.0"
    assert report["registered"]["models"].startswith("deepseek_v41 (deepinfer-core ")
    assert report["registered"]["observers"] == "none"
    assert report["settings"]["DEEPINFER_ACCELERATOR"] == "auto"
    assert report["numerics"]["numerics id"].startswith("n1-")
    assert report["numerics"]["numerics"]["compute_dtype"] == "bfloat16"
    assert "num_threads" in report["process-wide torch settings"]
    text = invoke("env").stdout
    for section in (
        "versions:",
        "machine:",
        "plugins:",
        "registered:",
        "settings:",
        "numerics:",
        "process-wide torch settings:",
    ):
        assert section in text


def test_env_reports_numerics_that_cannot_be(host, monkeypatch):
    monkeypatch.setenv("DEEPINFER_OPS", "linaer=native")
    report = json.loads(invoke("env", "--json").stdout)
    assert "there is no operation 'linaer'; did you mean 'linear'?" in report["numerics"]["error"]


def test_typed_error_is_one_message_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_FALLBACK", "x")
    monkeypatch.setattr(sys, "argv", ["deepinfer", "env"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == "ConfigError: DEEPINFER_FALLBACK: 'x' is not allowed; allowed: allow, warn, error"


def test_wrong_log_level_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "loud")
    monkeypatch.setattr(sys, "argv", ["deepinfer", "backends"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "DEEPINFER_LOG_LEVEL: 'loud' is not allowed; allowed: debug, info, warning, error" in capsys.readouterr().err


def test_list_needs_no_torch_and_only_its_own_command():
    code = (
        "import sys, deepinfer.cli\nsys.argv = ['deepinfer', 'backends', 'list']\n"
        "try:\n    deepinfer.cli.main()\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'deepinfer.cli.doctor', 'deepinfer.cli.checkpoint'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version():
    done = CliRunner().invoke(build_app(["backends"]), ["--version"])
    assert done.stdout.startswith("deepinfer 0.")

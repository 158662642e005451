"""Discovery, isolation, handshake, name clashes: every message names distribution, version and cause."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer.api.descriptor import API_VERSION, BackendDescriptor, Probe
from deepinfer.errors import ConfigError, PluginError
from deepinfer.plugins import hookspecs
from deepinfer.plugins.host import BUILT_IN, PluginHost, _admitted
from deepinfer.plugins.registry import Origin, Registry


def test_core_comes_through_the_same_door():
    host = PluginHost.discover()
    assert [record.status for record in host.records if record.origin.distribution == "deepinfer-core"] == [
        "loaded"
    ] * 2
    assert host.backends.get("cpu").origin.distribution == "deepinfer-core"
    assert host.model_for("DeepseekV41ForCausalLM").descriptor.name == "deepseek_v41"


def test_built_in_table_equals_the_entry_points_of_core():
    pyproject = Path(__file__).parents[3] / "deepinfer-core" / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["project"]["entry-points"]["deepinfer.plugins"]
    assert declared == BUILT_IN


def test_import_error_is_isolated_and_reported(workshop):
    record = workshop.load(
        "import no_such_module_anywhere", entry_point="acme", distribution="acme-dist", version="3.4"
    )
    workshop.backend("good")
    assert record.status == "failed"
    assert "plugin 'acme' of acme-dist 3.4" in record.error
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in record.error
    assert "Traceback" in record.traceback
    assert record.may_offer_backend
    assert workshop.host.backends.names() == ["good"]


def test_exit_at_import_does_not_end_the_process(workshop):
    record = workshop.load("import sys; sys.exit(3)")
    assert record.status == "failed"
    assert "SystemExit: 3" in record.error


def test_hook_that_raises_withdraws_everything(workshop):
    source = """
    from deepinfer.api.descriptor import BackendDescriptor

    def deepinfer_register_backends(registry):
        registry.add(BackendDescriptor(name="half", api=(1, 0), module="a:b"))
        raise RuntimeError("changed my mind")
    """
    record = workshop.load(source)
    assert record.status == "failed"
    assert "RuntimeError: changed my mind" in record.error
    assert workshop.host.backends.names() == []
    assert not workshop.host.manager.get_plugins() - {None}


def test_hook_without_specification_is_refused_with_the_nearest_name(workshop):
    record = workshop.load("def deepinfer_register_backend(registry): pass", distribution="typo-dist", version="0.9")
    assert record.status == "failed"
    assert "typo-dist 0.9 implements a hook that DeepInfer does not have" in record.error
    assert "'deepinfer_register_backend' (did you mean 'deepinfer_register_backends'?)" in record.error
    good = workshop.backend("good")
    assert good.status == "loaded"


def test_hook_with_foreign_argument_is_refused(workshop):
    record = workshop.load("def deepinfer_register_backends(registry, wishes): pass")
    assert record.status == "failed"
    assert "wishes" in record.error


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [
        ((API_VERSION[0] + 1, 0), "deepinfer-core"),
        ((API_VERSION[0], API_VERSION[1] + 1), "deepinfer-core"),
        ((API_VERSION[0] - 1, 9), "dist-acme"),
    ],
)
def test_handshake_says_which_side_to_upgrade(workshop, api, upgrade):
    record = workshop.backend("acme", api=api, module="must_not_be_imported:create", version="2.0")
    assert record.status == "failed"
    assert f"plugin API {api[0]}.{api[1]}" in record.error
    assert f"offers {API_VERSION[0]}.{API_VERSION[1]}" in record.error
    assert "dist-acme 2.0" in record.error
    assert f"pip install --upgrade {upgrade})" in record.error
    assert "must_not_be_imported" not in sys.modules


def test_malformed_api(workshop):
    assert "must give api as (major, minor), found '1.0'" in workshop.backend("acme", api="1.0").error


def test_name_offered_twice_is_refused_for_both_naming_both(workshop):
    workshop.backend("acme", distribution="first-dist", version="1.0")
    record = workshop.backend("acme", distribution="second-dist", version="2.0")
    assert record.status == "failed"
    assert "'acme' is offered by first-dist 1.0 and second-dist 2.0" in record.error
    assert workshop.host.backends.get("acme") is None
    third = workshop.backend("acme", distribution="third-dist", version="3.0")
    assert "first-dist 1.0 and second-dist 2.0 and third-dist 3.0" in third.error


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_core_names_are_reserved(workshop, name):
    record = workshop.backend(name, distribution="rogue", version="6.6")
    assert f"backend name '{name}' is reserved (the backend of deepinfer-core" in record.error
    assert "rogue 6.6 offers it too" in record.error


@pytest.mark.parametrize("name", ["auto", "reference", "native", "composite", "none"])
def test_words_of_the_settings_are_reserved(workshop, name):
    assert f"backend name '{name}' is reserved (a word of the settings" in workshop.backend(name).error


def test_malformed_name_and_module(workshop):
    assert "name 'Acme Corp' is malformed" in workshop.backend("Acme Corp").error
    assert (
        "must name its heavy module as text 'package.module:function'" in workshop.backend("acme", module="nope").error
    )


def test_registry_refuses_other_types_and_other_times():
    registry = Registry("backend", BackendDescriptor)
    with pytest.raises(PluginError, match="only inside a registration hook"):
        registry.add(BackendDescriptor("a", (1, 0), "a:b"))
    registry.begin(Origin("e", "m", "dist", "1"))
    with pytest.raises(PluginError, match="dist 1: expected a BackendDescriptor in the backend registry, found dict"):
        registry.add({"name": "a"})


def test_probe_answers(workshop):
    workshop.backend("yes", probe="return Probe.match(devices=2)")
    workshop.backend("no", probe="return Probe.no_match('no board', 'no driver', hardware_present=False)")
    workshop.backend("bad", probe="raise OSError('bus error')")
    workshop.backend("odd", probe="return True")
    probe = workshop.host.probe
    assert probe("yes") == Probe("match", devices=2, hardware_present=True)
    assert probe("no").reasons == ("no board", "no driver")
    assert probe("bad").status == "error"
    assert probe("bad").reasons == ("OSError: bus error",)
    assert "Traceback" in probe("bad").traceback
    assert probe("odd").reasons == ("TypeError: probe() must return a Probe, found bool",)
    with pytest.raises(ValueError, match="at least one reason"):
        Probe.no_match(hardware_present=True)


def test_probe_is_asked_once(workshop):
    workshop.backend("acme", probe="calls.append(1); return Probe.match()\n\ncalls = []")
    workshop.host.probe("acme")
    workshop.host.probe("acme")
    module = sys.modules[workshop.host.backends.get("acme").origin.module]
    assert len(module.calls) == 1


def test_heavy_import_failure_names_distribution_version_and_cause(workshop):
    workshop.backend("acme", module="no_such_heavy_module:create", version="7.1")
    with pytest.raises(
        PluginError, match=r"'acme' of dist-acme 7\.1.*No module named 'no_such_heavy_module'"
    ) as caught:
        workshop.host.load_backend("acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_factory_must_return_a_backend_of_that_name(workshop, tmp_path):
    (tmp_path / "fake_heavy.py").write_text("def create(): return 3\ndef fail(): raise ValueError('no')\n")
    workshop.backend("acme", module="fake_heavy:create")
    with pytest.raises(PluginError, match=r"must return a deepinfer.api.backend.Backend named 'acme', found int"):
        workshop.host.load_backend("acme")
    workshop.backend("other", module="fake_heavy:fail")
    with pytest.raises(PluginError, match=r"dist-other 1\.2: fake_heavy:fail raised ValueError: no"):
        workshop.host.load_backend("other")


def test_codecs_in_order_and_first_result(workshop):
    late = """
    from deepinfer.api.descriptor import hookimpl

    @hookimpl(trylast=True)
    def deepinfer_make_codec(model_dir, model_type):
        return "generic"
    """
    workshop.load("def deepinfer_make_codec(model_type): return 'special' if model_type == 'v41' else None", "special")
    workshop.load(late, "generic")
    make = workshop.host.make_codec
    assert make(Path("d"), "v41", Path("t")) == "special"
    assert make(Path("d"), "other", Path("t")) == "generic"


def test_codec_failure_names_the_plugin_and_tries_no_other(workshop):
    workshop.load("def deepinfer_make_codec(): return 'never'", "generic")
    workshop.load("def deepinfer_make_codec(): raise OSError('torn file')", "special", "special-dist")
    with pytest.raises(
        PluginError, match=r"plugin special \(special-dist\): deepinfer_make_codec raised OSError: torn file"
    ):
        workshop.host.make_codec(Path("d"), "v41", Path("t"))


def test_model_clash_and_unknown_architecture(workshop):
    source = """
    from deepinfer.api.descriptor import ModelDescriptor

    def deepinfer_register_models(registry):
        registry.add(ModelDescriptor(name="{0}", api=(1, 0), module="a:b", architectures=("Net",)))
    """
    workshop.load(source.format("one"), distribution="d1", version="1")
    assert workshop.host.model_for("Net").descriptor.name == "one"
    with pytest.raises(ConfigError, match=r"architectures: 'Other' is served by no installed plugin; served: Net"):
        workshop.host.model_for("Other")
    workshop.load(source.format("two"), distribution="d2", version="2")
    with pytest.raises(PluginError, match=r"'one' of d1 1 and 'two' of d2 2"):
        workshop.host.model_for("Net")


def test_cli_extension_failure_is_isolated(workshop, caplog):
    workshop.load("def deepinfer_extend_cli(app): raise RuntimeError('boom')", "bad", "bad-dist")
    workshop.load("def deepinfer_extend_cli(app): app.append('command')", "good")
    app = []
    failed = workshop.host.extend_cli(app)
    assert app == ["command"]
    assert [record.origin.distribution for record in failed] == ["bad-dist"]
    assert "bad-dist 1.2: deepinfer_extend_cli raised RuntimeError: boom" in caplog.text


def test_allow_and_deny():
    names = ["cpu", "deepseek_v41", "acme"]
    assert _admitted("", names) == set(names)
    assert _admitted("-acme", names) == {"cpu", "deepseek_v41"}
    assert _admitted("cpu, acme", names) == {"cpu", "acme"}
    with pytest.raises(ConfigError, match=r"DEEPINFER_PLUGINS: no installed plugin is named 'acne'; installed: cpu"):
        _admitted("-acne", names)


def test_left_out_plugin_is_recorded():
    host = PluginHost.discover("-cpu")
    assert {record.origin.entry_point: record.status for record in host.records}["cpu"] == "left out"
    assert host.backends.names() == [name for name in host.backends.names() if name != "cpu"]


def test_every_hook_says_when_it_is_called():
    hooks = [getattr(hookspecs, name) for name in vars(hookspecs) if name.startswith("deepinfer_")]
    assert len(hooks) == 7
    assert all(re.search("[Cc]alled once", hook.__doc__) for hook in hooks)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_light_modules_import_no_torch():
    code = (
        "import sys, deepinfer, deepinfer.api.descriptor, deepinfer.api.errors, deepinfer.cpu.descriptor, "
        "deepinfer.models.deepseek_v41.descriptor\n"
        "heavy = {'torch', 'numpy', 'pluggy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_discovery_and_selection_import_no_torch():
    code = (
        "import sys\nfrom deepinfer.plugins.host import default_host\n"
        "from deepinfer.plugins.selection import select_accelerator\n"
        "assert select_accelerator(default_host(), 'cpu').name == 'cpu'\n"
        "assert 'torch' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_descriptor_module_is_fast():
    code = (
        "import time, deepinfer.api.descriptor\nstart = time.perf_counter()\nimport deepinfer.cpu.descriptor\n"
        "print(time.perf_counter() - start)"
    )
    best = min(float(run_python(code).stdout) for _ in range(3))
    assert best < 0.010, f"{best * 1e3:.1f} ms"

"""Selection: argument > variable > auto; the CPU never hides a fault."""

from __future__ import annotations

import pytest

from deepinfer.errors import AcceleratorUnavailable, ConfigError, PluginError
from deepinfer.plugins.selection import select_accelerator, select_backend

ABSENT = "return Probe.no_match('no board in this machine', hardware_present=False)"
PRESENT = "return Probe.no_match('driver too old: 11 < 12', 'no compiler', hardware_present=True)"


def test_cpu_when_nothing_is_installed(workshop):
    workshop.core()
    selection = select_accelerator(workshop.host, "auto")
    assert selection.name == "cpu"
    assert selection.because == "no accelerator plugin is installed"
    assert selection.notices == ()


def test_the_only_match_wins(workshop):
    workshop.core()
    workshop.backend("acme")
    workshop.backend("other", probe=ABSENT)
    selection = select_accelerator(workshop.host, "")
    assert selection.name == "acme"
    assert "dist-acme 1.2" in selection.because
    assert selection.notices == ("'other' of dist-other 1.2 is not used: no board in this machine",)


def test_two_matches_need_a_choice(workshop):
    workshop.core()
    workshop.backend("acme")
    workshop.backend("bolt")
    with pytest.raises(ConfigError) as caught:
        select_accelerator(workshop.host, "auto")
    text = str(caught.value)
    assert caught.value.field == "DEEPINFER_ACCELERATOR"
    assert "'acme' (dist-acme 1.2) and 'bolt' (dist-bolt 1.2)" in text
    assert "DEEPINFER_ACCELERATOR=acme" in text
    assert select_accelerator(workshop.host, "bolt").name == "bolt"


def test_absent_hardware_leaves_the_cpu_working_with_a_notice(workshop):
    workshop.core()
    workshop.backend("acme", probe=ABSENT)
    selection = select_accelerator(workshop.host, "auto")
    assert selection.name == "cpu"
    assert selection.notices == ("'acme' of dist-acme 1.2 is not used: no board in this machine",)


def test_present_but_unusable_hardware_is_an_error_with_all_reasons(workshop):
    workshop.core()
    workshop.backend("acme", probe=PRESENT)
    with pytest.raises(AcceleratorUnavailable) as caught:
        select_accelerator(workshop.host, "auto")
    text = str(caught.value)
    assert "'acme' of dist-acme 1.2 is not used: driver too old: 11 < 12; no compiler" in text
    assert "DEEPINFER_ACCELERATOR=cpu" in text
    assert select_accelerator(workshop.host, "cpu").name == "cpu"


def test_failed_probe_is_an_error(workshop):
    workshop.core()
    workshop.backend("acme", probe="raise OSError('bus error')")
    with pytest.raises(AcceleratorUnavailable, match="OSError: bus error"):
        select_accelerator(workshop.host, "auto")
    with pytest.raises(AcceleratorUnavailable, match="its probe failed: OSError: bus error") as caught:
        select_accelerator(workshop.host, "acme")
    assert "Traceback" in str(caught.value)


def test_failed_plugin_never_becomes_a_silent_cpu(workshop):
    workshop.core()
    workshop.load("raise ImportError('libacme.so.3 not found')", "acme", "acme-dist", "1.4")
    with pytest.raises(AcceleratorUnavailable, match=r"plugin 'acme' of acme-dist 1\.4.*libacme\.so\.3 not found"):
        select_accelerator(workshop.host, "auto")
    with pytest.raises(
        PluginError, match=r"accelerator 'acme' was asked for, but plugin 'acme' of acme-dist 1\.4"
    ) as caught:
        select_accelerator(workshop.host, "acme")
    assert isinstance(caught.value.__cause__, ImportError)
    assert select_accelerator(workshop.host, "cpu").name == "cpu"


def test_failed_plugin_beside_a_match_is_a_notice(workshop):
    workshop.core()
    workshop.load("raise ImportError('broken')", "acme", "acme-dist", "1.4")
    workshop.backend("bolt")
    selection = select_accelerator(workshop.host, "auto")
    assert selection.name == "bolt"
    assert "acme-dist 1.4" in selection.notices[0]


def test_failed_plugin_without_backends_does_not_stop_the_cpu(workshop):
    workshop.core()
    source = "def deepinfer_register_observers(registry): raise RuntimeError('no')"
    assert not workshop.load(source, "watch").may_offer_backend
    assert select_accelerator(workshop.host, "auto").name == "cpu"


def test_clash_is_an_error_under_auto_and_by_name(workshop):
    workshop.core()
    workshop.backend("acme", distribution="d1", version="1")
    workshop.backend("acme", distribution="d2", version="2")
    with pytest.raises(AcceleratorUnavailable, match="'acme' is offered by d1 1 and d2 2"):
        select_accelerator(workshop.host, "auto")
    with pytest.raises(PluginError, match="'acme' is offered by d1 1 and d2 2"):
        select_accelerator(workshop.host, "acme")


@pytest.mark.parametrize(
    ("name", "distribution"), [("nvidia", "deepinfer-backend-cuda"), ("ascend", "deepinfer-backend-ascend")]
)
def test_missing_accelerator_gives_the_pip_line(workshop, name, distribution):
    workshop.core()
    workshop.backend("acme", probe=ABSENT)
    with pytest.raises(AcceleratorUnavailable) as caught:
        select_accelerator(workshop.host, name)
    text = str(caught.value)
    assert f"accelerator '{name}' is not available: no installed plugin offers it" in text
    assert f"pip install {distribution}" in text
    assert "cpu (deepinfer-core 0.1.0: can run here)" in text
    assert "acme (dist-acme 1.2: no board in this machine)" in text
    assert "DEEPINFER_ACCELERATOR=cpu" in text


def test_asked_name_is_binding(workshop):
    workshop.core()
    workshop.backend("acme", probe=ABSENT)
    workshop.backend("bolt")
    with pytest.raises(
        AcceleratorUnavailable, match=r"dist-acme 1\.2 offers it, but it cannot run on this machine: no board"
    ) as caught:
        select_accelerator(workshop.host, "ACME ")
    assert "pip install" not in str(caught.value)


def test_select_backend_builds_the_cpu_and_logs_notices(workshop, caplog):
    workshop.core()
    workshop.backend("acme", probe=ABSENT)
    backend, selection = select_backend("auto", workshop.host)
    assert backend.name == selection.name == "cpu"
    assert "'acme' of dist-acme 1.2 is not used: no board in this machine" in caplog.text

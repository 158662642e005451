"""Every check of the repository, each in an environment that it makes itself (`nox -l` lists them)."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "docs", "tests"]

BACKENDS = ("-e", "./deepinfer-backend-cuda", "-e", "./deepinfer-backend-ascend")
PLUGINS = ("-e", "./deepinfer-recipe-bindings", *BACKENDS)
PACKAGES = ("-e", "./deepinfer-core", *PLUGINS)
EXTRAS = ("-e", "./deepinfer-core[structured]", *PLUGINS)
GROUPS = nox.project.load_toml("pyproject.toml")


def _install(session: nox.Session, group: str, packages: tuple[str, ...] = PACKAGES) -> None:
    """Install the distributions together with a dependency group of the root pyproject.toml."""
    session.install("-q", *nox.project.dependency_groups(GROUPS, group), *packages)


def _pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    _install(session, "test", EXTRAS)
    environment |= {
        # Tiny products gain nothing from threads; on a busy machine, threads that wait cost a factor of ten.
        "OMP_NUM_THREADS": "1",
        # Tests of the optional extra must not be skipped where it is installed on purpose.
        "DEEPINFER_TEST_STRUCTURED": "1",
    }
    # A file stays on one process, so that models are loaded once; two processes already halve the time.
    workers = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
    session.run("pytest", "-q", "--durations=10", *workers, *arguments, *session.posargs, env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole default suite: everything but what is marked slow. Contracts meet the same data in every run."""
    _pytest(session, DEEPINFER_TEST_CONTRACT_SEED="0")


@nox.session
def full(session: nox.Session) -> None:
    """Run everything, slow tests included; contracts on fresh data."""
    _pytest(session, "-m", "slow or not slow")


@nox.session
def golden(session: nox.Session) -> None:
    """Compare loader, graph, drafter and public API with the independent golden results."""
    _pytest(session, "-m", "slow or not slow", "tests/golden")


@nox.session
def contracts(session: nox.Session) -> None:
    """Run the contract tests of every operation; `nox -s contracts -- --backend NAME` for another backend."""
    _pytest(session, "tests/contracts")


@nox.session(python="3.11")
def ascend(session: nox.Session) -> None:
    """Test the Ascend backend on the real torch_npu over a simulated runtime, in an environment of its own.

    With torch-npu installed and no CANN, `import torch` alone fails, so no other session may share this environment.
    """
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    _install(session, "test", (*EXTRAS, "torch-npu==2.13.0", "pyyaml"))
    build = session.create_tmp()
    session.run("python", "tests/ascend_sim/build.py", build, env=environment)
    environment |= {"DEEPINFER_TEST_ASCEND_SIM": build, "PYTHONPATH": "tests"}
    plugin = ("-q", "-p", "ascend_sim.plugin")
    session.run("pytest", *plugin, "tests/ascend_sim", "tests/ascend950", *session.posargs, env=environment)
    session.run("pytest", *plugin, "tests/contracts", "--backend", "ascend", env=environment)


@nox.session
def cubins(session: nox.Session) -> None:
    """Compile every NVIDIA kernel for sm_90 and sm_100 without a GPU; `-- --op NAME --arch 90` for less."""
    _install(session, "test")
    session.run("python", "benchmarks/cubins.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, types and import rules."""
    _install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports", "--no-cache")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; any warning is an error. `nox -s docs -- serve` shows it while editing."""
    _install(session, "docs")
    command = session.posargs or ["build", "--strict"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the engine on the CPU backend; `nox -s bench -- --into docs/benchmarks/cpu.md` renews the page."""
    _install(session, "bench")
    session.run("python", "benchmarks/cpu.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})

"""Compiles every kernel of the NVIDIA backend for GPUs that are not there, and says what became of it.

Each operation is called on the sample inputs of its contract, at the released widths where it has such, but nothing is
launched: Triton compiles for the wanted architecture what the call would launch. Every operation and architecture has a
process of its own, so that a compiler that aborts or never ends is one failed line of the report.

    python benchmarks/cubins.py [--arch 90 100] [--op NAME ...] [--output cubins.json]

The exit status is 1 if a kernel could not be compiled, or if the experts' kernel lacks the matrix instructions that its
architecture has for FP8.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ARCHITECTURES = (90, 100)
TIME_LIMIT = 300.0
MATRIX_INSTRUCTIONS = re.compile(r"\b(wgmma\.mma_async\S*|tcgen05\.mma\S*|mma\.sync\S*)")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
WANTED = {"expert_ffn": {90: ("wgmma", "e4m3"), 100: ("tcgen05", "f8f6f4")}}
"""Parts of a matrix instruction that a kernel of an operation must hold, by architecture."""


def operations() -> list[str]:
    """Operations for which the backend brings kernels."""
    from deepinfer.api.backend import Numerics
    from deepinfer_cuda.table import native_kernels

    return sorted(native_kernels(Numerics()))


# ---- in a process of its own ---------------------------------------------------------------------------------------


class AbsentDevice:
    """What Triton asks of its driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0


def compile_operation(op: str, architecture: int) -> list[dict[str, Any]]:
    """Compile what an operation launches; kernels whose compilation raises are reported, not raised."""
    import torch
    import triton
    from torch.overrides import TorchFunctionMode
    from triton.runtime.jit import JITFunction

    from deepinfer.conformance import Suite

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.cuda.interpreted import InterpretedBackend

    class Defined(TorchFunctionMode):
        """Results of kernels that never ran are zeros, which every consumer can take as ids, counts and places."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            function = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}.get(function, function)
            return function(*args, **(kwargs or {}))

    found: dict[str, dict[str, Any]] = {}
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        name = self.fn.__name__
        try:
            kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            found.setdefault(name, {"kernel": name, "error": f"{type(error).__name__}: {error}"[:2000]})
            return None
        entry = describe(name, kernel)
        found.setdefault(entry["hash"], entry)
        return kernel

    triton.runtime.driver.set_active(AbsentDevice(architecture))
    suite = Suite(InterpretedBackend(), seed=0)
    with mock.patch.object(JITFunction, "run", run), Defined(), torch.inference_mode():
        for dtype in suite.dtypes_of(suite.contracts[op]):
            target = suite.target(dtype, False)
            for sample in suite.samples(op, "real"):
                target.run(op, target.arguments(suite.contracts[op], sample.kwargs))
    return list(found.values())


def describe(name: str, kernel: Any) -> dict[str, Any]:
    """Registers, stack (spills and local arrays), shared memory and matrix instructions of a compiled kernel."""
    from triton import knobs

    tool = Path(knobs.nvidia.cuobjdump.path)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = RESOURCES.search(shown)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing of {name}: {shown}")
    registers, stack, _, local = map(int, match.groups())
    instructions = sorted({found.rstrip(";") for found in MATRIX_INSTRUCTIONS.findall(kernel.asm["ptx"])})
    return {
        "kernel": name,
        "hash": kernel.hash,
        "registers": registers,
        "stack_bytes": stack + local,
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "matrix_instructions": instructions,
    }


# ---- all of them ---------------------------------------------------------------------------------------------------


def compile_apart(op: str, architecture: int) -> dict[str, Any]:
    """The report of one operation and architecture, whatever its process does."""
    command = [sys.executable, __file__, "--only", op, "--arch", str(architecture)]
    line: dict[str, Any] = {"op": op, "architecture": architecture, "kernels": [], "error": None}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return line | {"error": f"not done after {TIME_LIMIT:.0f} s"}
    if done.returncode:
        return line | {"error": f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}"}
    line["kernels"] = json.loads(done.stdout.strip().splitlines()[-1])
    kinds = [kind for kernel in line["kernels"] for kind in kernel.get("matrix_instructions", ())]
    wanted = WANTED.get(op, {}).get(architecture, ())
    if wanted and not any(all(part in kind for part in wanted) for kind in kinds):
        line["error"] = f"no matrix instruction with {' and '.join(wanted)}"
    return line


def problems(report: list[dict[str, Any]]) -> list[str]:
    """What failed, one line each."""
    lines = []
    for line in report:
        where = f"{line['op']} on sm_{line['architecture']}"
        lines += [f"{where}: {line['error']}"] if line["error"] else []
        lines += [f"{where}, {item['kernel']}: {item['error']}" for item in line["kernels"] if "error" in item]
    return lines


def table(report: list[dict[str, Any]]) -> str:
    """Markdown: the worst variant of every kernel and architecture."""
    worst: dict[tuple[str, int], dict[str, Any]] = {}
    for line in report:
        for item in line["kernels"]:
            if "error" in item:
                continue
            entry = worst.setdefault((item["kernel"], line["architecture"]), {**item, "variants": set()})
            entry["variants"].add(item["hash"])
            for name in ("registers", "stack_bytes", "shared_bytes"):
                entry[name] = max(entry[name], item[name])
            entry["matrix_instructions"] = sorted({*entry["matrix_instructions"], *item["matrix_instructions"]})
    rows = ["| kernel | arch | variants | registers | stack bytes | shared bytes | matrix instructions |"]
    rows.append("|---|---|---:|---:|---:|---:|---|")
    for (name, architecture), item in sorted(worst.items()):
        kinds = sorted({".".join(kind.split(".")[:2]) for kind in item["matrix_instructions"]})
        numbers = (len(item["variants"]), item["registers"], item["stack_bytes"], item["shared_bytes"])
        rows.append(f"| `{name}` | sm_{architecture} | " + " | ".join(map(str, numbers)) + f" | {', '.join(kinds)} |")
    return "\n".join(rows)


def main() -> int:
    """Compile and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="as in sm_90")
    parser.add_argument("--op", nargs="+", help="operations; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at the same time")
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(compile_operation(options.only, options.arch[0])))
        return 0
    pairs = [(op, architecture) for architecture in options.arch for op in options.op or operations()]
    with ThreadPoolExecutor(options.jobs) as pool:
        report = list(pool.map(lambda pair: compile_apart(*pair), pairs))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    found = problems(report)
    print("\n".join(found), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

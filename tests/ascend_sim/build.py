"""Builds the simulated runtime from the sources beside it and the headers of the installed torch_npu wheel.

`python tests/ascend_sim/build.py FOLDER` fills the folder with libascendcl, libhccl, stubs of the other libraries that
torch_npu links to, and the extension `simulated_operators`. Needs g++.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
STUBS = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""Libraries that torch_npu links to and from which it needs nothing here."""

SUCCEED = (
    "aclopSetAttrBool",
    "aclopSetAttrDataType",
    "aclopSetAttrFloat",
    "aclopSetAttrInt",
    "aclopSetAttrListBool",
    "aclopSetAttrListFloat",
    "aclopSetAttrListInt",
    "aclopSetAttrListListInt",
    "aclopSetAttrString",
    "aclopDestroyAttr",
    "aclSetTensorFormat",
    "aclSetTensorPlaceMent",
    "aclSetTensorShape",
    "aclSetTensorDescName",
    "aclDestroyDataBuffer",
    "aclDestroyTensorDesc",
    "MsprofGetHashId",
    "MsprofRegisterCallback",
    "MsprofReportAdditionalInfo",
    "MsprofReportApi",
    "MsprofReportCompactInfo",
    "MsprofSysCycleTime",
    "aclGetTensorDescDimV2",
    "aclGetTensorDescFormat",
    "aclGetTensorDescNumDims",
    "aclGetTensorDescType",
    "aclSetCompileopt",
)
FAIL = (
    "aclopCompileAndExecute",
    "aclopCompileAndExecuteV2",
    "aclrtBinaryGetFunction",
    "aclrtBinaryLoadFromData",
    "aclrtGetFunctionAddr",
    "rtDevBinaryRegister",
    "rtFunctionRegister",
    "rtGetC2cCtrlAddr",
    "rtKernelLaunch",
    "aclmdlInitDump",
    "aclmdlSetDump",
    "aclmdlFinalizeDump",
)
MAKE = ("aclCreateDataBuffer", "aclCreateTensorDesc", "aclopCreateAttr")
NO_KERNEL = 500001


def compile_shared(output: Path, *arguments: object) -> None:
    command = ["g++", "-O1", "-w", "-std=c++20", "-shared", "-fPIC", "-o", output, *arguments]
    subprocess.run([str(part) for part in command], check=True)


def folder_of(package: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed here")
    return Path(spec.origin).parent


def write_stubs(path: Path) -> None:
    lines = [f"API long {name}() {{ return 0; }}" for name in SUCCEED]
    lines += [f"API int {name}() {{ return {NO_KERNEL}; }}" for name in FAIL]
    lines += [f"API void* {name}() {{ static char object[64]; return object; }}" for name in MAKE]
    prefix = '#define API extern "C" __attribute__((visibility("default")))\n'
    path.write_text(prefix + "\n".join(lines) + "\n")


def build(output: Path) -> None:
    """Fill a folder."""
    output.mkdir(parents=True, exist_ok=True)
    torch, npu = folder_of("torch"), folder_of("torch_npu")
    headers = [f"-I{NATIVE}", f"-I{npu / 'include'}", f"-I{npu / 'include/third_party/acl/inc'}"]
    write_stubs(output / "stubs.cpp")
    runtime = output / "libascendcl.so"
    compile_shared(
        runtime, *headers, NATIVE / "runtime.cpp", output / "stubs.cpp", "-Wl,-soname,libascendcl.so", "-pthread"
    )
    (output / "empty.cpp").write_text("")
    for name in STUBS:
        library = output / f"lib{name}.so"
        # torch_npu looks up its symbols through these libraries, so they must carry the runtime along.
        linked = ("-Wl,--no-as-needed", f"-L{output}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
        compile_shared(library, output / "empty.cpp", f"-Wl,-soname,{library.name}", *linked)
    hccl = npu / "include/third_party/hccl/inc"
    compile_shared(
        output / "libhccl.so", *headers, f"-I{hccl}", NATIVE / "hccl.cpp", "-Wl,-soname,libhccl.so", f"-L{output}",
        "-lascendcl", "-lrt", "-pthread",
    )  # fmt: skip
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = [f"-l{name}" for name in ("torch", "torch_cpu", "c10", "torch_python", "torch_npu", "ascendcl")]
    compile_shared(
        output / "simulated_operators.so", "-DTORCH_EXTENSION_NAME=simulated_operators", *headers,
        *(f"-I{folder}" for folder in include), NATIVE / "operators.cpp", f"-L{torch / 'lib'}", f"-L{npu / 'lib'}",
        f"-L{output}", *libraries, "-Wl,--allow-shlib-undefined",
    )  # fmt: skip


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())

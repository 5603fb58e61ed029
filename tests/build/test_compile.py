"""What nvcc makes of the kernels, without a GPU: no warnings, no spills, 16-byte accesses, every operator bound."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ls_train import build

ALLOWED_SPILLS: dict[tuple[str, str], int] = {
    # Rows of 4097 to 8192 half-precision columns only.
    ("layer_norm_bwd_kernel", "sm_75"): 32,
    # Heads of 32 only.
    ("attention_bwd_kernel", "sm_90"): 12,
    # Sequences of 65 to 128 tokens, so that two blocks fit.
    ("attention_bwd_block_kernel", "sm_90"): 20,
    # Heads of 33 to 64 in sequences beyond 128 tokens: so that four, two and three blocks fit.
    ("attention_fwd_long_kernel", "sm_80"): 20,
    ("attention_fwd_long_kernel", "sm_90"): 24,
    ("attention_bwd_long_dq_kernel", "sm_80"): 16,
    ("attention_bwd_long_dq_kernel", "sm_90"): 36,
    ("attention_bwd_long_keys_kernel", "sm_90"): 56,
}
"""(Kernel, target): largest number of bytes that one of its instantiations may spill, with the reason beside it."""

# Kernels that move no rows of activations: partial sums, counters, and fallbacks that go element by element (as do
# those called plain).
ELEMENTWISE = {
    "adam_prepare_kernel",
    "column_sum_kernel",
    "grad_norm_finish_kernel",
    "layer_norm_bwd_wide_columns_kernel",
    "layer_norm_bwd_wide_rows_kernel",
    "loss_scale_update_kernel",
}
READ_ONLY = {"cross_entropy_fwd_kernel", "grad_norm_kernel"}

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\S+)' for '(?P<arch>sm_\d+)'\n.*\n"
    r"\s*\d+ bytes stack frame, (?P<spilled>\d+) bytes spill stores"
)


def kernel_names() -> frozenset[str]:
    """Return the names of all kernels in the sources."""
    text = "\n".join(path.read_text() for path in build.SOURCE_DIR.glob("*.cu*"))
    return frozenset(re.findall(r"__global__ void[^{;]*?\b(\w+_kernel)\(", text))


KERNELS = kernel_names()


@functools.cache
def kernel_name(symbol: str) -> str:
    """Return the plain name of a mangled kernel, such as ``_ZN8ls_train11adam_kernelI6__halfEEv...``."""
    return next(name for name in sorted(KERNELS, key=len, reverse=True) if f"{len(name)}{name}" in symbol)


def types_of(kernel: str) -> set[str]:
    """Return the mangled types at which a kernel is to move 16 bytes at a time, none for those that need not."""
    if kernel in ELEMENTWISE or kernel.endswith("_plain_kernel"):
        return set()
    # Tensor-core products; attention in float32 takes the plain kernels.
    return {"6__half", "13__nv_bfloat16"} | (set() if kernel.startswith("attention") else {"f"})


def entries(ptx: Path) -> Iterator[tuple[str, str]]:
    """Yield (symbol, text) of every kernel in the PTX files of a folder."""
    for path in sorted(ptx.glob("*.ptx")):
        for part in re.split(r"\n(?=(?:\.weak |\.visible )?\.entry )", path.read_text())[1:]:
            yield re.search(r"\.entry (\w+)", part)[1], part


def test_compiles_without_warnings_for_every_target(compiled) -> None:
    assert "warning" not in compiled.log
    targets = {match["arch"] for match in _ENTRY.finditer(compiled.log)}
    assert targets == {"sm_75", "sm_80", "sm_90"}


def test_no_spills_outside_the_list(compiled) -> None:
    spills: dict[tuple[str, str], int] = defaultdict(int)
    for match in _ENTRY.finditer(compiled.log):
        kernel = kernel_name(match["symbol"]), match["arch"]
        spills[kernel] = max(spills[kernel], int(match["spilled"]))
    assert {name for name, _ in spills} == KERNELS
    too_many = {kernel: spilled for kernel, spilled in spills.items() if spilled > ALLOWED_SPILLS.get(kernel, 0)}
    assert not too_many, f"bytes of registers spilled to memory: {too_many}"
    assert ALLOWED_SPILLS.keys() <= spills.keys(), "ALLOWED_SPILLS names kernels that are gone"


def test_memory_bound_kernels_move_16_bytes(compiled) -> None:
    kernels: dict[str, set[str]] = defaultdict(set)
    for symbol, text in entries(compiled.ptx):
        name = kernel_name(symbol)
        types = re.search(r"_kernelI(?:6__half|13__nv_bfloat16|f)", symbol)
        kind = types[0][len("_kernelI") :] if types else ""
        kernels[name].add(kind)
        loads = re.search(r"ld\.global[.\w]*\.v4|cp\.async\.\w+\.shared\.global", text)
        stores = re.search(r"st\.global[.\w]*\.v4", text)
        if loads and (stores or name in READ_ONLY):
            kernels[name].add(f"{kind} in 16 bytes")
    assert kernels.keys() >= ELEMENTWISE | READ_ONLY
    for name, kinds in kernels.items():
        wanted = types_of(name)
        assert wanted <= kinds, f"{name} is missing a type: {kinds}"
        for kind in wanted:
            assert f"{kind} in 16 bytes" in kinds, f"{name} has no 16-byte accesses for type {kind}"


def test_library_loads_on_any_torch_and_has_every_operator(compiled) -> None:
    script = """
import importlib, pkgutil
import ls_train.ops
from ls_train import _library
for module in pkgutil.iter_modules(ls_train.ops.__path__):
    importlib.import_module(f"ls_train.ops.{module.name}")
assert len(_library.operator_names()) > 15
_library.load_cuda_library()
missing = [name for name in _library.operator_names() if not _library.has_cuda_implementation(name)]
assert not missing, f"operators without a CUDA implementation: {missing}"
"""
    environment = {**os.environ, "LS_TRAIN_LIBRARY": str(compiled.library)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_library_depends_on_torch_and_the_system_only(compiled) -> None:
    listed = subprocess.run(["readelf", "-d", str(compiled.library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed.stdout))
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert needed - system <= {"libtorch_cpu.so", "libc10.so"}


def test_include_rules() -> None:
    files = {path.name: path.read_text() for path in [*build.sources(), *build.headers()]}
    assert "bindings.cpp" in files
    for name, text in files.items():
        for header in re.findall(r'#include ["<]([^">]+)[">]', text):
            if name == "bindings.cpp":
                allowed = not header.startswith(("ATen", "c10", "torch")) or header.startswith(
                    ("torch/csrc/stable/", "torch/headeronly/")
                )
                assert allowed, f"{name} includes {header}, which is outside torch's stable ABI"
                assert not header.endswith(".cuh"), f"{name} includes {header}; bindings see launchers only"
            else:
                assert not header.startswith(("torch", "ATen", "c10", "Python")), f"{name} includes {header}"
        if name in ("device.cuh", "philox.cuh", "tensor_ref.h"):
            assert '"ops.h"' not in text, f"{name} is below ops.h"


def test_sources_stay_short() -> None:
    for path in build.sources():
        if path.suffix == ".cu":
            lines = len(path.read_text().splitlines())
            assert lines <= 300, f"{path.name} has {lines} lines; split it"

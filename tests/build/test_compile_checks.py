"""The compile check sees what it looks for: each of its tests fails on a library that breaks its rule."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.build import test_compile as checks
from tests.build.compilation import Compiled

TARGETS = ("sm_75", "sm_80", "sm_90")
TYPES = {"half": "6__half", "bfloat16": "13__nv_bfloat16", "float": "f"}
WIDE = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\nst.global.v4.u32 [%rd2], {%r1, %r2, %r3, %r4};\n"
NARROW = "ld.global.u16 %rs1, [%rd1];\nst.global.u16 [%rd2], %rs1;\n"


def symbol(kernel: str, kind: str) -> str:
    return f"_ZN8ls_train{len(kernel)}{kernel}I{TYPES[kind]}EEvPT_"


def log_of(spilled: dict[tuple[str, str], int], targets: tuple[str, ...] = TARGETS) -> str:
    """Return what ptxas prints for all kernels, with the bytes of ``spilled`` for (kernel, target)."""
    return "".join(
        f"ptxas info    : Compiling entry function '{symbol(kernel, 'half')}' for '{target}'\n"
        f"ptxas info    : Function properties for {symbol(kernel, 'half')}\n"
        f"    8 bytes stack frame, {spilled.get((kernel, target), 0)} bytes spill stores, 0 bytes spill loads\n"
        for kernel in sorted(checks.KERNELS)
        for target in targets
    )


@pytest.fixture
def library(tmp_path: Path):
    """Return a function that makes a library of all kernels from ptxas's log and the kernels without wide accesses."""

    def make(log: str = "", narrow: tuple[tuple[str, str], ...] = (), without: tuple[tuple[str, str], ...] = ()):
        text = "".join(
            f"\n.visible .entry {symbol(kernel, kind)}(\n{NARROW if (kernel, kind) in narrow else WIDE}}}\n"
            for kernel in sorted(checks.KERNELS)
            for kind in TYPES
            if (kernel, kind) not in without
        )
        (tmp_path / "all.ptx").write_text(text)
        return Compiled(tmp_path / "library.so", log or log_of({}), tmp_path)

    return make


def test_a_good_library_passes(library) -> None:
    checks.test_compiles_without_warnings_for_every_target(library())
    checks.test_no_spills_outside_the_list(library())
    checks.test_memory_bound_kernels_move_16_bytes(library())


def test_warnings_and_missing_targets_are_seen(library) -> None:
    with pytest.raises(AssertionError):
        checks.test_compiles_without_warnings_for_every_target(library(log_of({}) + "adam.cu(7): warning #177-D: x\n"))
    with pytest.raises(AssertionError):
        checks.test_compiles_without_warnings_for_every_target(library(log_of({}, TARGETS[:2])))


@pytest.mark.parametrize("target", TARGETS)
def test_spills_are_seen(library, target: str) -> None:
    for kernel in checks.KERNELS:
        allowed = checks.ALLOWED_SPILLS.get((kernel, target), 0)
        checks.test_no_spills_outside_the_list(library(log_of({(kernel, target): allowed})))
        with pytest.raises(AssertionError, match=kernel):
            checks.test_no_spills_outside_the_list(library(log_of({(kernel, target): allowed + 4})))


@pytest.mark.parametrize("kind", TYPES)
def test_narrow_accesses_and_missing_types_are_seen(library, kind: str) -> None:
    kernels = [kernel for kernel in checks.KERNELS if TYPES[kind] in checks.types_of(kernel)]
    assert "layer_norm_fwd_kernel" in kernels
    assert ("attention_bwd_kernel" in kernels) == (kind != "float")
    for kernel in kernels:
        with pytest.raises(AssertionError, match=f"{kernel} has no 16-byte accesses"):
            checks.test_memory_bound_kernels_move_16_bytes(library(narrow=((kernel, kind),)))
        with pytest.raises(AssertionError, match=f"{kernel} is missing a type"):
            checks.test_memory_bound_kernels_move_16_bytes(library(without=((kernel, kind),)))


def test_missing_operators_are_seen(library, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    subprocess.run(["gcc", "-shared", "-o", str(tmp_path / "library.so"), "-x", "c", "/dev/null"], check=True)
    with pytest.raises(AssertionError, match="operators without a CUDA implementation: .*layer_norm_fwd"):
        checks.test_library_loads_on_any_torch_and_has_every_operator(library())

"""Finding, building and caching the library, with stand-ins for nvcc and g++ that take no time."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest

from ls_train import build
from ls_train.build import BuildError

# Writes its output after the pause in $PAUSE, its dependencies, and a line a call into $CALLS.
_COMPILER = """#!/bin/sh
echo "$0 $*" >> "$CALLS"
sleep "${PAUSE:-0}"
if [ -n "$FAIL" ]; then echo "$FAIL"; exit 1; fi
while [ $# -gt 0 ]; do
  case "$1" in
    -MF) echo "out: " > "$2" ;;
    -o) echo compiled > "$2" ;;
  esac
  shift
done
"""


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit, a host compiler, two sources and an empty cache; returns the file that lists compiler calls."""
    home = tmp_path / "cuda"
    for name in ("bin/nvcc", "cxx"):
        tool = home / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(_COMPILER)
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    for name in ("include/cuda_runtime_api.h", "lib64/libcudart_static.a"):
        (home / name).parent.mkdir()
        (home / name).touch()
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "first.cu").write_text('#include "common.cuh"\n')
    (sources / "common.cuh").write_text("// nothing\n")
    (sources / "bindings.cpp").write_text("// nothing\n")
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    for name, value in {
        "CUDA_HOME": home,
        "CXX": home / "cxx",
        "CALLS": calls,
        "TORCH_EXTENSIONS_DIR": tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))
    for name in ("LS_TRAIN_LIBRARY", "FAIL", "PAUSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    return calls


def test_second_start_compiles_nothing(toolchain: Path) -> None:
    path = build.library_path()
    assert Path(path).read_text() == "compiled\n"
    calls = toolchain.read_text()
    assert calls.count("csrc/first.cu -o") == 1
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in calls
    assert build.library_path() == path
    assert toolchain.read_text() == calls


def test_changed_header_flag_or_target_is_another_library(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [build.library_path()]
    (build.SOURCE_DIR / "common.cuh").write_text("// something\n")
    paths.append(build.library_path())
    monkeypatch.setattr(build, "NVCC_FLAGS", (*build.NVCC_FLAGS, "-lineinfo"))
    paths.append(build.library_path())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    paths.append(build.library_path())
    assert len(set(paths)) == 4


def test_what_takes_longest_starts_first(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source counts with the headers that it includes, of which one includes another and that one the first."""
    monkeypatch.setenv("MAX_JOBS", "1")
    (build.SOURCE_DIR / "second.cu").write_text('#include "kernels.cuh"\n')
    (build.SOURCE_DIR / "kernels.cuh").write_text('#include "rows.cuh"\n#include <cuda.h>\n')
    (build.SOURCE_DIR / "rows.cuh").write_text(f'#include "kernels.cuh"\n// {"a long kernel " * 100}\n')
    (build.SOURCE_DIR / "bindings.cpp").write_text("// long, but not as long\n" * 20)
    build.library_path()
    assert re.findall(r"csrc/(\S+)\.\w+ -o", toolchain.read_text()) == ["second", "bindings", "first"]


def test_named_library_is_taken(toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LS_TRAIN_LIBRARY", str(tmp_path / "mine.so"))
    with pytest.raises(BuildError, match=r"LS_TRAIN_LIBRARY=.*mine\.so is not a file"):
        build.library_path()
    (tmp_path / "mine.so").touch()
    assert build.library_path() == str(tmp_path / "mine.so")
    assert toolchain.read_text() == ""


def test_packaged_library_is_taken_when_it_fits(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = build.compile_library(build.SOURCE_DIR, ["8.0", "9.0+PTX"])
    assert build.library_path() == str(packaged)
    for listed, fits in {"8.6": True, "9.0": True, "12.0": True, "7.5": False}.items():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert (build.library_path() == str(packaged)) == fits, listed
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    (build.SOURCE_DIR / "first.cu").write_text("// newer\n")
    assert build.library_path() != str(packaged)


def test_failed_compilation_names_error_command_and_remedy(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "first.cu(7): error: identifier x is undefined")
    with pytest.raises(BuildError) as error:
        build.library_path()
    message = str(error.value)
    assert "first error: first.cu(7): error: identifier x is undefined" in message
    assert re.search(r"command: .*bin/nvcc .*first\.cu", message) or re.search(
        r"command: .*cxx .*bindings\.cpp", message
    )
    assert "CUDA toolkit 12.6 or newer" in message
    monkeypatch.setenv("FAIL", "nvcc fatal   : Unsupported gpu architecture 'compute_90'")
    with pytest.raises(BuildError, match="install a newer CUDA toolkit or set TORCH_CUDA_ARCH_LIST"):
        build.library_path()
    monkeypatch.delenv("FAIL")
    assert Path(build.library_path()).is_file()


def test_missing_tools_are_named(toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"'no-such-compiler' was not found; install g\+\+"):
        build.library_path()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    with pytest.raises(BuildError, match=r"CUDA toolkit was not found.*set CUDA_HOME"):
        build.cuda_home()


@pytest.mark.parametrize("arch", ["ninety", "9", "sm_90", "9.0+SASS"])
def test_wrong_targets_are_refused(toolchain: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch)
    with pytest.raises(BuildError, match="not a compute capability"):
        build.library_path()


def _report(path: str) -> None:
    Path(path).write_text(build.library_path())


def _start(target: Path) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_report, args=(str(target),))
    process.start()
    return process


def test_two_processes_compile_once(toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE", "0.3")
    processes = [_start(tmp_path / name) for name in ("a", "b")]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert toolchain.read_text().count("csrc/first.cu -o") == 1


def test_killed_build_leaves_nothing_stuck(toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE", "1")
    process = _start(tmp_path / "killed")
    deadline = time.monotonic() + 60
    while not toolchain.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    folder = next((tmp_path / "ls_train").iterdir())
    assert list(folder.glob(".build-*")), "the kill came before the build began"
    assert not (folder / build.LIBRARY_NAME).exists()
    monkeypatch.setenv("PAUSE", "0")
    path = Path(build.library_path())
    assert path.read_text() == "compiled\n"
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(
        ["lock", build.LOG_NAME, build.LIBRARY_NAME, f"{build.LIBRARY_NAME}.json"]
    )
    assert json.loads((folder / f"{build.LIBRARY_NAME}.json").read_text())["sources"] == build.source_hash()

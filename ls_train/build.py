"""The build manifest of the CUDA library: sources, flags and target cards, for every way of building it.

- On first CUDA use :func:`library_path` compiles for the visible cards into torch's extension cache, one process a host
  while others wait; later starts find it there. Key: sources, flags and targets.
- ``LS_TRAIN_BUILD_CUDA=1 pip install .`` and ``python -m ls_train.build`` call :func:`compile_library`, which needs
  nvcc and g++ but neither a GPU nor a CUDA build of torch.
- ``LS_TRAIN_LIBRARY=<path>`` names a library to load instead.

The kernels do not include torch and the binding uses only its stable ABI, so that one binary serves several versions.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

SOURCE_DIR = Path(__file__).resolve().parent / "csrc"
LIBRARY_NAME = "ls_train_cuda.so"
LOG_NAME = "build.log"
DEFAULT_ARCHS = ("7.5", "8.0", "9.0+PTX")
"""Targets of an ahead-of-time build where no card is visible: newer cards run the PTX or their family's code."""

COMMON_FLAGS = ("-std=c++17", "-O3")
NVCC_FLAGS = (*COMMON_FLAGS, "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden")
CXX_FLAGS = (*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000")
# For the compile check only: a user's newer compiler may warn of what nobody has seen yet.
STRICT_NVCC_FLAGS = ("-Werror=all-warnings", "-Xcompiler=-Wall,-Werror")
STRICT_CXX_FLAGS = ("-Wall", "-Wextra", "-Werror")
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--exclude-libs,ALL")
LINK_LIBRARIES = ("-ltorch_cpu", "-lc10", "-lcudart_static", "-lrt", "-lpthread", "-ldl")

_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_ERROR_LINE = re.compile(r".*\b(?:fatal )?error\b.*|.*: undefined reference .*|.*: not found.*|.*cannot find .*")


class BuildError(RuntimeError):
    """The CUDA library cannot be found or built; the message names the command, the first error and what to do."""


def sources() -> list[Path]:
    """Return the files that are compiled, each into one object."""
    return sorted([*SOURCE_DIR.glob("*.cu"), *SOURCE_DIR.glob("*.cpp")])


def headers() -> list[Path]:
    """Return the files that the sources include."""
    return sorted([*SOURCE_DIR.glob("*.cuh"), *SOURCE_DIR.glob("*.h")])


def source_hash() -> str:
    """Return a hash of all sources and flags: equal for libraries that do the same."""
    digest = hashlib.sha256(repr((NVCC_FLAGS, CXX_FLAGS, LINK_FLAGS, LINK_LIBRARIES)).encode())
    for path in [*sources(), *headers()]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def target_archs() -> tuple[str, ...]:
    """Return the targets to compile for, such as ``("8.0", "9.0+PTX")``.

    ``TORCH_CUDA_ARCH_LIST`` if it is set, else the visible cards with PTX for the newest, else ``DEFAULT_ARCHS``.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").replace(",", " ").split()
    if listed:
        return parse_archs(listed)
    if not torch.cuda.is_available():
        return DEFAULT_ARCHS
    cards = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    names = [f"{major}.{minor}" for major, minor in cards]
    return (*names[:-1], names[-1] + "+PTX")


def parse_archs(archs: Sequence[str]) -> tuple[str, ...]:
    """Check target names such as ``"9.0"`` and ``"9.0+PTX"`` and return them in order without repetition.

    Raises:
        BuildError: a name is not of this form.
    """
    for arch in archs:
        if _ARCH.fullmatch(arch) is None:
            raise BuildError(f"target {arch!r} is not a compute capability; use for example 8.0, 9.0 or 9.0+PTX")
    return tuple(sorted(set(archs), key=lambda arch: tuple(map(int, _ARCH.fullmatch(arch).group(1, 2)))))


def library_path() -> str:
    """Return the path of the compiled library for the visible cards, compiling it if there is none yet.

    Raises:
        BuildError: ``LS_TRAIN_LIBRARY`` names no file, a tool is missing or the compilation failed.
    """
    override = os.environ.get("LS_TRAIN_LIBRARY")
    if override:
        if not Path(override).is_file():
            raise BuildError(f"LS_TRAIN_LIBRARY={override} is not a file; correct the path or unset the variable")
        return str(Path(override).resolve())
    archs = target_archs()
    if _is_current(SOURCE_DIR, archs):
        return str(SOURCE_DIR / LIBRARY_NAME)
    return str(_compile_once(_cached_folder(archs), archs))


def cache_dir() -> Path:
    """Return the folder below torch's extension cache that holds the compiled libraries."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(root).expanduser().resolve() / "ls_train"


def compile_library(
    output: Path | str, archs: Sequence[str] | None = None, work: Path | str | None = None, strict: bool = False
) -> Path:
    """Compile the library into the folder ``output`` and return its path; the compilers' output is in build.log there.

    Args:
        output: folder, made if it is missing. A library that is there is replaced when the new one is complete.
        archs: targets such as ``"9.0"`` or ``"9.0+PTX"``; None: see :func:`target_archs`.
        work: folder for objects and PTX (in keep/), which is kept, so that the next call compiles only what changed;
            None for a temporary one.
        strict: warnings are errors.

    Raises:
        BuildError: a tool is missing or the compilation failed.
    """
    targets = target_archs() if archs is None else parse_archs(archs)
    output = Path(output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".build-", dir=output)))
        folder = scratch if work is None else Path(work).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        _run_ninja(folder, targets, work is not None, strict)
        shutil.copy2(folder / LIBRARY_NAME, scratch / f"{LIBRARY_NAME}.new")
        logs = [(folder / f"{source.name}.log").read_text() for source in sources()]
        (scratch / f"{LOG_NAME}.new").write_text("".join(logs))
        # Sources and targets, by which a later start knows what the library next to it is.
        about = {"sources": source_hash(), "archs": list(targets)}
        (scratch / f"{_about_name()}.new").write_text(json.dumps(about) + "\n")
        for name in (LOG_NAME, LIBRARY_NAME, _about_name()):
            os.replace(scratch / f"{name}.new", output / name)
    return output / LIBRARY_NAME


def _cached_folder(archs: Sequence[str]) -> Path:
    return cache_dir() / f"{source_hash()}-{'-'.join(archs)}"


def _about_name() -> str:
    return LIBRARY_NAME + ".json"


def _is_current(folder: Path, archs: Sequence[str]) -> bool:
    """Return whether ``folder`` holds a complete library of today's sources with code for all of ``archs``."""
    try:
        about = json.loads((folder / _about_name()).read_text())
    except (OSError, ValueError):
        return False
    if not (folder / LIBRARY_NAME).is_file() or about.get("sources") != source_hash():
        return False
    return all(_covers(about["archs"], arch) for arch in archs)


def _covers(built: Sequence[str], arch: str) -> bool:
    """Return whether code for ``built`` runs on ``arch``: same major and no newer minor, or older PTX."""
    major, minor = (int(part) for part in _ARCH.fullmatch(arch).group(1, 2))
    for other in built:
        match = _ARCH.fullmatch(other)
        built_major, built_minor = int(match[1]), int(match[2])
        if match[3]:
            if (built_major, built_minor) == (major, minor):
                return True
            continue
        if built_major == major and built_minor <= minor:
            return True
        if match[4] and (built_major, built_minor) <= (major, minor):
            return True
    return False


def _compile_once(folder: Path, archs: Sequence[str], strict: bool = False) -> Path:
    """Compile into ``folder`` unless it is done; of several processes one compiles while the others wait.

    The lock belongs to an open file, so it ends with its process, however that ends.
    """
    library = folder / LIBRARY_NAME
    if _is_current(folder, archs):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not _is_current(folder, archs):
            for leftover in folder.glob(".build-*"):  # of a build that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            print(f"ls_train: compiling the CUDA operators for {', '.join(archs)} into {folder}", file=sys.stderr)
            compile_library(folder, archs, strict=strict)
    return library


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run_ninja(work: Path, archs: Sequence[str], keep_ptx: bool, strict: bool) -> None:
    """Compile and link in ``work``; each compiler's output goes to <source>.log."""
    (work / "build.ninja").write_text(_ninja_file(work, archs, keep_ptx, strict))
    command = [_ninja(), "-C", str(work), "-v", *(["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise BuildError(_failure(result.stdout, command))


def _ninja_file(work: Path, archs: Sequence[str], keep_ptx: bool, strict: bool) -> str:
    from torch.utils import cpp_extension  # slow to import, and needed only here

    home = cuda_home()
    nvcc = [str(home / "bin" / "nvcc"), *NVCC_FLAGS, *(STRICT_NVCC_FLAGS if strict else ()), *_gencode_flags(archs)]
    if keep_ptx:
        (work / "keep").mkdir(exist_ok=True)
        nvcc += ["--keep", f"--keep-dir={work / 'keep'}"]
    cxx = [_host_compiler(), *CXX_FLAGS, *(STRICT_CXX_FLAGS if strict else ())]
    for folder in (*cpp_extension.include_paths(), str(home / "include")):
        cxx += ["-isystem", folder]
    library_dirs = [Path(torch.__file__).parent / "lib", *_cuda_library_dirs(home)]
    link = [_host_compiler(), *LINK_FLAGS, *(f"-L{folder}" for folder in library_dirs)]
    compile_one = "-MD -MF $name.d -c $in -o $out > $name.log 2>&1 || { cat $name.log; exit 1; }"
    lines = [
        f"rule {rule}\n  command = {_ninja_command(command)} {compile_one}\n  depfile = $name.d\n  deps = gcc"
        for rule, command in (("cuda", nvcc), ("cxx", cxx))
    ]
    lines.append(f"rule link\n  command = {_ninja_command(link)} $in {' '.join(LINK_LIBRARIES)} -o $out")
    objects = []
    # The largest sources first: they take longest, and the last one decides when all are done.
    for source in sorted(sources(), key=_size_with_headers, reverse=True):
        rule = "cuda" if source.suffix == ".cu" else "cxx"
        objects.append(source.name + ".o")
        lines.append(f"build {objects[-1]}: {rule} {_ninja_path(source)}\n  name = {source.name}")
    lines.append(f"build {LIBRARY_NAME}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _size_with_headers(source: Path) -> int:
    """Return the bytes of a source and of the project's headers that it includes; kernels stand in both."""
    files = [source]
    for path in files:
        included = [path.parent / name for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))]
        files += [header for header in included if header.is_file() and header not in files]
    return sum(path.stat().st_size for path in files)


def _ninja_command(arguments: Sequence[str]) -> str:
    return " ".join(shlex.quote(argument).replace("$", "$$") for argument in arguments)


def _ninja_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _gencode_flags(archs: Sequence[str]) -> list[str]:
    flags = []
    for arch in archs:
        major, minor, suffix, ptx = _ARCH.fullmatch(arch).groups()
        name = major + minor + suffix
        code = f"[sm_{name},compute_{name}]" if ptx else f"sm_{name}"
        flags.append(f"-gencode=arch=compute_{name},code={code}")
    return flags


def cuda_home() -> Path:
    """Return the folder of the CUDA toolkit: ``CUDA_HOME``, ``CUDA_PATH``, that of nvcc on PATH, or /usr/local/cuda.

    Raises:
        BuildError: there is no nvcc in any of them.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(str(Path(on_path).resolve().parent.parent))
    homes.append("/usr/local/cuda")
    for home in homes:
        # An nvcc on PATH may be a wrapper outside the toolkit: the headers must be there too.
        if (
            os.access(Path(home) / "bin" / "nvcc", os.X_OK)
            and (Path(home) / "include" / "cuda_runtime_api.h").is_file()
        ):
            return Path(home)
    raise BuildError(
        f"the CUDA toolkit was not found: no bin/nvcc with include/cuda_runtime_api.h in {', '.join(homes)}. Install "
        "CUDA 12.6 or newer (https://developer.nvidia.com/cuda-downloads, or the nvidia-cuda-nvcc package of pip or "
        "conda) and set CUDA_HOME, or set LS_TRAIN_LIBRARY to a library that `python -m ls_train.build --output DIR` "
        "made elsewhere"
    )


def _cuda_library_dirs(home: Path) -> list[Path]:
    folders = [home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib"]
    found = [folder for folder in folders if (folder / "libcudart_static.a").is_file()]
    if not found:
        raise BuildError(
            f"libcudart_static.a is not in {', '.join(map(str, folders))}; install the CUDA runtime's development "
            "files (cuda-cudart-dev) of the same toolkit"
        )
    return found


def _host_compiler() -> str:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(
            f"the C++ compiler {name!r} was not found; install g++ 9 or newer (Debian: apt install g++) or set CXX"
        )
    return path


def _ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    path = shutil.which("ninja") or (str(beside_python) if beside_python.is_file() else None)
    if path is None:
        raise BuildError("ninja was not found; install it: pip install ninja")
    return path


def _failure(output: str, command: Sequence[str]) -> str:
    """Return the message for a failed build: file, first error, what may help, command."""
    lines = output.splitlines()
    failed = next((index for index, line in enumerate(lines) if line.startswith("FAILED:")), 0)
    error = next((line for line in lines[failed:] if _ERROR_LINE.fullmatch(line)), lines[-1] if lines else "no output")
    run = lines[failed + 1] if failed + 1 < len(lines) else shlex.join(command)
    if "Unsupported gpu architecture" in output or "unsupported gpu architecture" in output.lower():
        hint = "this toolkit does not know the card: install a newer CUDA toolkit or set TORCH_CUDA_ARCH_LIST"
    elif "unsupported GNU version" in output:
        hint = "this toolkit does not take this g++: install an older g++ and set NVCC_CCBIN, or a newer CUDA toolkit"
    elif ": fatal error:" in output and "No such file" in output:
        hint = "a header is missing: install the full CUDA toolkit and a complete torch"
    elif "Killed" in output or "out of memory" in output.lower():
        hint = "the machine ran out of memory: set MAX_JOBS=2"
    else:
        hint = "needed: CUDA toolkit 12.6 or newer, g++ 9 or newer, torch 2.10 or newer"
    return f"compiling the CUDA operators failed.\n  first error: {error.strip()}\n  {hint}\n  command: {run.strip()}"


def main() -> None:
    """Compile the library, without a GPU if need be: ``python -m ls_train.build [--arch 9.0 ...] [--output DIR]``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", action="append", help="compute capability, such as 9.0 or 9.0+PTX; may be repeated")
    parser.add_argument("--output", help="folder for the library; the default is torch's extension cache")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    arguments = parser.parse_args()
    try:
        archs = target_archs() if arguments.arch is None else parse_archs(arguments.arch)
        if arguments.output is None:
            path = _compile_once(_cached_folder(archs), archs, arguments.strict)
        else:
            path = compile_library(arguments.output, archs, strict=arguments.strict)
    except BuildError as error:
        sys.exit(f"ls_train.build: {error}")
    print(path)


if __name__ == "__main__":
    main()

"""``lightseq-doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_train import _library, build

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 10)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        detail: what was found.
        advice: what to do, None where nothing is missing.
        essential: without it not even training on the CPU works.
    """

    name: str
    detail: str
    advice: str | None = None
    essential: bool = False


def main() -> int:
    """Print the report; return 0 when training on the CPU works, 1 otherwise."""
    found = list(findings())
    width = max(len(finding.name) for finding in found)
    for finding in found:
        mark = "ok" if finding.advice is None else "MISSING" if finding.essential else "--"
        print(f"{mark:>7}  {finding.name:<{width}}  {finding.detail}")
        if finding.advice is not None:
            print(f"{'':>7}  {'':<{width}}  -> {finding.advice}")
    broken = [finding.name for finding in found if finding.essential and finding.advice is not None]
    print("Training on the CPU " + (f"does not work: see {', '.join(broken)}." if broken else "works."))
    return 1 if broken else 0


def findings() -> Iterator[Finding]:
    """Yield every line of the report, in order."""
    yield python()
    yield pytorch()
    yield cpu_operators()
    yield card()
    yield cuda_runtime()
    for tool in (nvcc, host_compiler, ninja):
        yield tool()
    yield fairseq()
    yield from operators()


def python() -> Finding:
    """Check the interpreter's version."""
    advice = None if sys.version_info >= MINIMUM_PYTHON else "install Python 3.10 or newer (3.11 or 3.12 with fairseq)"
    return Finding("Python", f"{platform.python_version()} ({sys.executable})", advice, essential=True)


def pytorch() -> Finding:
    """Check torch's version."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    advice = None if version >= MINIMUM_TORCH else f"pip install 'torch>={'.'.join(map(str, MINIMUM_TORCH))}'"
    return Finding("torch", torch.__version__, advice, essential=True)


def cpu_operators() -> Finding:
    """Check that every operator is declared with a CPU implementation."""
    try:
        package = importlib.import_module("ls_train.ops")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    except Exception as error:
        return Finding("operators", f"{type(error).__name__}: {error}", "reinstall ls-train", essential=True)
    names = _library.operator_names()
    without = [name for name in names if not _has_cpu_implementation(name)]
    if without or not names:
        return Finding("operators", f"no CPU implementation: {without or 'all'}", "reinstall ls-train", essential=True)
    return Finding("operators", f"{len(names)} with a CPU implementation", essential=True)


def card() -> Finding:
    """Look for a GPU that torch can use."""
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        listed = ", ".join(
            f"{card.name} (sm_{card.major}{card.minor}, {card.total_memory >> 30} GiB)" for card in cards
        )
        return Finding("GPU", listed)
    if shutil.which("nvidia-smi"):
        return Finding(
            "GPU",
            "the driver is there, but torch sees no GPU",
            "install a torch built for CUDA (https://pytorch.org/get-started) and check CUDA_VISIBLE_DEVICES",
        )
    return Finding("GPU", "none", "training runs on the CPU; for a GPU install its driver and a torch built for CUDA")


def cuda_runtime() -> Finding:
    """Report the CUDA version torch was built for."""
    if torch.version.cuda is None:
        return Finding("CUDA", "torch is built without it", "pip install a torch built for CUDA to train on a GPU")
    return Finding("CUDA", torch.version.cuda)


def nvcc() -> Finding:
    """Look for the CUDA compiler where the build looks for it."""
    try:
        home = build.cuda_home()
    except build.BuildError as error:
        return Finding("nvcc", "not found", f"only needed to compile the GPU operators: {error}")
    return Finding("nvcc", _version(str(home / "bin" / "nvcc")))


def host_compiler() -> Finding:
    """Look for the C++ compiler that builds the binding."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return Finding("g++", "not found", "only needed to compile the GPU operators: install g++ or set CXX")
    return Finding("g++", _version(path))


def ninja() -> Finding:
    """Look for ninja, as a program or as the Python package of that name."""
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        return Finding("ninja", "not found", "only needed to compile the GPU operators: pip install ninja")
    try:
        return Finding("ninja", importlib.metadata.version("ninja"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("ninja", _version(shutil.which("ninja") or "ninja"))


def fairseq() -> Finding:
    """Import fairseq in a process of its own and report its version."""
    install = "needed for the lightseq-* commands only: pip install 'ls-train[fairseq]'"
    if importlib.util.find_spec("fairseq") is None:
        return Finding("fairseq", "not installed", install)
    command = [sys.executable, "-W", "ignore", "-c", "import fairseq; print(fairseq.__version__, fairseq.__file__)"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("fairseq", f"cannot be imported: {reason}", install)
    return Finding("fairseq", result.stdout.strip().splitlines()[-1])


def operators() -> Iterator[Finding]:
    """Yield for each operator whether its CUDA implementation is loaded, compilable or missing."""
    loaded, problem = False, None
    if torch.cuda.is_available():
        try:
            _library.load_cuda_library()
            loaded = True
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        yield Finding("CUDA library", problem.splitlines()[0], "GPU operators cannot run until this is mended")
    sources = "\n".join(path.read_text() for path in sorted((Path(__file__).parent / "csrc").glob("*.cu")))
    for name in _library.operator_names():
        if loaded and _library.has_cuda_implementation(name):
            yield Finding(f"  {name}", "CUDA implementation loaded")
        elif f" {name}(" in sources:
            yield Finding(f"  {name}", "CUDA source present, compiled when the first GPU tensor reaches an operator")
        else:
            yield Finding(f"  {name}", "CPU only", "no CUDA implementation in this version; use the CPU")


def _has_cpu_implementation(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{_library.NAMESPACE}::{name}", "CPU")


def _version(path: str) -> str:
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} ({error})"
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    line = next((line for line in lines if "release" in line), lines[0] if lines else "no version printed")
    return f"{line.strip()} ({path})"


if __name__ == "__main__":
    sys.exit(main())

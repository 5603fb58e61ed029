"""The CUDA library compiled for all targets of the compile check, once per state of the sources."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ls_train import build

ARCHS = ("7.5", "8.0", "9.0")
_CACHE = Path(__file__).resolve().parents[2] / ".ls_train_build"


@dataclass(frozen=True)
class Compiled:
    """Paths of a library, of the compilers' output and of the PTX of each source and target."""

    library: Path
    log: str
    ptx: Path


@pytest.fixture(scope="session")
def compiled() -> Compiled:
    """Compile everything with nvcc for ``ARCHS``, warnings as errors; skips where there is no CUDA toolkit."""
    try:
        build.cuda_home()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = _CACHE / build.source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / build.LIBRARY_NAME
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        about = folder / f"{build.LIBRARY_NAME}.json"
        if not about.is_file() or json.loads(about.read_text())["archs"] != list(ARCHS):
            build.compile_library(folder, ARCHS, work=_CACHE / "work", strict=True)
    return Compiled(library, (folder / build.LOG_NAME).read_text(), _CACHE / "work" / "keep")

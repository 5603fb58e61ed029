"""The CUDA library compiled for all targets of the compile check, once per state of the sources.

``python -m tests.build.compilation`` starts before the tests, when a core has nothing to do; they wait for its end.
"""

from __future__ import annotations

import fcntl
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ls_train import build

ARCHS = ("7.5", "8.0", "9.0")
_CACHE = Path(__file__).resolve().parents[2] / ".ls_train_build"


@dataclass(frozen=True)
class Compiled:
    """Paths of a library, of the compilers' output and of the PTX of each source and target."""

    library: Path
    log: str
    ptx: Path


def compiled_library() -> Compiled:
    """Compile everything with nvcc for ``ARCHS``, warnings as errors; of several processes one does while others wait.

    Raises:
        build.BuildError: there is no CUDA toolkit or the compilation failed.
    """
    build.cuda_home()
    folder = _CACHE / build.source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / build.LIBRARY_NAME
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        about = folder / f"{build.LIBRARY_NAME}.json"
        if not about.is_file() or json.loads(about.read_text())["archs"] != list(ARCHS):
            build.compile_library(folder, ARCHS, work=_CACHE / "work", strict=True)
    return Compiled(library, (folder / build.LOG_NAME).read_text(), _CACHE / "work" / "keep")


if __name__ == "__main__":
    try:
        compiled_library()
    except build.BuildError as error:
        sys.exit(f"compile check: {error}")

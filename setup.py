"""Packaging hook: ``LS_TRAIN_BUILD_CUDA=1 pip install .`` compiles the CUDA library ahead of time.

Everything else about the package is declared in pyproject.toml. Without the variable nothing is compiled here; the
library is built when the first CUDA tensor reaches an operator.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

BUILD_CUDA = os.environ.get("LS_TRAIN_BUILD_CUDA", "0") == "1"


class BuildWithCuda(build_py):
    """Copy the packages, then compile the CUDA library into the copy."""

    def run(self) -> None:
        super().run()
        if BUILD_CUDA and not self.editable_mode:
            root = Path(__file__).resolve().parent
            sys.path.insert(0, str(root))
            try:
                from ls_train import build
            except ImportError as error:
                raise RuntimeError(
                    "LS_TRAIN_BUILD_CUDA=1 needs torch and numpy at build time: install them first and run "
                    "`LS_TRAIN_BUILD_CUDA=1 pip install --no-build-isolation .`"
                ) from error
            folder = build.compile_library(Path(self.build_lib).resolve() / "ls_train" / "csrc").parent
            (folder / build.LOG_NAME).unlink()  # it names folders of this machine


class MaybeBinary(Distribution):
    """A distribution that is bound to the platform only when it carries the compiled library."""

    def has_ext_modules(self) -> bool:
        return BUILD_CUDA


setup(cmdclass={"build_py": BuildWithCuda}, distclass=MaybeBinary)

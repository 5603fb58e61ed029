"""The CUDA library compiled for all targets of the compile check."""

from __future__ import annotations

import pytest

from ls_train import build
from tests.build.compilation import Compiled, compiled_library


@pytest.fixture(scope="session")
def compiled() -> Compiled:
    """The compiled library; skips where there is no CUDA toolkit."""
    try:
        build.cuda_home()
    except build.BuildError as error:
        pytest.skip(str(error))
    return compiled_library()

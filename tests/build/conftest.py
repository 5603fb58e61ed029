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


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "compiled" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nvcc)
            item.add_marker(pytest.mark.timeout(1200))  # the first of them compiles everything

"""`make test`, `make soak` and `make cuda-check` together run every test file there is."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    """pytest does not look into folders of some names, which does not show when a test is run by its path."""
    patterns = request.config.getini("norecursedirs")
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len({path.parent for path in files}) > 5
    passed_over = [
        str(path) for path in files for part in path.parent.parts for pattern in patterns if fnmatch(part, pattern)
    ]
    assert passed_over == []

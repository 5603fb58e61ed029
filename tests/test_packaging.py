"""`pip install .` carries everything: both packages, the CUDA sources and the launchers."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ls_train", "fairseq_plugin")
COMMANDS = (
    *("train", "hydra-train", "generate", "interactive", "validate", "eval-lm", "preprocess", "score"),
    *("export", "average", "doctor"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # A copy, so that building leaves nothing in the tree under test.
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(output), str(source)]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = output.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_carries_the_tree(wheel):
    names = set(wheel.namelist())
    suffixes = {".py", ".cu", ".cuh", ".h", ".cpp"}
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }
    assert {"ls_train/csrc/bindings.cpp", "ls_train/csrc/ops.h", "fairseq_plugin/__init__.py"} <= expected
    assert expected <= names
    carried = {name for name in names if ".dist-info/" not in name}
    assert carried <= expected, "the wheel carries files that belong to no package"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_launchers_point_at_functions(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(entry_points).decode().splitlines()
    launchers = dict(line.split(" = ") for line in lines if line.startswith("lightseq-"))
    assert {f"lightseq-{command}" for command in COMMANDS} <= launchers.keys()
    for target in launchers.values():
        module, function = target.split(":")
        assert f"\ndef {function}(" in wheel.read(f"{module.replace('.', '/')}.py").decode()


def test_core_needs_little(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    lines = wheel.read(metadata).decode().split("\n\n")[0].splitlines()
    core = [
        line.removeprefix("Requires-Dist: ")
        for line in lines
        if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert sorted(core) == ["ninja", "numpy", "torch>=2.10"]
    assert "Requires-Python: >=3.10" in lines


def test_import_needs_no_fairseq_and_compiles_nothing(tmp_path):
    """Import ls_train from the tree with fairseq hidden and an empty PATH: no compiler, no build, no CUDA context."""
    program = (
        "import sys\n"
        "sys.modules['fairseq'] = None\n"
        "import ls_train, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('imported')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "imported\n", result.stderr
    assert list(tmp_path.iterdir()) == []

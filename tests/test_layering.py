"""The architecture, checked by reading the sources: who may import or include whom, file sizes, names, leaked paths.

    device.cuh <- *.cu <- ops.h <- bindings.cpp
    base modules of ls_train <- ops <- layers, optim <- fairseq_plugin <- examples

Every rule is a function from a source tree to a list of sentences, so that the rules themselves are tested on small
trees that break them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE_DIRECTORIES = ("ls_train", "fairseq_plugin", "examples", "benchmarks", "tests", "docs", ".ci")
TEXT_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".md", ".toml", ".json", ".yml", ".yaml", ""}
LINE_LIMITS = {".cu": 300, ".py": 400}

# What each part of ls_train may import from ls_train; the package itself (public names) and the doctor may import all
# of it. `testing` is for tests, benchmarks and examples.
ALLOWED = {
    "base": {"base"},
    "ops": {"base", "ops"},
    "layers": {"base", "ops", "layers"},
    "optim": {"base", "ops", "optim"},
    "testing": {"base", "ops", "testing"},
    "package": {"base", "ops", "layers", "optim", "package"},
}
FRAMEWORKS = {"fairseq", "fairseq_cli", "fairseq_plugin", "hydra", "omegaconf", "examples", "benchmarks", "tests"}
STABLE_TORCH = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
DEVICE_NAME = re.compile(r"^(cpu|cuda)(:\d+)?$")
DEVICE_ATTRIBUTES = {"cuda", "is_cuda", "cpu"}
PRIVATE_PATH = re.compile(r"(?<![\w.$}/-])/(work|home|root|opt|mnt|Users)/\w")


def sources(root: Path, *suffixes: str) -> Iterator[Path]:
    """Yield the project's own files with one of ``suffixes``, in a fixed order."""
    for path in sorted(root.iterdir()):
        if path.is_file() and path.suffix in suffixes and not path.is_symlink():
            yield path
    for directory in CODE_DIRECTORIES:
        for path in sorted((root / directory).rglob("*")):
            generated = {"__pycache__", "work", "data"} & set(path.relative_to(root).parts)
            if path.is_file() and path.suffix in suffixes and not generated:
                yield path


def imported_modules(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) for every import in ``path``, those inside functions included."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*start, *filter(None, [node.module])))
            for alias in node.names:
                inner = root.joinpath(*module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield node.lineno, f"{module}.{alias.name}" if is_module else module


def part_of(module: str) -> str:
    """Return the part of ls_train (a key of ALLOWED) that dotted ``module`` belongs to."""
    names = module.split(".")
    if len(names) == 1 or names[1] == "doctor":
        return "package"
    return names[1] if names[1] in ALLOWED else "base"


def import_violations(root: Path) -> list[str]:
    found = []
    for path in sources(root, ".py"):
        relative = path.relative_to(root)
        place = relative.parts[0]
        for line, module in imported_modules(root, path):
            top = module.split(".")[0]
            where = f"{relative}:{line}"
            if place == "ls_train":
                own = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
                if top in FRAMEWORKS:
                    found.append(f"{where}: ls_train imports {module}")
                elif top == "ls_train" and part_of(module) not in ALLOWED[part_of(own)]:
                    found.append(f"{where}: {part_of(own)} imports {module}")
            elif place == "fairseq_plugin" and top in {"examples", "benchmarks", "tests"}:
                found.append(f"{where}: fairseq_plugin imports {module}")
    return found


def device_violations(root: Path) -> list[str]:
    found = []
    for path in sorted((root / "ls_train" / "layers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE_NAME.match(node.value):
                found.append(f"{path.relative_to(root)}:{node.lineno}: layers name the device {node.value!r}")
            elif isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES:
                found.append(f"{path.relative_to(root)}:{node.lineno}: layers name a device through .{node.attr}")
    return found


def include_violations(root: Path) -> list[str]:
    found = []
    for path in sources(root, ".cu", ".cuh", ".h", ".cpp"):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+([<"])([^>"]+)', text)
            if match is None:
                continue
            local, name = match[1] == '"', match[2]
            where = f"{path.relative_to(root)}:{line}: includes {name}"
            if name.startswith(("torch/", "ATen/", "c10/")):
                if path.name != "bindings.cpp":
                    found.append(f"{where}; kernels are free of torch, only bindings.cpp may include it")
                elif not name.startswith(STABLE_TORCH):
                    found.append(f"{where}, which is not part of torch's stable ABI")
            elif name.endswith(".cu"):
                found.append(f"{where}; a .cu file is compiled, never included")
            elif local and name.endswith(".cuh") and path.suffix not in {".cu", ".cuh"}:
                found.append(f"{where}; device code is for .cu files")
            elif local and path.name == "device.cuh" and name == "ops.h":
                found.append(f"{where}; the building blocks do not know the launchers")
    return found


def name_violations(root: Path) -> list[str]:
    found = []
    for path in sources(root, ".py", ".cu", ".cuh", ".h", ".cpp", ".sh"):
        relative = path.relative_to(root)
        if re.search(r"utils?$|_(new|old|v\d+)$", path.stem):
            found.append(f"{relative}: name a file after what it holds, without utils or version suffixes")
        limit = LINE_LIMITS.get(path.suffix)
        count = len(path.read_text().splitlines())
        if limit is not None and count > limit:
            found.append(f"{relative}: {count} lines, split it (limit {limit})")
    return found


def stem_violations(root: Path) -> list[str]:
    package = root / "ls_train"
    operators = {path.stem for path in (package / "ops").glob("*.py") if not path.stem.startswith("_")}
    tested = {path.stem for path in (root / "tests").rglob("test_*.py")}
    found = [
        f"ls_train/ops/{stem}.py has no test_{stem}.py in tests"
        for stem in sorted(operators)
        if f"test_{stem}" not in tested
    ]
    for path in sorted((package / "csrc").glob("*.cu")):
        if not any(path.stem == stem or path.stem.startswith(f"{stem}_") for stem in operators):
            found.append(f"ls_train/csrc/{path.name} has no operator file of that name in ls_train/ops")
    return found


def path_violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line}: a path of somebody's machine: {match[0]}"
        for path in sources(root, *TEXT_SUFFIXES)
        for line, text in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := PRIVATE_PATH.search(text))
    ]


RULES = [
    import_violations,
    device_violations,
    include_violations,
    name_violations,
    stem_violations,
    path_violations,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_obeys(rule):
    assert rule(ROOT) == []


def test_scans_something():
    assert {"setup.py", "rng.py", "test_layering.py"} <= {path.name for path in sources(ROOT, ".py")}
    modules = {module for _, module in imported_modules(ROOT, ROOT / "ls_train" / "_library.py")}
    assert {"torch", "ls_train.build"} <= modules


# rule, file, content that breaks it, content that does not
BROKEN = [
    (import_violations, "ls_train/ops/a.py", "from ls_train.layers import b", "import ls_train.rng"),
    (import_violations, "ls_train/rng.py", "def f():\n    import ls_train.ops.a", "import torch"),
    (import_violations, "ls_train/layers/a.py", "from ..optim import b", "from ..ops import b"),
    (import_violations, "ls_train/optim/a.py", "import fairseq.utils", "import fairseqish"),
    (import_violations, "fairseq_plugin/a.py", "import tests.a", "import ls_train.layers"),
    (device_violations, "ls_train/layers/a.py", "x = y.to('cuda:0')", "x = y.to(z.device)"),
    (device_violations, "ls_train/layers/a.py", "import torch\nx = torch.cuda", "x = 'cudaless'"),
    (include_violations, "ls_train/csrc/a.cu", "#include <ATen/ATen.h>", '#include "device.cuh"'),
    (include_violations, "ls_train/csrc/bindings.cpp", "#include <torch/all.h>", "#include <torch/csrc/stable/ops.h>"),
    (include_violations, "ls_train/csrc/ops.h", '#include "device.cuh"', "#include <cuda_runtime.h>"),
    (include_violations, "ls_train/csrc/device.cuh", '#include "ops.h"', '#include "philox.cuh"'),
    (name_violations, "ls_train/utils.py", "", None),
    (name_violations, "ls_train/ops/adam_v2.py", "", None),
    (name_violations, "ls_train/ops/a.py", "\n" * 401, "\n" * 400),
    (name_violations, "ls_train/csrc/a.cu", "\n" * 301, "\n" * 300),
    (stem_violations, "ls_train/ops/adam.py", "", None),
    (stem_violations, "ls_train/csrc/adam.cu", "", None),
    (path_violations, "Makefile", "X := /ho" + "me/somebody", "X := /usr/local/cuda"),
    (path_violations, "docs/a.md", "see /wo" + "rk/notes", "see docs/work/notes"),
]


@pytest.mark.parametrize(("rule", "name", "bad", "good"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_rule_notices(tmp_path, rule, name, bad, good):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bad)
    assert len(rule(tmp_path)) == 1
    if good is not None:
        path.write_text(good)
        assert rule(tmp_path) == []

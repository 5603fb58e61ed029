"""Command-line tests without an interpreter start each: fairseq is imported once, every run is a fork of this process.

``run_cli`` runs a function (a launcher of ours or ``cli_main`` of plain fairseq) in a forked child with its own argv,
environment, working directory, stdin, stdout and stderr, and a time limit.
"""

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forks

# Without fairseq there is no plugin to test; the core's own tests still run.
collect_ignore_glob = [] if importlib.util.find_spec("fairseq") else ["test_*.py"]
ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "examples" / "wmt14" / "data" / "handbook"


@dataclass(frozen=True)
class Result:
    """What a forked command left: its exit code and everything it printed."""

    code: int
    out: str
    err: str

    def check(self) -> "Result":
        assert self.code == 0, f"exit code {self.code}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-4000:]}"
        return self


class Forker:
    """Runs functions in forked children of one process that has fairseq imported."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.count = 0

    def start(
        self,
        function: Callable[[], object],
        *arguments: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str = "",
    ) -> "Job":
        self.count += 1
        stem = self.folder / f"run{self.count}"
        stem.with_suffix(".in").write_text(stdin)

        def run() -> object:
            os.chdir(cwd or stem.parent)
            os.environ.update(env or {})
            sys.argv = ["command", *(str(argument) for argument in arguments)]
            return function()

        with contextlib.ExitStack() as stack:
            modes = {".in": "r", ".out": "w", ".err": "w"}
            files = [stack.enter_context(stem.with_suffix(suffix).open(mode)) for suffix, mode in modes.items()]
            return Job(forks.fork(run, *(file.fileno() for file in files)), stem)

    def __call__(self, function: Callable[[], object], *arguments: object, limit: float = 60, **options) -> Result:
        return self.start(function, *arguments, **options).wait(limit)


class Job:
    """A forked command that is running."""

    def __init__(self, pid: int, stem: Path):
        self.pid = pid
        self.stem = stem

    def wait(self, limit: float = 60) -> Result:
        """Wait for the end; a command that takes longer than ``limit`` seconds is killed and fails the test."""
        code = forks.wait(self.pid, limit)
        if code is None:
            os.killpg(self.pid, signal.SIGKILL)
            forks.wait(self.pid, None)
            pytest.fail(f"no end after {limit} s\n{self.text('.out')[-2000:]}\n{self.text('.err')[-2000:]}")
        return Result(code, self.text(".out"), self.text(".err"))

    def text(self, suffix: str) -> str:
        path = self.stem.with_suffix(suffix)
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="session")
def plain() -> dict[str, Callable[[], object]]:
    """``cli_main`` of fairseq's own commands, by name."""
    names = ("train", "generate", "interactive", "validate", "preprocess")
    return {name: importlib.import_module(f"fairseq_cli.{name}").cli_main for name in names}


@pytest.fixture(scope="session")
def run_cli(tmp_path_factory, imported_fairseq) -> Forker:
    return Forker(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="session")
def launcher_script(tmp_path_factory) -> Callable[[str, str], list[str]]:
    """Command that runs an installed script, or one like it where the project is not installed."""

    def command(name: str, target: str) -> list[str]:
        script = Path(sys.executable).parent / name
        if not script.exists():
            module, function = target.split(":")
            script = tmp_path_factory.mktemp("bin") / name
            script.write_text(
                f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
            )
        return [sys.executable, str(script)]

    return command


def write_subset(folder: Path, sizes: dict[str, int], longest: int = 24) -> None:
    """Write the first sentence pairs of the bundled corpus that have at most ``longest`` words a side."""
    for split, size in sizes.items():
        pairs = zip(*((CORPUS / f"{split}.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")))
        kept = [pair for pair in pairs if all(0 < len(text.split()) <= longest for text in pair)][:size]
        for side, texts in zip(("en", "de"), zip(*kept)):
            (folder / f"{split}.{side}").write_text("\n".join(texts) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory) -> Path:
    """A small part of the bundled corpus as plain text: {train,valid,test}.{en,de}."""
    folder = tmp_path_factory.mktemp("text")
    write_subset(folder, {"train": 800, "valid": 60, "test": 200})
    return folder


@pytest.fixture(scope="session")
def preprocess_arguments(text_dir) -> Callable[[Path], list[object]]:
    """Arguments of ``fairseq-preprocess`` that binarise the text into a folder."""

    def arguments(destination: Path) -> list[object]:
        return [
            *("--source-lang", "en", "--target-lang", "de", "--joined-dictionary", "--destdir", destination),
            *("--trainpref", text_dir / "train", "--validpref", text_dir / "valid", "--testpref", text_dir / "test"),
            *("--nwordssrc", 1000, "--nwordstgt", 1000, "--workers", 1),
        ]

    return arguments


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory, preprocess_arguments, run_cli, plain) -> Path:
    """The text as fairseq's binary data, one word-level dictionary of about 1000 types for both languages."""
    folder = tmp_path_factory.mktemp("bin")
    run_cli(plain["preprocess"], *preprocess_arguments(folder)).check()
    return folder


@pytest.fixture(scope="session")
def train_arguments(data_bin) -> list[object]:
    """A tiny ``ls_transformer`` on the CPU; later options on a command line win."""
    return [
        *(data_bin, "--cpu", "--arch", "ls_transformer_tiny", "--share-all-embeddings", "--max-tokens", 400),
        *("--optimizer", "ls_adam", "--adam-betas", "(0.9, 0.98)", "--lr", 1e-3, "--lr-scheduler", "inverse_sqrt"),
        *("--warmup-updates", 10, "--criterion", "ls_label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--num-workers", 0, "--log-format", "simple", "--required-batch-size-multiple", 1),
    ]


@pytest.fixture(scope="session")
def small(tmp_path_factory, run_cli, plain):
    """Binary data of 60 training pairs, which are the second validation set too, and 20 others; with alignments."""
    text, folder = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("smallbin")
    write_subset(text, {"train": 60, "valid": 20}, longest=12)
    for split in ("train", "valid"):
        pairs = [(text / f"{split}.{side}").read_text().splitlines() for side in ("en", "de")]
        links = [f"0-0 {len(a.split()) - 1}-{len(b.split()) - 1}" for a, b in zip(*pairs)]
        (text / f"{split}.align").write_text("\n".join(links) + "\n")
    arguments = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary", "--destdir", folder]
    arguments += ["--trainpref", text / "train", "--validpref", text / "valid", "--align-suffix", "align"]
    run_cli(plain["preprocess"], *arguments, "--workers", 1).check()
    for path in folder.glob("train.*en-de*"):
        shutil.copy(path, folder / path.name.replace("train", "valid1", 1))
    return folder

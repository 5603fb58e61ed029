"""A data-bin of a parallel corpus for :mod:`benchmarks.curves`, made with the tools of examples/wmt14."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "wmt14"
REFERENCE = "test.de"
"""File of the data-bin that holds the untokenised target side of the test set."""


def example(name: str) -> ModuleType:
    """Return a module of examples/wmt14, which is no package."""
    spec = importlib.util.spec_from_file_location(f"wmt14_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(corpus: Path, folder: Path, pieces: int) -> None:
    """Write the data-bin ``folder`` of {train,valid,test}.{en,de} in ``corpus`` with ``pieces`` joint pieces."""
    bpe = example("bpe")
    work = folder.with_name(folder.name + ".bpe")
    work.mkdir(parents=True, exist_ok=True)
    bpe.learn(work / "joint", pieces, [corpus / "train.en", corpus / "train.de"])
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            bpe.encode(work / "joint", corpus / f"{split}.{language}", work / f"{split}.{language}")
    sides = [work / "train.en", work / "train.de"]
    kept = [work / "kept.en", work / "kept.de"]
    example("clean").filter_pairs(sides, kept, max_ratio=3.0, max_length=120)
    flags = (
        f"--source-lang en --target-lang de --trainpref {work}/kept --validpref {work}/valid --testpref {work}/test "
        f"--destdir {folder} --joined-dictionary --workers 1"
    )
    program = "from fairseq_plugin.cli import preprocess; preprocess()"
    subprocess.run([sys.executable, "-c", program, *flags.split()], check=True, stdout=subprocess.DEVNULL)
    shutil.copyfile(corpus / REFERENCE, folder / REFERENCE)
    shutil.rmtree(work)

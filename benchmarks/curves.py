"""Does training with ls_train learn what fairseq's learns? Validation loss and BLEU of the same runs, several seeds.

``python -m benchmarks.curves --data DATA_BIN [--corpus FOLDER] [--time-limit SECONDS]``. The base arch is trained for
2,000 updates on an English-German corpus in fp16 and bf16 by ``ls_train``, ``ls_train_graph`` (``--ls-cuda-graph on``)
and ``fairseq_no_cudnn_attention``, three seeds each, same flags. The 18 runs share the card and nothing is timed.
Batches have at most 3072 tokens a side, so that all fit into nine minutes of one H200 with 16 cores, and the model is
validated ten times.

Each run has a folder below ``--work``; a run that has its result there is not made again. Near the time limit what is
still running is ended, and the records hold what there is. With ``--append`` the complete runs of an existing record
file stay, are not made again, and count in the summary: further seeds with ``--first-seed 4 --append``, a further
implementation with ``--implementation NAME --append``. ``--plot`` draws the curves of an existing record file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves_data import REFERENCE, example, prepare
from benchmarks.curves_summary import EAGER, GRAPH, PEER, plot, run_records, summary
from benchmarks.fairseq_process import graph_flag, is_ours
from benchmarks.records import RESULTS, compile_kernels, write_records
from ls_train.build import source_hash

_ARCHS = {"transformer_base_6e6d": "transformer_wmt_en_de", "transformer_toy": "transformer_tiny"}
IMPLEMENTATIONS = (PEER, EAGER, GRAPH)
"""The slowest first, so that it does not run alone at the end."""
_WRITING_SECONDS = 10
_TRAIN = "import sys; from benchmarks.fairseq_process import train; train(sys.argv[1], sys.argv[2:])"
_GENERATE = "from fairseq_plugin.cli import generate; generate()"


@dataclass(frozen=True)
class Run:
    """One training run."""

    implementation: str
    precision: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.implementation}-{self.precision}-{self.seed}"


def training_flags(run: Run, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the flags of a run; ours differs in the names of arch, criterion and optimizer, and ``--ls-cuda-graph``.

    The learning rate suits batches of this size and a post-norm model that is warmed up for half of the run.
    """
    prefix = "" if run.implementation == PEER else "ls_"
    flags = (
        f"{options.data} --source-lang en --target-lang de --task translation --arch {prefix}{_ARCHS[options.arch]} "
        f"--share-all-embeddings --optimizer {prefix}adam --adam-betas (0.9,0.98) --clip-norm 0.0 --lr 7e-4 "
        f"--lr-scheduler inverse_sqrt --warmup-updates {options.updates // 2} --warmup-init-lr 1e-7 --dropout 0.1 "
        f"--weight-decay 0.0001 --criterion {prefix}label_smoothed_cross_entropy --label-smoothing 0.1 "
        f"--max-tokens {options.max_tokens} --max-update {options.updates} --seed {run.seed} --num-workers 0 "
        f"--validate-interval-updates {options.updates // 10} --validate-interval 1000 --max-tokens-valid 8192 "
        f"--save-interval 1000 --no-epoch-checkpoints --no-save-optimizer-state --save-dir {folder}/checkpoints "
        "--log-format json --log-interval 100"
    )
    if run.precision != "fp32":
        flags += f" --{run.precision}"
    if is_ours(run.implementation):
        flags += f" {graph_flag(run.implementation)}"
    return [*flags.split(), *_device_flags()]


def generation_flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the flags that translate the test set with the last checkpoint of the run in ``folder``."""
    flags = (
        f"{options.data} --path {folder}/checkpoints/checkpoint_last.pt --gen-subset test --source-lang en "
        f"--target-lang de --beam 4 --lenpen 0.6 --max-len-a 1.2 --max-len-b 10 --max-tokens 8000 "
        "--required-batch-size-multiple 1 --remove-bpe sentencepiece"
    )
    return [*flags.split(), *(["--fp16"] if torch.cuda.is_available() else ["--cpu"])]


def _device_flags() -> list[str]:
    return [] if torch.cuda.is_available() else ["--cpu"]


def read_curve(log: str) -> list[tuple[int, float]]:
    """Return (update, loss) of every validation in the text of a log in fairseq's json format."""
    rows = [json.loads(line) for line in re.findall(r'\{"epoch".*\}', log)]
    return [(int(row["valid_num_updates"]), float(row["valid_loss"])) for row in rows if "valid_loss" in row]


def score(log: Path, reference: Path) -> float:
    """Return sacrebleu's BLEU of the translations in the log of lightseq-generate."""
    import sacrebleu

    hypotheses = example("hypotheses")
    return sacrebleu.corpus_bleu(hypotheses.read_hypotheses(log), [hypotheses.read_lines(reference)]).score


class Worker:
    """One run under way: training, then generation, as a process group each."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.folder = options.work / run.name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._generating = False
        self._start("train", _TRAIN, [run.implementation, *training_flags(run, options, self.folder)])

    def _start(self, stage: str, program: str, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": _first_gpu()}
        with (self.folder / f"{stage}.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def is_done(self) -> bool:
        """Go on where a stage has ended; return whether there is nothing left to do."""
        code = self._process.poll()
        if code is None:
            return False
        if code != 0:
            stage = "generation" if self._generating else "training"
            tail = (self.folder / f"{'generate' if self._generating else 'train'}.log").read_text()[-1500:]
            print(f"{self.run.name}: {stage} ended with code {code}\n{tail}", flush=True)
            return True
        if not self._generating:
            self._generating = True
            self._start("generate", _GENERATE, generation_flags(self.options, self.folder))
            return False
        try:
            bleu = score(self.folder / "generate.log", self.options.data / REFERENCE)
        except ValueError as error:
            print(f"{self.run.name}: {error}", flush=True)
            return True
        curve = read_curve((self.folder / "train.log").read_text())
        (self.folder / "result.json").write_text(json.dumps({"curve": curve, "bleu": bleu}))
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return True

    def kill(self) -> None:
        """End what is running."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {"arch": options.arch, "max_tokens": options.max_tokens, "updates": options.updates}


def earlier(options: argparse.Namespace) -> dict[Run, list[dict[str, Any]]]:
    """Return the records of the complete runs in the file ``options.output``, which say where they were measured.

    Raises:
        ValueError: they are runs of another kind.
    """
    found: dict[Run, list[dict[str, Any]]] = {}
    for record in json.loads(options.output.read_text()) if options.output.exists() else ():
        case = record["case"]
        if "seed" not in case:
            continue
        other = {name: case[name] for name, value in _common(options).items() if case[name] != value}
        if other:
            raise ValueError(f"{options.output} holds runs with {other}; give the same flags or another --output")
        found.setdefault(Run(record["implementation"], case["precision"], case["seed"]), []).append(record)
    return {run: records for run, records in found.items() if any(record["metric"] == "bleu" for record in records)}


def collected(
    runs: Sequence[Run], options: argparse.Namespace, kept: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the records ``kept`` and those of what the folders of ``runs`` hold, and the summary of all."""
    common = _common(options)
    records = list(kept)
    for run in runs:
        folder = options.work / run.name
        log, result = folder / "train.log", folder / "result.json"
        if log.exists():
            bleu = json.loads(result.read_text())["bleu"] if result.exists() else None
            case = {**common, "precision": run.precision, "seed": run.seed}
            records += run_records(case, run.implementation, read_curve(log.read_text()), bleu)
    return records + summary(records)


def run_all(runs: Sequence[Run], options: argparse.Namespace, kept: Sequence[dict[str, Any]] = ()) -> list[Run]:
    """Make the runs that have no result, several at a time; return those without one when the time is up.

    The records ``kept`` are written with theirs.
    """
    end = time.monotonic() + options.time_limit - _WRITING_SECONDS
    waiting = [run for run in runs if not (options.work / run.name / "result.json").exists()]
    working: list[Worker] = []
    start = time.monotonic()
    try:
        while (waiting or working) and time.monotonic() < end:
            while waiting and len(working) < options.jobs:
                working.append(Worker(waiting.pop(0), options))
            for worker in [worker for worker in working if worker.is_done()]:
                working.remove(worker)
                print(f"{time.monotonic() - start:5.0f} s  {worker.run.name} has ended", flush=True)
                write_records(collected(runs, options, kept), options.output)
            time.sleep(0.2)
    finally:
        for worker in working:
            worker.kill()
    return [run for run in runs if not (options.work / run.name / "result.json").exists()]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the summary's records for the terminal."""
    lines = []
    for record in records:
        if "seeds" in record["case"]:
            where = f"{record['case']['precision']} {record['implementation']} ({record['case']['seeds']} seeds)"
            lines.append(f"{where:32} {record['metric']:27} {record['value']:9.4f} {record['unit']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data-bin with the reference test.de in it")
    parser.add_argument("--corpus", type=Path, help="texts {train,valid,test}.{en,de}: --data is made if it is missing")
    parser.add_argument("--pieces", type=int, default=8000, help="joint pieces of a new data-bin (%(default)s)")
    parser.add_argument("--arch", default="transformer_base_6e6d", choices=sorted(_ARCHS))
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=3072)
    parser.add_argument("--precision", action="append", choices=("fp32", "fp16", "bf16"), help="default: fp16, bf16")
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="the others follow it (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the runs of the output file, add those it lacks")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="at a time (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("outputs/curves"), help="folder of the runs (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "curves.json")
    parser.add_argument("--plot", type=Path, help="only draw the records of --output into this image")
    options = parser.parse_args(argv)
    if options.plot is not None:
        plot(json.loads(options.output.read_text()), options.plot)
        return
    if options.data is None:
        parser.error("--data is missing: give a data-bin, or the folder to make one in and --corpus")
    if options.corpus is not None and not (options.data / REFERENCE).exists():
        prepare(options.corpus, options.data, options.pieces)
    if not (options.data / REFERENCE).exists():
        parser.error(f"--data {options.data} holds no {REFERENCE}: give --corpus to make the data-bin")
    importlib.import_module("sacrebleu")  # missing, it had better be missed now than at the end
    try:
        done = earlier(options) if options.append else {}
    except ValueError as error:
        parser.error(str(error))
    compile_kernels()
    runs = [
        run
        for implementation in options.implementation or IMPLEMENTATIONS
        for precision in options.precision or ("fp16", "bf16")
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        if (run := Run(implementation, precision, seed)) not in done
    ]
    kept = [record for records in done.values() for record in records]
    if sources := {record["source_hash"] for record in kept} - {source_hash()}:
        print(f"{options.output}: runs that stay were made with kernels of the sources {', '.join(sorted(sources))}")
    missing = run_all(runs, options, kept)
    records = collected(runs, options, kept)
    write_records(records, options.output)
    print(table(records), flush=True)
    if missing:
        raise SystemExit(f"without result: {', '.join(run.name for run in missing)}; run again to make them")
    if any(record["metric"].endswith("_within") and not record["value"] for record in records):
        raise SystemExit("a difference is larger than allowed")


if __name__ == "__main__":
    main()

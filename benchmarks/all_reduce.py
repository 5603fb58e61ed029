"""Share of the communication that other work hides in data-parallel training with ls_train on several GPUs of a host.

``python -m benchmarks.all_reduce [--gpus N] [--max-tokens N] [--output FILE]`` trains as ``benchmarks.fairseq_wps``
does, in a window of batches that every rank has met before, and records updates with torch's profiler.

All communication counts: what sums gradients beside the backward and what gathers updated parameters beside Adam are
together an all-reduce. It is NCCL's kernels, or copies between GPUs, signals and whatever else runs on their stream,
which adds what was copied. ``all_reduce_hidden`` is the share of their time on the first GPU in which other
kernels run as well; ``all_reduce_exposed`` is the rest, in milliseconds an update. Waiting for a rank that is late
counts as time of the all-reduce: use ``--balance-ranks`` or ``--token-budget``, with which the ranks' batches are of
one size.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import trace
from benchmarks.fairseq_wps import ARCHS, OPTIONS, VOCABULARY, Run, add_options, arguments_of, environments
from benchmarks.processes import Prepared, in_turn
from benchmarks.random_data import write_data
from benchmarks.records import RESULTS, compile_kernels, write_records
from benchmarks.trace import Kernel, Step, shared_time

_RECORDED = 8
_COLLECTIVE = re.compile("nccl|all_?reduce|reduce_?scatter|all_?gather|memcpy ptop", re.I)
_SIGNAL = re.compile("(put|wait)_signal")
_PROGRAM = (
    "import sys; from pathlib import Path; from benchmarks.processes import wait_for_go; "
    "from benchmarks.timeline import record_training; "
    "implementation, path, batches, skipped, updates, *flags = sys.argv[1:]; "
    "record_training(implementation, Path(path), int(skipped), flags, int(updates), wait_for_go, "
    "(int(batches), int(skipped)))"
)


def _prepared(run: Run, data: Path, path: Path, stack: contextlib.ExitStack) -> list[Prepared]:
    """Start the ranks of ``run``; each writes its trace, the first one to ``path``."""
    ranks = []
    # Only the end of the log's interval waits for statistics: there shall be none among the recorded updates.
    flags = arguments_of(data, replace(run, measured=4 * run.updates))
    for rank, extra in enumerate(environments(run.gpus)):
        # The profiler slows the host down: ranks that only wait for the first one would look like communication.
        to = path if rank == 0 else path.with_name(f"rank{rank}_{path.name}")
        numbers = [run.measured * run.gpus, run.updates - run.measured, run.measured]
        words = ["-c", _PROGRAM, run.implementation, str(to), *map(str, numbers), *flags]
        ranks.append(stack.enter_context(Prepared(words, extra)))
    return ranks


def figures(steps: Sequence[Step]) -> dict[str, tuple[float, str]]:
    """Return value and unit of each metric of the recorded ``steps``.

    Raises:
        ValueError: there is no collective in one of them.
    """
    hidden = exposed = 0.0
    for step in steps:
        groups: tuple[list[Kernel], list[Kernel]] = [], []
        streams = {kernel.stream for kernel in step.kernels if _SIGNAL.search(kernel.name)}
        for kernel in step.kernels:
            groups[kernel.stream not in streams and _COLLECTIVE.search(kernel.name) is None].append(kernel)
        beside, alone = shared_time(*groups)
        if beside + alone == 0:
            raise ValueError("no all-reduce was recorded: use two GPUs or more")
        hidden, exposed = hidden + beside, exposed + alone
    return {
        "all_reduce_hidden": (100 * (hidden / (hidden + exposed)), "%"),
        "all_reduce_time": ((hidden + exposed) / len(steps) / 1e3, "ms"),
        "all_reduce_exposed": (exposed / len(steps) / 1e3, "ms"),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--arch", default="transformer_big_6e6d", choices=sorted(ARCHS))
    parser.add_argument("--precision", default="fp16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--max-tokens", action="append", type=int, help="default: 4096 and 15000")
    parser.add_argument(
        "--implementation", action="append", choices=("ls_train", "ls_train_graph"), help="default: both"
    )
    parser.add_argument(
        "--warm-up", type=int, help="updates before the recorded ones; default: each batch once and a few more"
    )
    add_options(parser)
    parser.add_argument("--sentences", type=int, default=80000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--data", type=Path, help="folder of the data-bin: made if it is missing, and kept")
    parser.add_argument("--limit", type=float, default=120, help="seconds for the start-up and for a run (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep other cases' records in the output file")
    parser.add_argument("--output", type=Path, default=RESULTS / "all_reduce.json")
    options = parser.parse_args(argv)
    compile_kernels()
    names = options.implementation or ("ls_train", "ls_train_graph")
    skipped = _RECORDED * options.gpus + 8 if options.warm_up is None else options.warm_up
    chosen = {name: True for name in OPTIONS if getattr(options, name)}
    records: list[dict[str, Any]] = []
    done = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        data = options.data or Path(folder) / "data"
        if not (data / "train.en-de.de.idx").exists():
            write_data(data, options.sentences, options.vocabulary)
        runs = [
            Run(name, options.arch, size, options.precision, options.gpus, skipped + _RECORDED, _RECORDED, **chosen)
            for size in options.max_tokens or (4096, 15000)
            for name in names
        ]
        traces = {run: Path(folder) / f"{run.implementation}_{run.max_tokens}.json.gz" for run in runs}
        ranks = {run: _prepared(run, data, traces[run], stack) for run in runs}
        for run, _ in in_turn(ranks, options.limit, options.limit):
            try:
                found = figures(trace.read(traces[run])[1:-1])
            except ValueError as error:
                print(f"{run}: {error}", flush=True)
                continue
            done += 1
            case = {"arch": run.arch, "max_tokens": run.max_tokens, "precision": run.precision, "gpus": run.gpus}
            record = {"bench": "all_reduce", "case": {**case, **chosen}, "implementation": run.implementation}
            for metric, (value, unit) in found.items():
                records.append({**record, "metric": metric, "value": value, "unit": unit, "ratios": {}})
            write_records(records, options.output, append=options.append)
            line = ", ".join(f"{metric} {value:.2f} {unit}" for metric, (value, unit) in found.items())
            print(f"{run.implementation} max-tokens {run.max_tokens}: {line}", flush=True)
    if done < len(runs):
        raise SystemExit(f"{len(runs) - done} of {len(runs)} runs failed")


if __name__ == "__main__":
    main()

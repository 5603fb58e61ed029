"""Share of the all-reduce that backward hides in data-parallel training with ls_train on several GPUs of a host.

``python -m benchmarks.all_reduce [--gpus N] [--max-tokens N] [--output FILE]`` trains as ``benchmarks.fairseq_wps``
does and records updates with torch's profiler. ``all_reduce_hidden`` is the share of NCCL's time on the first GPU in
which other kernels run as well; waiting for a rank that is late counts as time of the all-reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import trace
from benchmarks.fairseq_wps import ARCHS, VOCABULARY, Run, arguments_of, environments, warm_up_updates
from benchmarks.processes import Prepared
from benchmarks.random_data import write_data
from benchmarks.records import RESULTS, compile_kernels, write_records
from benchmarks.trace import Kernel, Step

_RECORDED = 8
_COLLECTIVE = re.compile("nccl|all_?reduce", re.I)
_PROGRAM = (
    "import sys; from pathlib import Path; from benchmarks.timeline import record_training; "
    "record_training(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[5:], int(sys.argv[4]))"
)


def hidden_share(kernels: Sequence[Kernel]) -> float:
    """Return the percentage of the collectives' time in which other kernels run.

    Raises:
        ValueError: there is no collective among ``kernels``.
    """
    collectives = [kernel for kernel in kernels if _COLLECTIVE.search(kernel.name)]
    others = [kernel for kernel in kernels if not _COLLECTIVE.search(kernel.name)]
    total = Step.busy(collectives)
    if total == 0:
        raise ValueError("no all-reduce was recorded: use two GPUs or more")
    return 100 * (total + Step.busy(others) - Step.busy(kernels)) / total


def measured(run: Run, data: Path, path: Path, limit: float) -> tuple[float, float]:
    """Train with ``run``, the trace of the first rank goes to ``path``; return (% hidden, ms of all-reduce an update).

    Raises:
        RuntimeError: a rank failed or took longer than ``limit`` seconds.
    """
    skipped = run.updates - run.measured
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, extra in enumerate(environments(run.gpus)):
            # The profiler slows the host down: ranks that only wait for the first one would look like communication.
            to = path.with_name(f"rank{rank}_{path.name}")
            words = [run.implementation, str(to), str(skipped), str(run.measured), *arguments_of(data, run)]
            ranks.append(stack.enter_context(Prepared(["-c", _PROGRAM, *words], extra)))
        for process in ranks:
            process.finish(limit)
    shares, times = [], []
    for step in trace.read(path.with_name(f"rank0_{path.name}"))[1:-1]:
        shares.append(hidden_share(step.kernels))
        times.append(Step.busy([kernel for kernel in step.kernels if _COLLECTIVE.search(kernel.name)]) / 1e3)
    # An update with a late rank has a longer all-reduce: the mean by time.
    return sum(share * time for share, time in zip(shares, times)) / sum(times), sum(times) / len(times)


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
    parser.add_argument("--warm-up", type=int, help="updates before the recorded ones")
    parser.add_argument("--sentences", type=int, default=80000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--data", type=Path, help="folder of the data-bin: made if it is missing, and kept")
    parser.add_argument("--limit", type=float, default=120, help="seconds a run may take (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep other cases' records in the output file")
    parser.add_argument("--output", type=Path, default=RESULTS / "all_reduce.json")
    options = parser.parse_args(argv)
    compile_kernels()
    records: list[dict[str, Any]] = []
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        if not (data / "train.en-de.de.idx").exists():
            write_data(data, options.sentences, options.vocabulary)
        for max_tokens in options.max_tokens or (4096, 15000):
            case = {"arch": options.arch, "max_tokens": max_tokens, "precision": options.precision}
            for name in options.implementation or ("ls_train", "ls_train_graph"):
                skipped = warm_up_updates(name) if options.warm_up is None else options.warm_up
                run = Run(name, *case.values(), options.gpus, skipped + _RECORDED, _RECORDED)
                try:
                    share, time = measured(run, data, Path(folder) / f"{name}_{max_tokens}.json.gz", options.limit)
                except (RuntimeError, ValueError) as error:
                    failed += 1
                    print(f"{run}: {error}", flush=True)
                    continue
                record = {"bench": "all_reduce", "case": {**case, "gpus": options.gpus}, "implementation": name}
                for metric, value, unit in (("all_reduce_hidden", share, "%"), ("all_reduce_time", time, "ms")):
                    records.append({**record, "metric": metric, "value": value, "unit": unit, "ratios": {}})
                write_records(records, options.output, append=options.append)
                print(f"{name} max-tokens {max_tokens}: {share:.1f} % of {time:.2f} ms hidden", flush=True)
    if failed:
        raise SystemExit(f"{failed} runs failed")


if __name__ == "__main__":
    main()

"""Target words a second of real training runs: ``fairseq-train`` against ``lightseq-train``, same flags, same data.

``python -m benchmarks.fairseq_wps [--quick] [--gpus N] [--output FILE]``. Each run is a process of its own on one
data-bin of random tokens with lengths as in WMT14 English-German. Implementations: ``fairseq`` as it ships,
``fairseq_no_cudnn_attention`` with torch's cuDNN attention off (it plans anew for every shape: the fair baseline),
``fairseq_apex``, the same with Apex where that is installed, ``ls_train`` and ``ls_train_graph``, the same with
``--ls-cuda-graph on``. The runs of a group start up together and are then measured one after another. The records are
written after every run.

What is measured: ``words_per_second`` is the target words of ``--measured`` batches over the time from before the first
to after the last of them, ``time`` that time over the number of updates. The batches are the first ones of fairseq's
epoch, the same for every implementation that makes batches in the same way and for every number of GPUs, which share
them: half as many updates on two. Before, every rank trains on these same batches, all of them where graphs are
captured, so that the graphs of all their shapes are there. Validation, saving and the end of an epoch are not in it.
With N GPUs ``efficiency`` is the words a second over N times those of one. Each update takes as long as the slowest
rank, whose batches fairseq draws at random: what is lost by their different sizes is part of it, less of it with
``--balance-ranks`` or ``--token-budget``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fairseq_process import PEAK, available, graph_flag, is_ours
from benchmarks.processes import Prepared, in_turn
from benchmarks.random_data import write_data
from benchmarks.records import RESULTS, compile_kernels, write_records

VOCABULARY = 40000
_MAX_TOKENS = (512, 1024, 4096, 8192, 15000)
_QUICK = (512, 1024, 4096, 15000)
_QUICK_IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "fairseq_no_cudnn_attention")
ARCHS = {
    "transformer_base_6e6d": "transformer_wmt_en_de",
    "transformer_big_6e6d": "transformer_vaswani_wmt_en_de_big",
    "transformer_iwslt_de_en": "transformer_iwslt_de_en",
    "transformer_toy": "transformer_tiny",
}
_MEASURED = 128  # batches
_WARM_UP, _WARM_UP_GRAPHS = 25, 200
OPTIONS = ("token_budget", "balance_ranks", "shard_update")
"""Options of ls_train alone, in cases that say so."""
_INTERVALS = 4  # of the log while it is measured: at the end of each our step waits for its statistics
_OVERFLOW = "gradient overflow detected"  # fairseq's words
_UNITS = {"words_per_second": "words/s", "time": "ms", "peak_memory": "GiB", "efficiency": "%"}


@dataclass(frozen=True)
class Run:
    """One training run of the benchmark: ``measured`` updates are the last ones of ``updates``."""

    implementation: str
    arch: str
    max_tokens: int
    precision: str
    gpus: int
    updates: int
    measured: int
    token_budget: bool = False
    balance_ranks: bool = False
    shard_update: bool = False


def warm_up_updates(implementation: str) -> int:
    """Return after how many updates of an epoch a step can be recorded.

    A graph is captured when its shape comes first. Small batches have some 50 shapes, rare ones among them, nearly all
    of which have come after 200 updates.
    """
    return _WARM_UP_GRAPHS if implementation == "ls_train_graph" else _WARM_UP


def log_interval(measured: int) -> int:
    """Return the updates between two lines of the log where ``measured`` updates are measured."""
    return max(1, measured // _INTERVALS)


def arguments_of(data: Path, run: Run) -> list[str]:
    """Return the command line of one run; ours differs in the names of arch, criterion and optimizer alone."""
    prefix = "ls_" if is_ours(run.implementation) else ""
    on_gpu = torch.cuda.is_available()
    flags = (
        f"{data} --source-lang en --target-lang de --task translation --arch {prefix}{ARCHS[run.arch]} "
        f"--share-all-embeddings --optimizer {prefix}adam --adam-betas (0.9,0.98) --clip-norm 0.0 --lr 5e-4 "
        "--lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7 --weight-decay 0.0001 --dropout 0.1 "
        f"--attention-dropout 0.1 --activation-dropout 0.1 --criterion {prefix}label_smoothed_cross_entropy "
        f"--label-smoothing 0.1 --max-tokens {run.max_tokens} --max-update {run.updates} --no-save "
        f"--disable-validation --log-format json --log-interval {log_interval(run.measured)} --seed 1 "
        f"--num-workers {4 if on_gpu else 0} --distributed-world-size {run.gpus}"
    )
    if is_ours(run.implementation):
        flags += f" {graph_flag(run.implementation)}"
        for name in OPTIONS:
            flags += f" --ls-{name.replace('_', '-')}" if getattr(run, name) else ""
    if run.precision != "fp32":
        # fairseq's first loss scale overflows, and so does 8 with batches of 15000 tokens; updates that are skipped
        # would shift what is measured.
        flags += f" --{run.precision}{' --fp16-init-scale 1' if run.precision == 'fp16' else ''}"
    if not on_gpu:
        flags += " --cpu --distributed-backend gloo"
    return flags.split()


def environments(gpus: int) -> list[dict[str, str]]:
    """Return what each rank of a run needs in its environment; a run on one GPU sees no other."""
    if gpus == 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return [{"CUDA_VISIBLE_DEVICES": visible}]
    # Imported here, as the plugin brings all of fairseq.
    port = importlib.import_module("fairseq_plugin.ports").free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(gpus)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]


def figures(output: str, run: Run) -> dict[str, float]:
    """Return ``words_per_second``, ``time`` (ms a step) and ``peak_memory`` (GiB) from what the first rank printed.

    Raises:
        RuntimeError: it did not log all of the measured updates; where some overflowed the message says how many.
    """
    rows = [json.loads(line) for line in re.findall(r'\{"epoch".*\}', output)]
    first = run.updates - run.measured
    rows = [row for row in rows if "wps" in row and int(row["num_updates"]) > first and row["epoch"] == 1]
    peak = re.search(re.escape(PEAK) + r" *(\d+)", output)
    if len(rows) * log_interval(run.measured) != run.measured or peak is None:
        overflows = output.count(_OVERFLOW)
        reason = f": {overflows} overflowed and were skipped, lower --fp16-init-scale" if overflows else ""
        raise RuntimeError(
            f"the log does not hold all updates after update {first} in the first epoch{reason}\n{output[-2000:]}"
        )
    words = [float(row["wpb"]) * log_interval(run.measured) for row in rows]
    seconds = sum(count / float(row["wps"]) for count, row in zip(words, rows))
    return {
        "words_per_second": sum(words) / seconds,
        "time": 1e3 * seconds / run.measured,
        "peak_memory": int(peak.group(1)) / 2**30,
    }


def measured(
    runs: Sequence[Run], data: Path, limit: float, start_limit: float
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Start ``runs`` together, measure one after another, yield each with its figures; print and skip what fails."""
    with contextlib.ExitStack() as stack:
        ranks = {}
        for run in runs:
            window = [str(run.measured * run.gpus), str(run.updates - run.measured)]
            arguments = ["-m", "benchmarks.fairseq_process", run.implementation, *window, *arguments_of(data, run)]
            ranks[run] = [stack.enter_context(Prepared(arguments, extra)) for extra in environments(run.gpus)]
        for run, outputs in in_turn(ranks, limit, start_limit):
            try:
                yield run, figures(outputs[0], run)
            except RuntimeError as error:
                print(f"{run}: {error}", flush=True)


def records_of(case: dict[str, Any], results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the records of one case, with ratios above 1 where ls_train is better."""
    records = []
    for implementation, metrics in results.items():
        for metric, value in metrics.items():
            ratios = {}
            if is_ours(implementation) and value > 0:
                for peer in (name for name in results if not is_ours(name)):
                    theirs = results[peer][metric]
                    ratios[peer] = value / theirs if metric == "words_per_second" else theirs / value
            record = {"bench": "fairseq_wps", "case": case, "implementation": implementation}
            records.append({**record, "metric": metric, "value": value, "unit": _UNITS[metric], "ratios": ratios})
    return records


def all_records(results: dict[Run, dict[str, float]], with_gpus: bool) -> list[dict[str, Any]]:
    """Return the records of all runs; for several GPUs also the efficiency, in percent of as many times one GPU."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for run, metrics in results.items():
        key = (run.arch, run.max_tokens, run.precision, run.gpus, *(name for name in OPTIONS if getattr(run, name)))
        cases.setdefault(key, {})[run.implementation] = metrics
    records = []
    for key, by_name in cases.items():
        arch, max_tokens, precision, gpus, *names = key
        case = {"arch": arch, "max_tokens": max_tokens, "precision": precision, **({"gpus": gpus} if with_gpus else {})}
        case.update(dict.fromkeys(names, True))
        records += records_of(case, by_name)
        for name, metrics in by_name.items():
            single = cases.get((*key[:3], 1, *names), {}).get(name)
            if gpus > 1 and single is not None:
                value = 100 * metrics["words_per_second"] / (gpus * single["words_per_second"])
                record = {"bench": "fairseq_wps", "case": case, "implementation": name, "metric": "efficiency"}
                records.append({**record, "value": value, "unit": _UNITS["efficiency"], "ratios": {}})
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return a table for the terminal: a line a run."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        key = (" ".join(map(str, record["case"].values())), record["implementation"])
        rows.setdefault(key, {})[record["metric"]] = record["value"]
        if record["metric"] == "words_per_second":
            ratios[key] = record["ratios"]
    lines = [f"{'case':36} {'implementation':27} {'words/s':>9} {'ms/step':>8} {'GiB':>6}  x peers"]
    for key, row in rows.items():
        against = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in ratios[key].items())
        share = f", efficiency {row['efficiency']:.1f} %" if "efficiency" in row else ""
        figures_ = f"{row['words_per_second']:9.0f} {row['time']:8.2f} {row['peak_memory']:6.2f}"
        lines.append(f"{key[0]:36} {key[1]:27} {figures_}  {against}{share}")
    return "\n".join(lines)


def _at(names: Sequence[str]) -> Callable[[str], tuple[str, int | None]]:
    """Return what reads ``NAME`` or ``NAME@MAX_TOKENS`` from the command line."""

    def name(text: str) -> tuple[str, int | None]:
        found, _, max_tokens = text.partition("@")
        if found not in names:
            raise argparse.ArgumentTypeError(f"{found!r} is none of {', '.join(names)}")
        return found, int(max_tokens) if max_tokens else None

    return name


def _runs(options: argparse.Namespace) -> list[Run]:
    names = options.implementation or [(n, None) for n in (_QUICK_IMPLEMENTATIONS if options.quick else available())]
    sizes = options.max_tokens or (_QUICK if options.quick else _MAX_TOKENS)
    runs = []
    for (arch, only), precision, max_tokens, gpus, (name, at) in itertools.product(
        options.arch or [("transformer_big_6e6d", None)],
        options.precision or ["fp16"],
        sizes,
        sorted({1, options.gpus or 1}),
        names,
    ):
        if {only, at} <= {None, max_tokens}:
            count = options.measured // gpus
            interval = log_interval(count)
            # The first update of all is not captured.
            least = options.measured + 1 if name == "ls_train_graph" else _WARM_UP
            before = -(-(least if options.warm_up is None else options.warm_up) // interval) * interval
            ours = [getattr(options, option) and is_ours(name) for option in OPTIONS]
            runs.append(Run(name, arch, max_tokens, precision, gpus, before + count, count, *ours))
    return runs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each of :data:`OPTIONS`."""
    for name in OPTIONS:
        option = name.replace("_", "-")
        parser.add_argument(f"--{option}", action="store_true", help=f"ours with --ls-{option}, in cases that say so")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the benchmark's command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"max-tokens {_QUICK}, {', '.join(_QUICK_IMPLEMENTATIONS)}"
    )
    parser.add_argument(
        "--arch",
        action="append",
        type=_at(sorted(ARCHS)),
        metavar="NAME[@MAX_TOKENS]",
        help=f"one of {', '.join(sorted(ARCHS))}, at all sizes or one; default: transformer_big_6e6d",
    )
    parser.add_argument("--precision", action="append", choices=("fp32", "fp16", "bf16"), help="default: fp16")
    parser.add_argument("--max-tokens", action="append", type=int)
    parser.add_argument(
        "--implementation",
        action="append",
        type=_at(available()),
        metavar="NAME[@MAX_TOKENS]",
        help=f"of {', '.join(available())}, at all sizes or one",
    )
    parser.add_argument("--gpus", type=int, help="also with so many GPUs of this host; cases then hold gpus")
    add_options(parser)
    parser.add_argument(
        "--measured",
        type=int,
        default=_MEASURED,
        help=f"batches that are measured, a multiple of {_INTERVALS} times --gpus (%(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        help=f"updates before these, in whole intervals of the log; default: {_WARM_UP}, with graphs each batch once",
    )
    parser.add_argument("--sentences", type=int, default=80000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--data", type=Path, help="folder of the data-bin: made if it is missing, and kept")
    parser.add_argument("--group", type=int, default=12, help="runs that start up together (%(default)s)")
    parser.add_argument("--limit", type=float, default=120, help="seconds a run may take (%(default)s)")
    parser.add_argument("--start-limit", type=float, default=240, help="seconds a group may start up (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep other cases' records in the output file")
    parser.add_argument("--output", type=Path, default=RESULTS / "fairseq_wps.json")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    options = parser().parse_args(argv)
    if options.gpus is not None and torch.cuda.is_available() and not 1 <= options.gpus <= torch.cuda.device_count():
        parser().error(f"--gpus {options.gpus}: this host has {torch.cuda.device_count()}")
    if options.measured < 1 or options.measured % (_INTERVALS * (options.gpus or 1)):
        parser().error(f"--measured {options.measured}: give a multiple of {_INTERVALS} times the number of GPUs")
    if options.balance_ranks and options.gpus:
        # The same batches are measured in whole windows only. Imported here as above.
        window = importlib.import_module("fairseq_plugin.rank_balance").WINDOW * options.gpus
        if options.measured % window:
            parser().error(f"--measured {options.measured}: --balance-ranks exchanges {window} batches")
    start = time.monotonic()
    compile_kernels()
    results: dict[Run, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder)
        if not (data / "train.en-de.de.idx").exists():
            write_data(data, options.sentences, options.vocabulary)
        runs = _runs(options)
        for i in range(0, len(runs), options.group):
            for run, metrics in measured(runs[i : i + options.group], data, options.limit, options.start_limit):
                results[run] = metrics
                line = " | ".join(f"{metric} {value:.1f}" for metric, value in metrics.items())
                print(f"{time.monotonic() - start:5.0f} s  {run}: {line}", flush=True)
                write_records(all_records(results, options.gpus is not None), options.output, append=options.append)
    print(table(all_records(results, options.gpus is not None)), flush=True)
    if len(results) < len(runs):
        raise SystemExit(f"{len(runs) - len(results)} of {len(runs)} runs failed")


if __name__ == "__main__":
    main()

"""Forward and backward of one encoder and one decoder layer: ls_train against PyTorch and the reference floor.

``python -m benchmarks.layer [--quick] [--precision NAME] [--output FILE]``. Sizes of Transformer-big, dropout 0.1, no
padding. The processes of all lengths start up (and compile) together and are measured one after another; the floor in
between. A decoder layer includes its encoder-decoder keys and values. A case holds layer, tokens and length, and the
precision where it is not fp16.

Of layers without a graph ``host_time`` is what the host takes to issue forward and backward while the device is idle, a
layer of four in a row as in a model. Where it is longer than ``time`` of the graph, the device waits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import copy_bandwidth, layer_floor
from benchmarks.layer_process import Work
from benchmarks.processes import Prepared, in_turn, results_in
from benchmarks.records import DTYPES, RESULTS, compile_kernels, peers_of, write_records
from benchmarks.shapes import SHAPES

KINDS = ("encoder", "decoder")
LENGTHS = (32, 128, 512)
TOKENS = (4096, 8192, 15000)
IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "torch_eager", "torch_compile", "torch_compile_graph")


def records_of(
    case: dict[str, Any], times: Mapping[str, float], host_times: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return the records of one case: milliseconds by implementation, the floor among the ``times``."""
    records = []
    for metric, values in (("time", times), ("host_time", host_times or {})):
        for name, value in values.items():
            ratios = {peer: values[peer] / value for peer in peers_of(name, values)}
            record = {"bench": "layer", "case": case, "implementation": name}
            records.append({**record, "metric": metric, "value": value, "unit": "ms", "ratios": ratios})
            if metric == "time" and name != "floor":
                share = 100 * times["floor"] / value
                records.append({**record, "metric": "percent_of_floor", "value": share, "unit": "%", "ratios": {}})
    return records


def _works(options: argparse.Namespace) -> list[Work]:
    repeats = 20 if options.quick else 50
    names = tuple(options.implementation or IMPLEMENTATIONS)
    sizes = {
        length: tuple(tokens // length * length for tokens in options.tokens or TOKENS) for length in _lengths(options)
    }
    return [
        Work(kind, options.arch, length, tokens, DTYPES[options.precision], names, repeats)
        for length, tokens in sizes.items()
        for kind in options.kind or KINDS
    ]


def _lengths(options: argparse.Namespace) -> Sequence[int]:
    return options.length or LENGTHS


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--arch", default="transformer_big_6e6d", choices=sorted(SHAPES), help="whose layers")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: both")
    parser.add_argument("--length", action="append", type=int, help=f"default: {LENGTHS}")
    parser.add_argument("--tokens", action="append", type=int, help=f"default: {TOKENS}")
    parser.add_argument("--precision", default="fp16", choices=DTYPES)
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a start-up and for a run (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep other cases' records in the output file")
    parser.add_argument("--output", type=Path, default=RESULTS / "layer.json")
    options = parser.parse_args(argv)
    start = time.monotonic()
    compile_kernels()
    bandwidth = copy_bandwidth()
    works = _works(options)
    threads = max(1, (os.cpu_count() or 1) // len(works))
    records = []
    with contextlib.ExitStack() as stack:
        runs = {}
        for work in works:
            arguments = ["-m", "benchmarks.layer_process", work.to_json()]
            process = Prepared(arguments, {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)})
            runs[work] = [stack.enter_context(process)]
        for work, outputs in in_turn(runs, options.limit, start_limit=options.limit):
            results = results_in(outputs[0])
            for tokens in work.tokens:
                dtype = getattr(torch, work.dtype)
                floor = layer_floor(work.kind, SHAPES[work.arch], tokens, work.length, dtype, bandwidth)
                times, host_times = (
                    {name: ms for rows, name, metric, ms in results if (rows, metric) == (tokens, wanted)}
                    for wanted in ("time", "host_time")
                )
                times = {"floor": floor.total, **times}
                case = {"layer": work.kind, "tokens": tokens, "length": work.length}
                if options.precision != "fp16":
                    case["precision"] = options.precision
                records += records_of(case, times, host_times)
                row = " | ".join(
                    f"{name} {ms:.3f}" + (f" (host {host_times[name]:.3f})" if name in host_times else "")
                    for name, ms in times.items()
                )
                print(f"{work.kind} {tokens} x {work.length}, ms: {row}", flush=True)
            write_records(records, options.output, append=options.append)
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

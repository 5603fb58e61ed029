"""One training step (forward, backward, clip-free Adam update) without padding: ls_train against PyTorch and the floor.

``python -m benchmarks.step [--quick] [--arch NAME] [--precision NAME] [--output FILE]``. Every implementation of a case
is measured in the same run, one after another, in processes that started up together; the floor in between. Ratios of
time and memory are peer over ls_train, those of words a second the other way round (eager ls_train for eager peers, its
graph for all). Cases of fp16 hold arch, tokens and length, others the precision too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import Floor, copy_bandwidth, step_floor
from benchmarks.processes import Prepared, in_turn, results_in
from benchmarks.records import DTYPES, RESULTS, compile_kernels, peers_of, write_records
from benchmarks.shapes import SHAPES
from benchmarks.step_process import Work

_LENGTHS = {32: (512, 1024, 4096, 8192), 30: (15000,), 128: (512, 1024, 4096, 8192, 15000)}
_LENGTHS[512] = _LENGTHS[128]
_CASES = [(tokens, length) for length, sizes in _LENGTHS.items() for tokens in sizes]
_QUICK = [(4096, 32), (8192, 32), (15000, 30)]
_FAMILIES = (("ls_train", "ls_train_graph"), ("torch_eager",), ("torch_compile", "torch_compile_graph"))
IMPLEMENTATIONS = tuple(name for family in _FAMILIES for name in family)
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
"""Dense 16-bit operations a second from the cards' data sheets, what MFU is a share of."""


def records_of(
    case: dict[str, Any], results: dict[str, tuple[float, float]], floor: Floor, flops: float
) -> list[dict[str, Any]]:
    """Return the records of one case.

    Args:
        case: of the records.
        results: (milliseconds, peak GiB) by implementation.
        floor: of the case.
        flops: operations of one step.
    """
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    times = {"floor": floor.total, **{name: time for name, (time, _) in results.items()}}
    records = []

    def add(name: str, metric: str, value: float, unit: str, ratios: dict[str, float] | None = None) -> None:
        record = {"bench": "step", "case": case, "implementation": name, "metric": metric, "value": value}
        records.append({**record, "unit": unit, "ratios": ratios or {}})

    for name, value in times.items():
        ratios = {peer: times[peer] / value for peer in peers_of(name, times)}
        add(name, "time", value, "ms", ratios)
        if name == "floor":
            continue
        peak = results[name][1]
        peaks = {peer: results[peer][1] / peak for peer in ratios if peer != "floor" and peak}
        add(name, "words_per_second", case["tokens"] / value * 1e3, "words/s", ratios)
        add(name, "peak_memory", peak, "GiB", peaks)
        add(name, "percent_of_floor", 100 * floor.total / value, "%")
        if machine in PEAK_FLOPS:
            add(name, "mfu", 100 * flops / (value * 1e-3 * PEAK_FLOPS[machine]), "%")
    return records


def run_cases(cases: Sequence[dict[str, Any]], options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """Measure cases that start up together and return their records."""
    dtype = DTYPES[options.precision]
    names = options.implementation or IMPLEMENTATIONS
    threads = max(1, (os.cpu_count() or 1) // max(1, len(cases)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    results: list[dict[str, tuple[float, float]]] = [{} for _ in cases]
    floors: dict[int, Floor] = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for number, case in enumerate(cases):
            for family in _FAMILIES:
                wanted = tuple(name for name in family if name in names)
                if wanted:
                    work = Work(
                        case["arch"], case["tokens"], case["length"], dtype, wanted, 10 if options.quick else 20
                    )
                    arguments = ["-m", "benchmarks.step_process", work.to_json()]
                    runs[number, work] = [stack.enter_context(Prepared(arguments, environment))]
        for (number, work), outputs in in_turn(runs, options.limit, start_limit=options.limit):
            results[number].update({name: (time, peak) for name, time, peak in results_in(outputs[0])})
            if number not in floors:
                sizes = (SHAPES[work.arch], work.tokens, work.length)
                floors[number] = step_floor(*sizes, getattr(torch, dtype), bandwidth)
    records = []
    for number, case in enumerate(cases):
        if number in floors:
            floor, shape = floors[number], SHAPES[case["arch"]]
            records += records_of(case, results[number], floor, shape.flops(case["tokens"], case["length"]))
            row = " | ".join(f"{name} {time:.2f} ms {peak:.2f} GiB" for name, (time, peak) in results[number].items())
            print(f"{' '.join(map(str, case.values()))}: floor {floor.total:.2f} ms, GEMMs {floor.gemms:.2f} | {row}")
    return records


def _cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = _QUICK if options.quick else _CASES
    if options.case:
        sizes = [tuple(map(int, case.split("x"))) for case in options.case]
    extra = {} if options.precision == "fp16" else {"precision": options.precision}
    return [
        {"arch": arch, "tokens": tokens // length * length, "length": length, **extra}
        for arch in options.arch or ["transformer_big_6e6d"]
        for tokens, length in sizes
    ]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4096x32, 8192x32, 15000x30 only")
    parser.add_argument("--arch", action="append", choices=sorted(SHAPES), help="default: transformer_big_6e6d")
    parser.add_argument("--case", action="append", metavar="TOKENSxLENGTH", help="in place of the default cases")
    parser.add_argument("--precision", default="fp16", choices=DTYPES)
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--together", type=int, default=3, help="cases that start up together (%(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a start-up and for a run (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep other cases' records in the output file")
    parser.add_argument("--output", type=Path, default=RESULTS / "step.json")
    options = parser.parse_args(argv)
    start = time.monotonic()
    compile_kernels()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    cases, records = _cases(options), []
    for i in range(0, len(cases), options.together):
        records += run_cases(cases[i : i + options.together], options, bandwidth)
        write_records(records, options.output, append=options.append)
        print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

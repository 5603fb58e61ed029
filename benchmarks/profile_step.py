"""Where one step of ls_train spends its time: kernels by group, each group against its own floor, and the gaps.

``python -m benchmarks.profile_step [--arch NAME] [--case TOKENSxLENGTH] [--output FILE]``. The step of
``benchmarks/step.py`` is recorded with torch's profiler, eagerly and as a CUDA graph. The floor of GEMMs is their
measured time alone, that of the other groups their bytes at copy speed (``benchmarks/floor.py``), to which attention
adds its products from length 512 on. The launches of the update are counted in the eager step.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import trace
from benchmarks.floor import copy_bandwidth, group_floors, step_floor
from benchmarks.records import DTYPES, RESULTS, capture, write_records
from benchmarks.shapes import SHAPES
from benchmarks.step_process import Work, make_step
from benchmarks.trace import Kernel, Step

# The first that fits counts; names of our kernels, of the libraries' GEMMs, and of operators on a CPU.
GROUPS = (
    ("attention", "attention|flash|fmha"),
    ("output projection: loss", "cross_entropy"),
    ("embedding", "embedding"),
    ("update", "adam|grad_norm|loss_scale"),
    ("activation + dropout", "bias_activation"),
    ("layer norm + dropout + residual", "norm|bias_dropout_add|dropout"),
    ("GEMM", "gemm|nvjet|cutlass|cublas|xmma|splitk|matmul|aten::(add)?mm|linear"),
)
_OTHER = "other: sums, copies, fills"


def group_of(name: str) -> str:
    """Return the group of a kernel."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.I)), _OTHER)


def record_step(work: Work, as_graph: bool) -> Step:
    """Return the second of three steps that were recorded."""
    step = make_step(work)
    call = capture(step) if as_graph else step
    for _ in range(3):
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json.gz"
        with trace.recorded(path):
            for _ in range(3):
                with trace.annotated():
                    call()
        return trace.read(path)[1]


def records_of(case: dict[str, Any], name: str, step: Step, floors: dict[str, float]) -> list[dict[str, Any]]:
    """Return the records of one step: of every group, of the whole, and the launches of the update.

    Args:
        case: of the records; those of a group hold it as ``group``.
        name: implementation.
        step: as it was recorded.
        floors: milliseconds by group.
    """
    records, kernels = [], step.kernels

    def add(metric: str, value: float, unit: str, **more: Any) -> None:
        record = {"bench": "profile", "case": {**case, **more}, "implementation": name, "metric": metric}
        records.append({**record, "value": value, "unit": unit, "ratios": {}})

    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(group_of(kernel.name), []).append(kernel)
    for group, members in sorted(groups.items(), key=lambda item: -sum(kernel.duration for kernel in item[1])):
        time = sum(kernel.duration for kernel in members) / 1e3
        add("launches", len(members), "launches", group=group)
        add("time", time, "ms", group=group)
        if floors.get(group) and time:
            add("percent_of_floor", 100 * floors[group] / time, "%", group=group)
    for label, members in _by_kernel(kernels).items():
        where = {"group": group_of(members[0].name), "kernel": label}
        add("launches", len(members), "launches", **where)
        add("time", sum(kernel.duration for kernel in members) / 1e3, "ms", **where)
    add("time", step.period / 1e3, "ms")
    add("gaps", step.gaps / 1e3, "ms")
    add("launches", len(kernels), "launches")
    if not name.endswith("_graph"):
        add("launches_outside_embedding_layers_criterion", _outside(kernels), "launches")
    return records


def _outside(kernels: Sequence[Kernel]) -> int:
    """Return how many kernels run before the first embedding or belong to the update."""
    embedding = next((i for i, kernel in enumerate(kernels) if group_of(kernel.name) == "embedding"), 0)
    return embedding + sum(kernel.phase == "update" for kernel in kernels[embedding:])


def _by_kernel(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Return the kernels by short name: without namespace, return type, template and arguments."""
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        plain = re.sub(r"\(anonymous namespace\)::|^void ", "", kernel.name)
        found.setdefault(re.split(r"[<(]", plain)[0][-60:], []).append(kernel)
    return found


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records for the terminal, without those of single kernels."""
    lines = []
    for record in records:
        if "kernel" not in record["case"]:
            label = record["case"].get("group", "whole step")
            lines.append(f"  {label:34} {record['metric']:44} {record['value']:9.2f} {record['unit']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="transformer_big_6e6d", choices=sorted(SHAPES))
    parser.add_argument("--case", action="append", metavar="TOKENSxLENGTH", help="default: 4096x32 and 15000x30")
    parser.add_argument("--precision", default="fp16", choices=DTYPES)
    parser.add_argument("--output", type=Path, default=RESULTS / "profile.json")
    options = parser.parse_args(argv)
    bandwidth = copy_bandwidth()
    dtype, shape = getattr(torch, DTYPES[options.precision]), SHAPES[options.arch]
    records: list[dict[str, Any]] = []
    for size in options.case or ["4096x32", "15000x30"]:
        tokens, length = map(int, size.split("x"))
        case = {"arch": options.arch, "tokens": tokens // length * length, "length": length}
        if options.precision != "fp16":
            case["precision"] = options.precision
        floor = step_floor(shape, case["tokens"], length, dtype, bandwidth)
        floors = {**group_floors(shape, case["tokens"], length, dtype, bandwidth), "GEMM": floor.products}
        for name in ("ls_train", "ls_train_graph"):
            work = Work(options.arch, case["tokens"], length, DTYPES[options.precision], (name,), 1)
            step = record_step(work, name.endswith("_graph"))
            first = len(records)
            records += records_of(case, name, step, floors)
            print(f"{size} {name}")
            print(table(records[first:]), flush=True)
        write_records(records, options.output)


if __name__ == "__main__":
    main()

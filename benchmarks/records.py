"""Timing and records shared by all benchmarks.

A record is one JSON object: ``bench``, ``case`` (a flat object), ``implementation``, ``metric``, ``value``,
``unit``, ``ratios`` (peer to ratio, above 1 where ls_train is better), and where it was measured.
"""

from __future__ import annotations

import gc
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ls_train import build
from ls_train.memory import release_workspaces

RESULTS = Path(__file__).resolve().parent / "results"

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Names of torch's types by those of fairseq's flags."""


def peers_of(name: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that implementation ``name`` is compared with: for ls_train's graph also graphs."""
    if not name.startswith("ls_train"):
        return []
    with_graphs = name.endswith("_graph")
    return [peer for peer in names if not peer.startswith("ls_train") and (with_graphs or not peer.endswith("_graph"))]


def environment() -> dict[str, Any]:
    """Return machine, versions, commit and source hash, the part of a record that says where it was measured."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"machine": machine, "versions": versions, "commit": _commit(), "source_hash": build.source_hash()}


def _commit() -> str | None:
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def write_records(records: Sequence[dict[str, Any]], path: Path, append: bool = False) -> None:
    """Write ``records``, each completed by :func:`environment` where it does not say so itself, as a JSON list.

    With ``append`` the file keeps the records it has of other benches and cases.
    """
    where = environment()
    kept = []
    if append and path.exists():
        cases = [(record["bench"], record["case"]) for record in records]
        kept = [record for record in json.loads(path.read_text()) if (record["bench"], record.get("case")) not in cases]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = json.dumps([*kept, *({**record, **where, **record} for record in records)], indent=1) + "\n"
    # A reader, or a kill in between, never sees half a file.
    part = path.with_name(path.name + ".part")
    part.write_text(whole)
    part.replace(path)


def compile_kernels() -> None:
    """Compile the CUDA library where there is a GPU, so that no run of a benchmark has to."""
    if torch.cuda.is_available():
        build.library_path()


def start_peak() -> None:
    """Give back what the allocator caches and count the peak memory from here."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def median_ms(step: Callable[[], Any], repeats: int, warmup: int) -> float:
    """Return the median time of ``step`` in milliseconds: device time between events, wall time on a CPU."""
    return medians_ms([step], repeats, warmup)[0]


def medians_ms(steps: Sequence[Callable[[], Any]], repeats: int, warmup: int) -> list[float]:
    """Return :func:`median_ms` of every step; they run in turn, so that clocks that fall under load fall for all."""
    for _ in range(warmup):
        for step in steps:
            step()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeats):
            marks = [time.perf_counter()]
            for step in steps:
                step()
                marks.append(time.perf_counter())
            times.append([(end - start) * 1e3 for start, end in itertools.pairwise(marks)])
        return [statistics.median(spent) for spent in zip(*times, strict=True)]
    torch.cuda.synchronize()
    pairs = [[] for _ in steps]
    for _ in range(repeats):
        for step, found in zip(steps, pairs, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            found.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in found) for found in pairs]


def capture(step: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of ``step``; without a GPU, ``step`` itself.

    The peak memory is counted from the capture on, without what only the warm-up needed.
    """
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    release_workspaces()
    start_peak()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay

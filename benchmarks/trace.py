"""Device work of recorded steps, read from torch profiler's traces, by the phase that launched it.

Whoever is profiled calls each step inside :func:`annotated`. What is launched before the call of ``backward`` is the
forward, what comes after it the update. Inside a CUDA graph the criterion's last kernel ends the forward, and the
kernels of the update are known by name. Without a GPU the outermost operators stand for kernels.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward", "backward", "update")
_STEP, _BACKWARD = "ls_train.benchmark.step", "ls_train.benchmark.backward"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_CRITERION = "cross_entropy"
_UPDATE = re.compile("adam|grad_norm|loss_scale")


@dataclass(frozen=True)
class Kernel:
    """One piece of device work; start and duration in microseconds from the step's first one.

    ``stream`` is the profiler's number of its stream, -1 where it has none.
    """

    name: str
    start: float
    duration: float
    phase: str
    stream: int = -1


@dataclass(frozen=True)
class Step:
    """Kernels of one step in the order of their start; period: microseconds until the next step's first kernel."""

    kernels: list[Kernel]
    period: float

    @property
    def gaps(self) -> float:
        """Microseconds of the period in which no kernel runs."""
        total = end = 0.0
        for kernel in self.kernels:
            total += max(0.0, kernel.start - end)
            end = max(end, kernel.start + kernel.duration)
        return total + max(0.0, self.period - end)

    @staticmethod
    def busy(kernels: Sequence[Kernel]) -> float:
        """Return the microseconds in which at least one of ``kernels`` runs."""
        return shared_time(kernels, ())[1]


def shared_time(kernels: Sequence[Kernel], others: Sequence[Kernel]) -> tuple[float, float]:
    """Return the microseconds in which any of ``kernels`` runs: those beside one of ``others``, and those without."""
    changes = [
        (moment, group, change)
        for group, members in enumerate((kernels, others))
        for kernel in members
        for moment, change in ((kernel.start, 1), (kernel.start + kernel.duration, -1))
    ]
    running = [0, 0]
    beside = alone = last = 0.0
    for moment, group, change in sorted(changes):
        if running[0] > 0:
            # Differences of neighbouring moments: rounding makes no share negative, as it can a difference of sums.
            beside, alone = (beside + moment - last, alone) if running[1] > 0 else (beside, alone + moment - last)
        running[group] += change
        last = moment
    return beside, alone


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Write a trace of the block, with calls of ``Tensor.backward`` marked, to ``path`` (.json.gz)."""
    backward = torch.Tensor.backward

    def marked(*arguments: Any, **options: Any) -> Any:
        with record_function(_BACKWARD):
            return backward(*arguments, **options)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    torch.Tensor.backward = marked  # type: ignore[method-assign]
    try:
        with profile(activities=activities, acc_events=True) as profiler:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def annotated() -> record_function:
    """Return the context manager that marks one step."""
    return record_function(_STEP)


def read(path: Path) -> list[Step]:
    """Return the annotated steps of the trace ``path``; the period of the last one ends with its last kernel."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = _ranges(events, _STEP)
    backwards = _ranges(events, _BACKWARD)
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    graphs = [event for event in launched.values() if _is_graph(event)]
    marks = sorted([*backwards, *((event["ts"], event["ts"] + event["dur"]) for event in graphs)])
    starts = [start for start, _ in steps]
    found: list[list[tuple[dict[str, Any], str]]] = [[] for _ in steps]
    for event in _device_work(events):
        launch = launched.get(event.get("args", {}).get("correlation"), event)
        number = bisect.bisect_right(starts, launch["ts"]) - 1
        if number >= 0 and launch["ts"] <= steps[number][1]:
            phase = "graph" if _is_graph(launch) else _phase(launch["ts"], steps[number], marks)
            found[number].append((event, phase))
    found = [sorted(of_step, key=lambda pair: pair[0]["ts"]) for of_step in found if of_step]
    last = max(event["ts"] + event["dur"] for event, _ in found[-1]) if found else 0.0
    ends = [*(of_step[0][0]["ts"] for of_step in found[1:]), last]
    return [Step(_kernels(of_step), end - of_step[0][0]["ts"]) for of_step, end in zip(found, ends)]


def _ranges(events: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [event for event in events if event["name"] == name and event.get("cat") == "user_annotation"]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def _device_work(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    work = [event for event in events if event.get("cat") in _DEVICE_WORK]
    if work or torch.cuda.is_available():
        return work
    ends: dict[int, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event.get("cat") == "cpu_op" and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            work.append(event)
    return work


def _is_graph(launch: dict[str, Any]) -> bool:
    return "GraphLaunch" in launch["name"]


def _phase(launch: float, step: tuple[float, float], marks: Sequence[tuple[float, float]]) -> str:
    """Return the phase of a launch; marks: when backward or a graph that holds it was called."""
    inside = [bounds for bounds in marks if step[0] <= bounds[0] <= step[1]]
    if inside and launch < inside[0][0]:
        return "forward"
    return "backward" if inside and launch <= inside[-1][1] else "update"


def _kernels(work: Sequence[tuple[dict[str, Any], str]]) -> list[Kernel]:
    criterion = [i for i, (event, phase) in enumerate(work) if phase == "graph" and _CRITERION in event["name"]]
    last = criterion[-1] if criterion else -1
    first = work[0][0]["ts"]
    kernels = []
    for i, (event, phase) in enumerate(work):
        if phase == "graph":
            phase = "update" if _UPDATE.search(event["name"]) else "forward" if i <= last else "backward"
        stream = event.get("args", {}).get("stream", -1)
        kernels.append(Kernel(event["name"], event["ts"] - first, event["dur"], phase, stream))
    return kernels

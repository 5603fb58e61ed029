"""Time every kernel against PyTorch eager, torch.compile, Apex and Liger where they are installed, and a plain copy.

    python -m tests.kernels.bench [op ...] [--quick]

Every call of a timed graph works on another set of buffers, together larger than the cache, so that all data come from
memory; the copy beside it is ``copy_`` moving the same number of bytes in the same way. The table and
benchmarks/results/kernels.json hold GB/s by the bytes of ``bench_problems``, the percentage of that copy, and how many
times faster ours is than each peer. Without a GPU toy sizes run, to see that everything works.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from benchmarks import records
from tests.kernels import bench_problems as problems
from tests.kernels.bench_problems import Buffers, Problem
from tests.kernels.bench_projection import output_projection

COLD_BYTES = 1 << 30  # many times the cache of any card: several sets even of large buffers, as places matter too
MAX_SETS = 256

Call = Callable[[], Any]

# Operator: (builder, sizes of --quick, further sizes). Sizes are rows and columns, or elements and nothing; of the
# output projection rows, columns and classes.
_ROWS = ((512, 1024), (4096, 1024), (32768, 1024))
_MORE_ROWS = ((15000, 1024), (65536, 512), (131072, 256), (16384, 2048), (8192, 4096), (32768, 1023))
OPERATORS: dict[str, tuple[Callable[..., Problem], Sequence, Sequence]] = {
    "layer_norm": (problems.layer_norm, _ROWS, _MORE_ROWS),
    "bias_dropout_add": (problems.bias_dropout_add, _ROWS[2:], (*_ROWS[:2], *_MORE_ROWS)),
    "bias_gradient": (problems.bias_gradient, ((15000, 3072),), ((4096, 3072), (4096, 1024))),
    "bias_dropout_add_layer_norm": (problems.bias_dropout_add_layer_norm, _ROWS, _MORE_ROWS),
    "bias_activation_dropout": (problems.bias_activation_dropout, ((8192, 4096),), ((512, 4096), *_MORE_ROWS)),
    "bias_gelu_dropout": (problems.bias_gelu_dropout, ((8192, 4096),), ((512, 4096),)),
    "dropout": (
        problems.dropout,
        ((512, 1024), (32768, 1024), (32768, 1023)),
        tuple((1 << power, 1024) for power in range(6, 17)),
    ),
    "scale_cast": (problems.scale_cast, ((40000, 1024),), ((4096, 1024), (15000, 1024), (40000, 512), (40001, 1023))),
    "softmax_dropout": (
        problems.softmax_dropout,
        ((1 << 19, 64), (1 << 20, 33), (1 << 17, 256)),
        tuple(((1 << 25) // keys, keys) for keys in (8, 16, 32, 63, 128, 255, 257, 512, 1000, 1024, 2048)),
    ),
    "embedding": (problems.embedding, ((15000, 1024),), ((4096, 1024), (15000, 512), (15000, 1001))),
    "cross_entropy": (problems.cross_entropy, ((15000, 40000),), ((4096, 40000), (4096, 32768), (4096, 40001))),
    "linear_cross_entropy": (
        output_projection,
        ((4096, 1024, 40000), (15000, 1024, 40000)),
        ((512, 1024, 40000), (4096, 512, 32768)),
    ),
    "attention": (
        problems.attention,
        ((15000, 30), (8192, 128), (16384, 256), (16384, 512)),
        tuple((16384, length) for length in (8, 16, 31, 32, 63, 64, 127, 128, 256, 500, 512, 1024)),
    ),
    "grad_norm": (problems.grad_norm, ((217_000_000, 0),), ((1_000_000, 0), (20_000_000, 0))),
    "adam": (problems.adam, ((217_000_000, 0),), ((1_000_000, 0), (20_000_000, 0))),
}
_TOY = {
    "attention": (24, 8),
    "grad_norm": (1000, 0),
    "adam": (1000, 0),
    "softmax_dropout": (256, 8),
    "linear_cross_entropy": (16, 8, 64),
}
# Liger's forward of the loss makes the gradient too, and its backward does next to nothing.
_PEER_PARTS = {("cross_entropy", "liger"): ("step",)}
# Peers that read from the device. A capture that fails leaves torch's generator unusable, so none is tried.
_UNCAPTURED = {("cross_entropy", "liger")}


@dataclass(frozen=True)
class Timer:
    """Times calls on a device: replays of a graph on a GPU, plain calls elsewhere."""

    device: torch.device
    repeats: int

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream of all captures: one, as the allocator keeps free memory for each stream by itself."""
        return torch.cuda.Stream(self.device)

    def microseconds(self, build: Callable[[], Sequence[Call]], capture: bool = True) -> float:
        """Return the time of one of the calls that ``build`` returns, which run one after another.

        On a GPU they are captured on the stream they were built on: autograd runs a backward where its forward ran.
        What they return is held while they are captured: a peer whose output is freed at once would write every call's
        to the same memory, which never leaves the cache, where our calls have buffers of their own.

        Args:
            build: makes the calls.
            capture: replay a graph; otherwise the calls are launched one by one, which takes longer for small sizes.
        """
        replay, calls = self._ready(build, capture)
        warmup = 3 if self.device.type == "cuda" and capture else 1
        return records.median_ms(replay, self.repeats, warmup) * 1e3 / len(calls)

    def in_turn(self, builds: Sequence[Callable[[], Sequence[Call]]]) -> list[float]:
        """Return :meth:`microseconds` of each of ``builds``, replayed in turn."""
        ready = [self._ready(build, True) for build in builds]
        times = records.medians_ms([replay for replay, _ in ready], self.repeats, 3)
        return [spent * 1e3 / len(calls) for spent, (_, calls) in zip(times, ready, strict=True)]

    def _ready(self, build: Callable[[], Sequence[Call]], capture: bool) -> tuple[Call, Sequence[Call]]:
        """Return a call that makes all of what ``build`` returns, and those, which hold what a graph's replay uses."""
        if self.device.type != "cuda" or not capture:
            calls = build()
            return lambda: [call() for call in calls], calls
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls = build()
            for call in [*calls, *calls]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The outer one: a capture that fails leaves its stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
            held = [call() for call in calls]
        del held
        return graph.replay, calls

    def copy(self, moved: int) -> float:
        """Return the time of a ``copy_`` that reads and writes ``moved`` bytes together."""
        half = max(1, moved // 2)
        pairs = [torch.empty((2, half), dtype=torch.uint8, device=self.device) for _ in range(self.sets(moved))]
        return self.microseconds(lambda: [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])

    def sets(self, moved: int) -> int:
        """Return how many sets of buffers of ``moved`` bytes are more than the cache holds."""
        if self.device.type != "cuda":
            return 1
        return min(MAX_SETS, max(2, math.ceil(COLD_BYTES / moved)))


def _backward(function: Callable[..., Any], problem: Problem) -> Call:
    """Return a call of autograd's backward of ``function``, whose forward runs now."""
    inputs = [
        x.detach().requires_grad_() if index < problem.differentiable else x for index, x in enumerate(problem.inputs)
    ]
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    grads = tuple(torch.randn_like(output) for output in outputs)
    wanted = inputs[: problem.differentiable]
    return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)


def _step(function: Callable[..., Any], problem: Problem) -> Call:
    """Return a call of the forward and, where there are gradients, the backward of ``function``."""
    if problem.differentiable == 0:
        return lambda: function(*problem.inputs)
    inputs = [
        x.detach().requires_grad_() if index < problem.differentiable else x for index, x in enumerate(problem.inputs)
    ]
    return lambda: torch.autograd.grad(function(*inputs).sum(), inputs[: problem.differentiable])


def _peer_call(function: Callable[..., Any], problem: Problem, part: str) -> Call:
    if part == "fwd":
        return lambda: function(*problem.inputs)
    return _backward(function, problem) if part.endswith("bwd") else _step(function, problem)


def _peer_time(timer: Timer, build: Callable[[], Sequence[Call]], name: str, captured: bool = True) -> float | None:
    """Return a peer's time, launched one by one where it cannot be captured; None where it does not run at all."""
    for capture in (True, False) if captured else (False,):
        try:
            return timer.microseconds(build, capture)
        except RuntimeError as error:
            how = "in a graph" if capture else "one by one"
            print(f"peer {name} fails {how}: {str(error).splitlines()[0]}", file=sys.stderr)
    return None


def measure(op: str, dtype: torch.dtype, size: tuple[int, ...], timer: Timer, compile_peers: bool) -> list[dict]:
    """Return one record for each part of operator ``op`` at one type and size."""
    builder = OPERATORS[op][0]
    buffers = Buffers(dtype, timer.device)
    first = builder(buffers, *size)
    sets = [first, *(builder(buffers, *size) for _ in range(timer.sets(min(first.moved.values())) - 1))]
    torch._dynamo.reset()
    functions: dict[str, Callable[..., Any]] = {"eager": first.formula, **first.peers}
    if compile_peers and op not in ("adam", "attention"):  # both are one library kernel already
        functorch_config.donated_buffer = False  # the compiled backward runs again and again
        functions["compile"] = torch.compile(first.formula, dynamic=False)
    found = []
    for part, moved in first.moved.items():
        calls = first.calls.get(part, ())
        ours, *spent_by_calls = timer.in_turn(
            [lambda part=part: [problem.ours[part] for problem in sets]]
            + [lambda part=part, name=name: [problem.calls[part][name] for problem in sets] for name in calls]
        )
        copy = timer.copy(moved)
        ratios, peers = {}, {}
        for name, function in functions.items():
            if name in first.peers and part not in _PEER_PARTS.get((op, name), ("fwd", "bwd")):
                continue
            with torch.inference_mode(part == "fwd"):
                spent = _peer_time(
                    timer,
                    lambda function=function, part=part: [_peer_call(function, p, part) for p in sets],
                    name,
                    captured=(op, name) not in _UNCAPTURED,
                )
            if spent is not None:
                peers[name], ratios[name] = spent, spent / ours
        for name, spent in zip(calls, spent_by_calls, strict=True):
            peers[name], ratios[name] = spent, spent / ours
        found.append(
            {
                "bench": "kernels",
                "case": {"op": op, "part": part, "dtype": str(dtype).removeprefix("torch."), "size": list(size)},
                "implementation": "ls_train",
                "metric": "time",
                "value": ours,
                "unit": "us",
                "bytes": moved,
                "gb_per_s": moved / ours * 1e-3,
                "percent_of_copy": 100 * copy / ours,
                "peers_us": peers,
                "ratios": ratios,
            }
        )
    return found


def _line(record: dict) -> str:
    case = record["case"]
    name = f"{case['op']} {case['part']}"
    size = "x".join(str(n) for n in case["size"] if n)
    peers = "  ".join(f"{peer} {ratio:5.2f}x" for peer, ratio in record["ratios"].items())
    return (
        f"{name:36s} {case['dtype']:9s} {size:>14s} {record['value']:10.1f} us {record['gb_per_s']:8.0f} GB/s "
        f"{record['percent_of_copy']:6.1f} % of copy   {peers}"
    )


def plot(found: Sequence[dict], path: Path) -> None:
    """Draw bandwidth over bytes moved, one panel an operator, as a picture at ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(record["case"]["op"] for record in found))
    columns = min(3, len(names))
    figure, panels = pyplot.subplots(
        -(-len(names) // columns), columns, figsize=(6 * columns, 4 * len(names) / columns + 2)
    )
    panels = list(panels.flat) if hasattr(panels, "flat") else [panels]
    for panel, name in zip(panels, names):
        curves: dict[str, list[tuple[int, float]]] = {}
        for record in found:
            case = record["case"]
            if case["op"] != name:
                continue
            curves.setdefault(f"{case['part']} {case['dtype']}", []).append((record["bytes"], record["gb_per_s"]))
            if "compile" in record["peers_us"]:
                theirs = record["bytes"] / record["peers_us"]["compile"] * 1e-3
                curves.setdefault(f"{case['part']} {case['dtype']} compile", []).append((record["bytes"], theirs))
        for label, points in curves.items():
            style = ":" if label.endswith("compile") else "-"
            panel.plot(*zip(*sorted(points)), style, marker="o", label=label)
        panel.set(title=name, xscale="log", xlabel="bytes moved", ylabel="GB/s")
        panel.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("op", nargs="*", help=f"operators, all by default: {', '.join(OPERATORS)}")
    parser.add_argument("--quick", action="store_true", help="few sizes, float16 and bfloat16 only, under six minutes")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture; there is none without matplotlib")
    parser.add_argument("--output", type=Path, default=records.RESULTS / "kernels.json")
    options = parser.parse_args(arguments)
    unknown = [op for op in options.op if op not in OPERATORS]
    if unknown:
        parser.error(f"unknown operator {unknown[0]!r}; use one of {', '.join(OPERATORS)}")
    cuda = torch.cuda.is_available()
    timer = Timer(torch.device("cuda" if cuda else "cpu"), 20 if cuda else 2)
    types = (torch.float16, torch.bfloat16) if options.quick else (torch.float32, torch.float16, torch.bfloat16)
    found = []
    for op in options.op or OPERATORS:
        start = time.perf_counter()
        quick, more = OPERATORS[op][1:]
        sizes = quick if options.quick else (*quick, *more)
        for dtype in types:
            # In the quick run once an operator and size: compiling is what takes long, and both 16-bit types run alike.
            compile_peers = cuda and not options.no_compile and (dtype == torch.float16 or not options.quick)
            for size in sizes if cuda else (_TOY.get(op, (16, 64)),):
                for record in measure(op, dtype, size, timer, compile_peers):
                    found.append(record)
                    print(_line(record), flush=True)
        # After every operator: a run that is stopped leaves what it measured.
        records.write_records(found, options.output)
        print(f"{op}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if importlib.util.find_spec("matplotlib") and not options.no_plot:
        plot(found, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""One update of fairseq and one of ls_train on a time line: what the GPU does in forward, backward and update.

``python -m benchmarks.timeline [--max-tokens N] [--traces FOLDER] [--output FILE]`` trains with each implementation for
a while and records three updates with torch's profiler, the same batches of all. The traces,
``timeline_<implementation>.json.gz``, open in Perfetto (https://ui.perfetto.dev); the second update of each makes the
records and, with ``--plot FILE`` on any machine, the picture. Recording costs the host time, most where it launches
every kernel: use ``benchmarks.fairseq_wps`` to compare speeds.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import trace
from benchmarks.fairseq_process import IMPLEMENTATIONS, train
from benchmarks.fairseq_wps import ARCHS, VOCABULARY, Run, arguments_of, environments, warm_up_updates
from benchmarks.processes import Prepared, in_turn
from benchmarks.random_data import write_data
from benchmarks.records import RESULTS, compile_kernels, write_records
from benchmarks.trace import PHASES, Step

_DEFAULT = ("fairseq_no_cudnn_attention", "ls_train", "ls_train_graph")
_RECORDED = 3
_LOGGED = 400  # so many measured updates have a log interval that none of ours falls on: steps wait there
_PROGRAM = (
    "import sys; from pathlib import Path; from benchmarks.processes import wait_for_go; "
    "from benchmarks.timeline import record_training; "
    "record_training(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:], before=wait_for_go)"
)


def trace_path(folder: Path, implementation: str) -> Path:
    """Return the path of an implementation's trace."""
    return folder / f"timeline_{implementation}.json.gz"


def flags_of(implementation: str, data: Path, case: Mapping[str, Any], skipped: int) -> list[str]:
    """Return the flags of a run whose last updates are recorded, ``skipped`` others before them."""
    return arguments_of(data, Run(implementation, *case.values(), 1, skipped + _RECORDED, _LOGGED))


def record_training(
    implementation: str,
    path: Path,
    skipped: int,
    flags: Sequence[str],
    updates: int = _RECORDED,
    before: Callable[[], None] | None = None,
    window: tuple[int, int] | None = None,
) -> None:
    """Train in this process, record ``updates`` updates after the first ``skipped`` ones to ``path``.

    Args:
        implementation: see :func:`benchmarks.fairseq_process.train`.
        path: of the trace.
        skipped: updates before the recorded ones.
        flags: of fairseq-train.
        updates: that are recorded.
        before: called when everything is built, before the first update.
        window: see :func:`benchmarks.fairseq_process.train`.
    """

    def prepare(trainer: Any) -> None:
        _record_steps(trainer, path, skipped, updates)
        if before is not None:
            before()

    train(implementation, flags, prepare, window)


def _record_steps(trainer: Any, path: Path, skipped: int, updates: int) -> None:
    train_step = trainer.train_step
    recording = contextlib.ExitStack()
    count = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == skipped + 1:
            recording.enter_context(trace.recorded(path))
        with trace.annotated():
            result = train_step(*arguments, **options)
        if count == skipped + updates:
            recording.close()
        return result

    trainer.train_step = counted


def records_of(case: dict[str, Any], steps: Mapping[str, Step]) -> list[dict[str, Any]]:
    """Return the records of one step of each implementation: its time, gaps, launches, and busy time by phase."""
    records = []
    for name, step in steps.items():
        record = {"bench": "timeline", "case": case, "implementation": name, "ratios": {}}
        figures = {"time": step.period / 1e3, "gaps": step.gaps / 1e3}
        for phase in PHASES:
            of_phase = [kernel for kernel in step.kernels if kernel.phase == phase]
            figures[f"{phase}_busy"] = Step.busy(of_phase) / 1e3
        records += [{**record, "metric": metric, "value": value, "unit": "ms"} for metric, value in figures.items()]
        records.append({**record, "metric": "launches", "value": len(step.kernels), "unit": "launches"})
    return records


def plot(steps: Mapping[str, Step], output: Path) -> None:
    """Draw the kernels of each step, a row a phase, all on one time axis, into the image ``output``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(steps), 1, figsize=(11, 1.9 * len(steps)), sharex=True, squeeze=False)
    for panel, (name, step) in zip(panels[:, 0], steps.items()):
        for row, phase in enumerate(PHASES):
            bars = [(k.start / 1e3, k.duration / 1e3) for k in step.kernels if k.phase == phase]
            panel.broken_barh(bars, (len(PHASES) - 1 - row - 0.4, 0.8), color=f"C{row}")
        panel.axvline(step.period / 1e3, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(PHASES)), reversed(PHASES))
        panel.set_title(f"{name}: {step.period / 1e3:.1f} ms, of which {step.gaps / 1e3:.1f} ms idle", loc="left")
    panels[-1, 0].set_xlabel("ms")
    panels[-1, 0].set_xlim(left=0)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def read_steps(folder: Path) -> dict[str, Step]:
    """Return the second recorded step of every implementation that has a trace in ``folder``."""
    paths = {name: trace_path(folder, name) for name in reversed(IMPLEMENTATIONS)}
    return {name: trace.read(path)[1] for name, path in paths.items() if path.exists()}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="transformer_big_6e6d", choices=sorted(ARCHS))
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--precision", default="fp16", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help=f"default: {_DEFAULT}")
    parser.add_argument(
        "--warm-up", type=int, help="updates before the recorded ones; default: as many as the graphs need"
    )
    parser.add_argument("--sentences", type=int, default=30000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--limit", type=float, default=150, help="seconds for the start-up and for a run (%(default)s)")
    parser.add_argument("--traces", type=Path, default=RESULTS, help="folder of the traces (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "timeline.json")
    parser.add_argument("--plot", type=Path, help="only draw the traces of --traces into this image")
    options = parser.parse_args(argv)
    if options.plot is not None:
        plot(read_steps(options.traces), options.plot)
        return
    compile_kernels()
    names = options.implementation or _DEFAULT
    skipped = max(map(warm_up_updates, names)) if options.warm_up is None else options.warm_up
    case = {"arch": options.arch, "max_tokens": options.max_tokens, "precision": options.precision}
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_data(Path(folder), options.sentences, options.vocabulary)
        runs = {}
        for name in names:
            flags = flags_of(name, Path(folder), case, skipped)
            words = ["-c", _PROGRAM, name, str(trace_path(options.traces, name)), str(skipped), *flags]
            runs[name] = [stack.enter_context(Prepared(words, environments(1)[0]))]
        for name, _ in in_turn(runs, options.limit, options.limit):
            steps[name] = trace.read(trace_path(options.traces, name))[1]
            records = records_of(case, steps)
            write_records(records, options.output)
            row = ", ".join(f"{r['metric']} {r['value']:.2f}" for r in records if r["implementation"] == name)
            print(f"{name}: {row}", flush=True)
    if len(steps) < len(names):
        raise SystemExit(f"{len(names) - len(steps)} of {len(names)} runs failed")


if __name__ == "__main__":
    main()

"""One update of fairseq and one of ls_train on a time line: what the GPU does in forward, backward and update.

``python -m benchmarks.timeline [--max-tokens N] [--traces FOLDER] [--output FILE]`` trains with each implementation for
a while and records three updates with torch's profiler. The traces, ``timeline_<implementation>.json.gz``, open in
Perfetto (https://ui.perfetto.dev); the second update of each makes the records and, with ``--plot FILE``, the picture.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import trace
from benchmarks.fairseq_process import IMPLEMENTATIONS, train
from benchmarks.fairseq_wps import ARCHS, VOCABULARY, Run, arguments_of, warm_up_updates
from benchmarks.random_data import write_data
from benchmarks.records import RESULTS, compile_kernels, write_records
from benchmarks.trace import PHASES, Step

_DEFAULT = ("fairseq_no_cudnn_attention", "ls_train", "ls_train_graph")
_RECORDED = 3


def trace_path(folder: Path, implementation: str) -> Path:
    """Return the path of an implementation's trace."""
    return folder / f"timeline_{implementation}.json.gz"


def record_training(
    implementation: str, path: Path, skipped: int, flags: Sequence[str], updates: int = _RECORDED
) -> None:
    """Train in this process, record ``updates`` updates after the first ``skipped`` ones to ``path``."""
    train(implementation, flags, lambda trainer: _record_steps(trainer, path, skipped, updates))


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
    parser.add_argument("--warm-up", type=int, help="updates before the recorded ones")
    parser.add_argument("--sentences", type=int, default=30000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--limit", type=float, default=150, help="seconds a run may take (%(default)s)")
    parser.add_argument("--traces", type=Path, default=RESULTS, help="folder of the traces (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "timeline.json")
    parser.add_argument("--plot", type=Path, help="only draw the traces of --traces into this image")
    options = parser.parse_args(argv)
    if options.plot is not None:
        plot(read_steps(options.traces), options.plot)
        return
    compile_kernels()
    case = {"arch": options.arch, "max_tokens": options.max_tokens, "precision": options.precision}
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), options.sentences, options.vocabulary)
        for name in options.implementation or _DEFAULT:
            skipped = options.warm_up or warm_up_updates(name)
            run = Run(name, *case.values(), 1, skipped + _RECORDED, _RECORDED)
            path = trace_path(options.traces, name)
            program = (
                "import sys; from pathlib import Path; from benchmarks.timeline import record_training; "
                f"record_training({name!r}, Path(sys.argv[1]), {skipped}, sys.argv[2:])"
            )
            command = [sys.executable, "-c", program, str(path), *arguments_of(Path(folder), run)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
            if done.returncode != 0:
                print(f"{name} ended with code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
                continue
            steps[name] = trace.read(path)[1]
            records = records_of(case, steps)
            write_records(records, options.output)
            row = ", ".join(f"{r['metric']} {r['value']:.2f}" for r in records if r["implementation"] == name)
            print(f"{name}: {row}", flush=True)


if __name__ == "__main__":
    main()

"""Write the tables of README.md and docs/, and their pictures, from the records: ``python -m benchmarks.report``.

A table stands between two comment lines, the first of which names it; nothing in between is written by hand. Without a
record the table says how to make one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves_summary import plot as plot_curves
from benchmarks.fairseq_wps import OPTIONS
from benchmarks.records import RESULTS
from benchmarks.timeline import plot as plot_timeline
from benchmarks.timeline import read_steps

ROOT = RESULTS.parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
IMAGES = ROOT / "docs" / "images"
_BLOCK = re.compile(r"(<!-- results (\w+): python -m benchmarks\.report -->\n).*?(<!-- end of results -->\n)", re.S)
_NAMES = {
    "floor": "reference floor",
    "ls_train_graph": "ls_train, CUDA graph",
    "ls_train": "ls_train",
    "torch_compile_graph": "torch.compile, CUDA graph",
    "torch_compile": "torch.compile",
    "torch_eager": "PyTorch eager",
    "fairseq_no_cudnn_attention": "fairseq, cuDNN attention off",
    "fairseq_apex": "fairseq with Apex",
    "fairseq": "fairseq",
}
_BAR_CASES = ((4096, 32), (8192, 32), (15000, 30))
_Record = dict[str, Any]


def load(name: str) -> list[_Record]:
    """Return the records of one file of benchmarks/results/, none where it does not exist."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else []


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def where(records: Sequence[_Record]) -> str:
    """Return the sentence that says where ``records`` were measured, one part for each run."""
    runs = []
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
        run = f"{record['machine']} ({versions}; sources {record['source_hash']})"
        if run not in runs:
            runs.append(run)
    return f"Measured on {'; '.join(runs)}."


def _precision(case: Mapping[str, Any]) -> str:
    return f", {case['precision']}" if "precision" in case else ""


def _by_case(records: Sequence[_Record], label: Callable[[Mapping[str, Any]], str]) -> dict[str, dict[tuple, _Record]]:
    """Return {label of the case: {(implementation, metric): record}}, cases with fewer settings first."""
    cases: dict[str, dict[tuple, _Record]] = {}
    for record in sorted(records, key=lambda record: (len(record["case"]), *record["case"].values())):
        cases.setdefault(label(record["case"]), {})[record["implementation"], record["metric"]] = record
    return cases


def _implementations(records: Sequence[_Record]) -> list[str]:
    present = {record["implementation"] for record in records}
    return [name for name in _NAMES if name in present]


def _value(cells: Mapping[tuple, _Record], name: str, metric: str, form: str) -> str:
    record = cells.get((name, metric))
    return format(record["value"], form) if record else ""


def step_table(records: Sequence[_Record], all_cases: bool = False) -> str:
    """Return milliseconds and peak GiB of whole steps: those of the goals, or all with floor and MFU as well."""
    if not all_cases:
        sizes = [(r["case"]["tokens"], r["case"]["length"]) for r in records]
        records = [r for r, size in zip(records, sizes) if size in _BAR_CASES and "big_6e6d" in r["case"]["arch"]]
    cases = _by_case(records, lambda c: f"{c['arch']}{_precision(c)}, {c['tokens']} tokens of length {c['length']}")
    names = _implementations(records)
    if not all_cases:
        rows = [[_NAMES[name], *(_step_cell(cells, name) for cells in cases.values())] for name in names]
        return grid(["ms a step (peak GiB)", *cases], rows)
    head = ["ms a step (peak GiB)", *(_NAMES[name] for name in names), "% of floor", "MFU %"]
    rows = []
    for label, cells in cases.items():
        best = "ls_train_graph" if ("ls_train_graph", "time") in cells else "ls_train"
        shares = [_value(cells, best, metric, ".0f") for metric in ("percent_of_floor", "mfu")]
        rows.append([label, *(_step_cell(cells, name) for name in names), *shares])
    return grid(head, rows)


def _step_cell(cells: Mapping[tuple, _Record], name: str) -> str:
    time, peak = _value(cells, name, "time", ".1f"), _value(cells, name, "peak_memory", ".1f")
    return f"{time} ({peak})" if peak and float(peak) else time


def layer_table(records: Sequence[_Record]) -> str:
    """Return milliseconds of forward and backward of single layers, those of the host, and percent of the floor."""
    cases = _by_case(records, lambda c: f"{c['layer']}{_precision(c)}, {c['tokens']} tokens of length {c['length']}")
    names = _implementations(records)
    rows = []
    for label, cells in cases.items():
        best = "ls_train_graph" if ("ls_train_graph", "time") in cells else "ls_train"
        times = [_layer_cell(cells, name) for name in names]
        rows.append([label, *times, _value(cells, best, "percent_of_floor", ".0f")])
    has_host = any(record["metric"] == "host_time" for record in records)
    head = "ms forward + backward" + (" (host's time to issue them)" if has_host else "")
    return grid([head, *(_NAMES[name] for name in names), "% of floor"], rows)


def _layer_cell(cells: Mapping[tuple, _Record], name: str) -> str:
    time, host = _value(cells, name, "time", ".2f"), _value(cells, name, "host_time", ".2f")
    return f"{time} ({host})" if host else time


def wps_table(records: Sequence[_Record]) -> str:
    """Return target words a second of training runs, and how many times the fair baseline's."""
    cases = _by_case(records, _wps_label)
    names = _implementations(records)
    head = ["words/s (ms a step)", *(_NAMES[name] for name in names), "peak GiB of ls_train"]
    rows = []
    for label, cells in cases.items():
        row = [label]
        for name in names:
            speed, time = _value(cells, name, "words_per_second", ",.0f"), _value(cells, name, "time", ".1f")
            ratio = cells.get((name, "words_per_second"), {}).get("ratios", {}).get("fairseq_no_cudnn_attention")
            row.append(f"{speed} ({time})" + (f", **{ratio:.1f} x**" if ratio else "") if speed else "")
        rows.append([*row, _value(cells, "ls_train", "peak_memory", ".1f")])
    text = grid(head, rows)
    shares = [
        f"{record['value']:.1f} % ({_NAMES[record['implementation']]}, {_wps_label(record['case'])})"
        for record in records
        if record["metric"] == "efficiency"
    ]
    return text + (f"\nEfficiency of several GPUs: {'; '.join(shares)}.\n" if shares else "")


def all_reduce_table(records: Sequence[_Record]) -> str:
    """Return the time of the all-reduce of an update, and how much of it backward hides."""
    cases, names = _by_case(records, _wps_label), _implementations(records)
    rows = []
    for label, cells in cases.items():
        times = [_value(cells, name, "all_reduce_time", ".2f") for name in names]
        shares = [_value(cells, name, "all_reduce_hidden", ".0f") for name in names]
        rows.append([label, *(f"{time} ({share} %)" if time else "" for time, share in zip(times, shares))])
    return grid(["ms of all-reduce an update (share hidden)", *(_NAMES[name] for name in names)], rows)


def _wps_label(case: Mapping[str, Any]) -> str:
    gpus = f", {case['gpus']} GPUs" if case.get("gpus", 1) > 1 else ""
    options = "".join(f", --ls-{name.replace('_', '-')}" for name in OPTIONS if case.get(name))
    return f"{case['arch']}, {case['precision']}, max-tokens {case['max_tokens']}{options}{gpus}"


def profile_table(records: Sequence[_Record]) -> str:
    """Return the groups of kernels of one step of each case: launches, time and percent of the group's floor."""
    text = []
    cases = _by_case(
        [r for r in records if "kernel" not in r["case"]],
        lambda c: json.dumps({name: value for name, value in c.items() if name != "group"}),
    )
    for label in cases:
        case = json.loads(label)
        for name in _implementations(records):
            of_step = [
                r
                for r in records
                if r["implementation"] == name and case == {k: v for k, v in r["case"].items() if k != "group"}
            ]
            groups: dict[str, dict[str, float]] = {}
            for record in of_step:
                groups.setdefault(record["case"].get("group", "whole step"), {})[record["metric"]] = record["value"]
            if not groups:
                continue
            rows = []
            for group, figures in groups.items():
                share = figures.get("percent_of_floor")
                counted = f"{figures.get('launches', 0):.0f}"
                rows.append([group, counted, f"{figures.get('time', 0.0):.2f}", f"{share:.0f}" if share else ""])
            title = f"{case['arch']}{_precision(case)}, {case['tokens']} tokens of length {case['length']}"
            whole = groups["whole step"]
            note = f"Idle between kernels: {whole['gaps']:.2f} ms."
            outside = whole.get("launches_outside_embedding_layers_criterion")
            if outside is not None:
                note += f" Launches outside embedding, layers and criterion: {outside:.0f}."
            head = [f"{_NAMES[name]}: {title}", "launches", "ms", "% of floor"]
            text.append(f"{grid(head, rows)}\n{note}\n")
    return "\n".join(text)


def curves_table(records: Sequence[_Record]) -> str:
    """Return means over seeds of validation loss and BLEU, and the differences from fairseq against what is allowed."""
    summaries = [record for record in records if "seeds" in record["case"]]
    cases = _by_case(summaries, lambda c: c["precision"])
    seeds = {(r["case"]["precision"], r["implementation"], r["metric"]): r["case"]["seeds"] for r in summaries}
    rows = []
    for precision, cells in cases.items():
        for name in _implementations(summaries):
            if not _value(cells, name, "valid_loss_mean", ""):
                continue
            row = [f"{_NAMES[name]}, {precision}"]
            for metric, unit in (("valid_loss", " %"), ("bleu", "")):
                mean, error = (_value(cells, name, f"{metric}_{what}", ".3f") for what in ("mean", "standard_error"))
                count = seeds.get((precision, name, f"{metric}_mean"))
                row.append(f"{mean} ± {error} ({count})" if error else mean)
                difference = _value(cells, name, f"{metric}_difference", "+.2f")
                allowed = _value(cells, name, f"{metric}_allowed", ".2f")
                row.append(f"{difference}{unit} (allowed {allowed}{unit})" if difference else "")
            rows.append(row)
    if not rows:
        return ""
    case = summaries[0]["case"]
    head = ["", "validation loss (seeds)", "against fairseq", "BLEU (seeds)", "against fairseq"]
    about = f"{case['arch']}, {case['updates']} updates of at most {case['max_tokens']} tokens."
    return f"{grid(head, rows)}\n{about}\n"


def _image(name: str, text: str) -> str:
    return f"\n![{text}]({{images}}/{name})\n" if (IMAGES / name).exists() else ""


_TABLES: dict[str, tuple[str, Callable[[list[_Record]], str], tuple[str, str] | None, str]] = {
    "words_per_second": (
        "fairseq_wps.json",
        wps_table,
        ("words_per_second.png", "words a second"),
        "benchmarks.fairseq_wps",
    ),
    "step": ("step.json", step_table, None, "benchmarks.step"),
    "all_steps": ("step.json", lambda records: step_table(records, all_cases=True), None, "benchmarks.step"),
    "layer": ("layer.json", layer_table, None, "benchmarks.layer"),
    "profile": ("profile.json", profile_table, None, "benchmarks.profile_step"),
    "all_reduce": ("all_reduce.json", all_reduce_table, None, "benchmarks.all_reduce"),
    "curves": ("curves.json", curves_table, ("curves.png", "validation loss"), "benchmarks.curves"),
    "timeline": (
        "timeline.json",
        lambda records: "",
        ("timeline.png", "one update on a time line"),
        "benchmarks.timeline",
    ),
}


def block(name: str, images: str) -> str:
    """Return what stands between the two comment lines of table ``name``; images: path of docs/images from the page.

    Raises:
        ValueError: no such table.
    """
    if name not in _TABLES:
        raise ValueError(f"a page asks for results {name!r}; known are {', '.join(_TABLES)}")
    file, table, image, command = _TABLES[name]
    records = load(file)
    text = table(records) if records else ""
    picture = _image(*image).format(images=images) if image and records else ""
    if not text and not picture:
        return f"\nNo record yet: `python -m {command}` on a GPU makes one.\n\n"
    return f"\n{text}{picture}\n{where(records)}\n\n"


def updated(text: str, page: Path) -> str:
    """Return the text of ``page`` with current tables."""
    images = "images" if page.parent.name == "docs" else "docs/images"
    return _BLOCK.sub(lambda match: match[1] + block(match[2], images) + match[3], text)


def plot_words(records: Sequence[_Record], output: Path) -> None:
    """Draw target words a second over max-tokens, a line an implementation, into the image ``output``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    of_speed = [
        r
        for r in records
        if r["metric"] == "words_per_second" and r["case"].get("gpus", 1) == 1 and "token_budget" not in r["case"]
    ]
    # One architecture, the one with most records: lines of several would lie over each other.
    archs = [r["case"]["arch"] for r in of_speed]
    of_speed = [r for r in of_speed if r["case"]["arch"] == max(archs, key=archs.count)]
    for name in _implementations(of_speed):
        for precision in sorted({r["case"]["precision"] for r in of_speed if r["implementation"] == name}):
            points = sorted(
                (r["case"]["max_tokens"], r["value"])
                for r in of_speed
                if r["implementation"] == name and r["case"]["precision"] == precision
            )
            axes.plot(*zip(*points), "o-", markersize=4, label=f"{_NAMES[name]}, {precision}")
    axes.set(xlabel="max-tokens", ylabel="target words a second", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def draw() -> None:
    """Draw the pictures whose records exist."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    if records := load("fairseq_wps.json"):
        plot_words(records, IMAGES / "words_per_second.png")
    if records := load("curves.json"):
        plot_curves(records, IMAGES / "curves.png")
    if steps := read_steps(RESULTS):
        plot_timeline(steps, IMAGES / "timeline.png")


def main() -> None:
    """Rewrite the pages and pictures; with --check only say whether the pages are current, by the exit code."""
    if "--check" not in sys.argv[1:]:
        draw()
    for page in PAGES:
        text = page.read_text()
        if "--check" in sys.argv[1:] and updated(text, page) != text:
            sys.exit(f"{page.name} is not current: run python -m benchmarks.report")
        page.write_text(updated(text, page))


if __name__ == "__main__":
    main()

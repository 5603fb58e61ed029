"""Write the tables of the README from the records in benchmarks/results/: ``python -m benchmarks.report``.

The tables stand between two comment lines in README.md; nothing between them is written by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.records import RESULTS

README = RESULTS.parent.parent / "README.md"
_BEGIN, _END = "<!-- results: python -m benchmarks.report -->\n", "<!-- end of results -->\n"
_IMPLEMENTATIONS = {
    "floor": "reference floor",
    "ls_train_graph": "ls_train, CUDA graph",
    "ls_train": "ls_train",
    "torch_compile_graph": "torch.compile, CUDA graph",
    "torch_compile": "torch.compile",
    "torch_eager": "PyTorch eager",
}


def load(name: str) -> list[dict[str, Any]]:
    """Return the records of one file of benchmarks/results/, none where it does not exist."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else []


def step_table(records: list[dict[str, Any]]) -> str:
    """Return the table of the whole-step benchmark in Markdown: milliseconds and peak GiB of each case."""
    cases, cells = [], {}
    for record in records:
        case = record["case"]
        label = f"{case['arch']}, {case['tokens']} tokens of length {case['length']}"
        if label not in cases:
            cases.append(label)
        cells[record["implementation"], label, record["metric"]] = record["value"]
    lines = ["| ms a step (peak GiB) | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for name, title in _IMPLEMENTATIONS.items():
        row = []
        for label in cases:
            time, peak = cells.get((name, label, "time")), cells.get((name, label, "peak_memory"))
            row.append("" if time is None else f"{time:.1f}" + (f" ({peak:.1f})" if peak else ""))
        if any(row):
            lines.append(f"| {title} | " + " | ".join(row) + " |")
    where = records[0]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    source = f"Measured in one run on {where['machine']} ({versions}; sources {where['source_hash']})."
    return "\n".join([*lines, "", source]) + "\n"


def results() -> str:
    """Return what stands between the two comment lines."""
    records = load("step.json")
    return step_table(records) if records else ""


def updated(readme: str) -> str:
    """Return the text of the README with current tables.

    Raises:
        ValueError: a comment line is missing.
    """
    if _BEGIN not in readme or _END not in readme:
        raise ValueError(f"README.md must hold the lines {_BEGIN.strip()!r} and {_END.strip()!r}")
    head, rest = readme.split(_BEGIN)
    return head + _BEGIN + "\n" + results() + "\n" + _END + rest.split(_END)[1]


def main() -> None:
    """Rewrite README.md; with --check only say whether it is current, by the exit code."""
    text = README.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if updated(text) == text else "README.md is not current: run python -m benchmarks.report")
    README.write_text(updated(text))


if __name__ == "__main__":
    main()

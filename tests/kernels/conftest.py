"""``pytest tests/kernels --record FILE`` writes which operators passed on a GPU at which types, and on what machine."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.records import environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the record of the CUDA tests that ran to this file")


def pytest_runtest_setup(item: pytest.Item) -> None:
    parameters = getattr(item, "callspec", None) and item.callspec.params
    if parameters and parameters.get("device") == "cuda" and "dtype" in parameters:
        item.user_properties.append(("record", (item.path.stem[len("test_") :], str(parameters["dtype"])[6:])))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is None:
        return
    counts: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: {"passed": 0, "failed": 0}))
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "record" and report.when == "call":
                    operator, dtype = value
                    counts[operator][dtype][outcome] += 1
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"bench": "kernel_tests", "operators": counts, "failed": failed, **environment()}
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

"""The benchmarks run at toy size without a GPU, and the README's tables are those of the records."""

from __future__ import annotations

import json

import pytest

from benchmarks import fairseq_wps, report, step

KEYS = {"bench", "case", "implementation", "metric", "value", "unit", "ratios"}
WHERE = {"machine", "versions", "commit", "source_hash"}


def test_step(tmp_path) -> None:
    output = tmp_path / "step.json"
    names = ["ls_train", "torch_eager"]
    flags = [argument for name in names for argument in ("--implementation", name)]
    toy = ["--arch", "transformer_toy_1e1d", "--case", "64x8", "--dtype", "float32", "--quick"]
    step.main([*toy, *flags, "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    times = {r["implementation"]: r for r in records if r["metric"] == "time"}
    assert set(times) == {"floor", *names}
    assert times["ls_train"]["case"] == {"arch": "transformer_toy_1e1d", "tokens": 64, "length": 8}
    ratio = times["torch_eager"]["value"] / times["ls_train"]["value"]
    assert times["ls_train"]["ratios"]["torch_eager"] == pytest.approx(ratio)


def test_ratios_above_one_are_better() -> None:
    case = {"arch": "transformer_toy", "max_tokens": 256, "precision": "fp32"}
    ours = {"words_per_second": 200.0, "time": 5.0, "peak_memory": 1.0}
    theirs = {"words_per_second": 100.0, "time": 10.0, "peak_memory": 2.0}
    records = fairseq_wps.records_of(case, {"ls_train": ours, "fairseq": theirs})
    assert all(record.keys() == KEYS for record in records)
    ratios = {r["metric"]: r["ratios"] for r in records if r["implementation"] == "ls_train"}
    assert ratios == {metric: {"fairseq": 2.0} for metric in ours}


def test_both_engines_get_the_same_flags(tmp_path) -> None:
    lines = [
        [
            word.removeprefix("ls_")
            for word in fairseq_wps.arguments_of(tmp_path, name, "transformer_toy", 256, "fp32", 20)
        ]
        for name in ("ls_train", "fairseq")
    ]
    assert lines[0] == lines[1]


def test_readme_is_current() -> None:
    text = report.README.read_text()
    assert report.updated(text) == text, "run python -m benchmarks.report"

"""Learning curves: graphs against eager by the same rule, and further seeds added to an existing record file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curves, curves_summary
from benchmarks.curves import Run
from benchmarks.curves_summary import EAGER, GRAPH, PEER
from benchmarks.records import write_records

COMMON = {"arch": "transformer_toy", "max_tokens": 600, "updates": 20}


def run_records(name: str, seed: int, loss: float, bleu: float | None = 20.0) -> list[dict[str, Any]]:
    case = {**COMMON, "precision": "fp16", "seed": seed}
    return curves_summary.run_records(case, name, [(10, 9.0), (20, loss)], bleu)


def figures(records: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(r["implementation"], r["metric"]): r["value"] for r in records if "seeds" in r["case"]}


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**COMMON, "work": folder / "work", "output": folder / "curves.json", **changes})


def finish(run: Run, settings: argparse.Namespace, loss: float) -> None:
    """Leave what a finished run leaves."""
    folder = settings.work / run.name
    folder.mkdir(parents=True)
    row = {"epoch": 1, "valid_loss": str(loss), "valid_num_updates": str(COMMON["updates"])}
    (folder / "train.log").write_text(json.dumps(row))
    (folder / "result.json").write_text(json.dumps({"bleu": 21.0}))


def test_graphs_are_compared_with_eager_by_the_same_rule() -> None:
    records = [*run_records(PEER, 1, 4.0), *run_records(EAGER, 1, 4.0), *run_records(GRAPH, 1, 4.04, 20.2)]
    found = figures(curves_summary.summary(records))
    assert found[GRAPH, "valid_loss_eager_difference"] == pytest.approx(1.0)
    assert found[GRAPH, "valid_loss_eager_allowed"] == curves_summary.LOSS_PERCENT
    assert (found[GRAPH, "valid_loss_eager_within"], found[GRAPH, "bleu_eager_within"]) == (0, 1)
    assert found[GRAPH, "valid_loss_within"] == 0, "fairseq's comparison stays"
    assert not any("eager" in metric for name, metric in found if name != GRAPH)
    table = curves.table(curves_summary.summary(records))
    assert "ls_train_graph (1 seeds)" in table
    assert "valid_loss_eager_difference" in table
    without_fairseq = figures(curves_summary.summary(records[3:]))
    assert without_fairseq[GRAPH, "valid_loss_eager_within"] == 0
    assert (GRAPH, "valid_loss_within") not in without_fairseq


def test_further_seeds_join_an_existing_record_file(tmp_path) -> None:
    settings = options(tmp_path)
    place = {"machine": "card", "source_hash": "abc"}
    first = [record | place for seed in (1, 2) for record in run_records(EAGER, seed, 4.0)]
    partial = run_records(EAGER, 3, 4.0, None)
    write_records([*first, *partial, *curves_summary.summary(first)], settings.output)
    kept = curves.earlier(settings)
    assert kept.keys() == {Run(EAGER, "fp16", 1), Run(EAGER, "fp16", 2)}, "a run without BLEU has to be made again"
    new = [Run(EAGER, "fp16", 3), Run(GRAPH, "fp16", 1)]
    for run in new:
        finish(run, settings, 4.3)
    write_records(curves.collected(new, settings, [r for records in kept.values() for r in records]), settings.output)
    written = json.loads(settings.output.read_text())
    assert len([r for r in written if r["metric"] == "bleu"]) == 4
    assert figures(written)[EAGER, "valid_loss_mean"] == pytest.approx((4.0 + 4.0 + 4.3) / 3)
    assert {r["case"]["seeds"] for r in written if "seeds" in r["case"]} == {1, 3}
    assert {r["machine"] for r in written if r["case"].get("seed") in (1, 2) and r["implementation"] == EAGER} == {
        "card"
    }, "they keep where they were measured"
    assert {r["machine"] for r in written if r["implementation"] == GRAPH} != {"card"}


def test_runs_of_another_kind_are_not_mixed(tmp_path) -> None:
    settings = options(tmp_path)
    write_records(run_records(EAGER, 1, 4.0), settings.output)
    with pytest.raises(ValueError, match="holds runs with {'updates': 20}"):
        curves.earlier(options(tmp_path, updates=2000))
    assert curves.earlier(options(tmp_path, output=tmp_path / "none.json")) == {}


def test_only_the_seeds_that_are_missing_are_made(tmp_path, monkeypatch) -> None:
    settings = options(tmp_path)
    write_records(run_records(EAGER, 4, 4.0), settings.output)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / curves.REFERENCE).touch()
    made = []
    monkeypatch.setattr(curves, "run_all", lambda runs, *rest: made.extend(runs) or [])
    words = f"--data {tmp_path}/bin --output {settings.output} --work {settings.work} --arch transformer_toy"
    words += f" --updates 20 --max-tokens 600 --precision fp16 --implementation {EAGER}"
    curves.main([*words.split(), "--first-seed", "4", "--append"])
    assert [run.seed for run in made] == [5, 6]
    with pytest.raises(SystemExit):
        curves.main([*words.replace("--updates 20", "--updates 30").split(), "--append"])

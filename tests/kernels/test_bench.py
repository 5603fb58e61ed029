"""The kernel benchmark at toy sizes on whatever device is there: every operator gives records of the common form."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import ls_train.ops
from tests.kernels import bench


def test_every_operator_is_timed() -> None:
    untimed = {"adam_prepare", "layer_norm_residual", "linear_cross_entropy", "loss_scale_update"}
    assert set(ls_train.ops.__all__) - untimed <= set(bench.OPERATORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real sizes take minutes on a GPU")
def test_toy_run_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    bench.main(["--quick", "--no-plot", "--output", str(path)])
    found = json.loads(path.read_text())
    parts = {(record["case"]["op"], record["case"]["part"]) for record in found}
    assert {op for op, _ in parts} == set(bench.OPERATORS)
    assert {("layer_norm", "bwd"), ("cross_entropy", "step"), ("adam", "step"), ("dropout", "fwd")} <= parts
    for record in found:
        assert record["value"] > 0
        assert record["source_hash"]
        assert record["gb_per_s"] == pytest.approx(record["bytes"] / record["value"] * 1e-3)
        assert math.isfinite(record["percent_of_copy"])
        assert record["ratios"].keys() >= {"eager"}
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_unknown_operator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["layernorm"])
    assert "unknown operator 'layernorm'; use one of layer_norm," in capsys.readouterr().err

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
    untimed = {
        "adam_prepare",
        "column_sum",
        "layer_norm_residual",
        "linear_cross_entropy_gradients",
        "loss_scale_update",
    }
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
    peers = {(record["case"]["op"], record["case"]["part"]): record["ratios"].keys() for record in found}
    for part in ("step", "autograd_step"):
        assert peers["linear_cross_entropy", part] >= {"products", "products_in_chunks"}
    assert "torch_embedding_backward" in peers["embedding", "sort_bwd"]
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_calls_are_timed_in_turn() -> None:
    """As clocks fall under load, what is timed first would look faster."""
    seen = []
    timer = bench.Timer(torch.device("cpu"), 2)
    times = timer.in_turn([lambda name=name: [lambda: seen.append(name)] * 3 for name in "ab"])
    assert len(times) == 2
    assert min(times) > 0
    assert "".join(seen) == "aaabbb" * 5


def test_a_peer_that_fails_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> list:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    assert bench._peer_time(bench.Timer(torch.device("cpu"), 1), build, "eager") is None
    message = "peer eager fails {}: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == message.format("in a graph") + message.format("one by one")


def test_a_run_that_stops_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(op: str, *arguments: object) -> list[dict]:
        if op == "adam":
            raise KeyboardInterrupt
        return [{"case": {"op": op}}]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "_line", str)
    path = tmp_path / "kernels.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["grad_norm", "adam", "--quick", "--no-plot", "--output", str(path)])
    assert {record["case"]["op"] for record in json.loads(path.read_text())} == {"grad_norm"}


def test_unknown_operator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["layernorm"])
    assert "unknown operator 'layernorm'; use one of layer_norm," in capsys.readouterr().err

"""One step of the loss scale by hand, on every device; tests/optim compares long sequences with fairseq's scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_train.ops import loss_scale_update
from ls_train.testing import devices
from tests.kernels.leaf_contract import Call, LeafContract, call

on_every_device = pytest.mark.parametrize("device", devices())


def state(device: str, scale: float = 64.0, counters: tuple[int, ...] = (0, -1, -1, 0)) -> dict[str, Any]:
    return {
        "scale": torch.full((1,), scale, device=device),
        "counters": torch.tensor(counters, device=device),
        "exhausted": torch.zeros(1, device=device),
    }


def flag(value: float, device: str) -> torch.Tensor:
    return torch.full((1,), float(value), device=device)


class TestLeaf(LeafContract):
    read_write = frozenset({"scale", "counters", "exhausted"})

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        options = {"factor": 2.0, "window": 3, "tolerance": 0.25, "threshold": 1.0, "min_scale": 1e-4}
        return [
            call("loss_scale_update", **state(device), found_inf=flag(value, device), **options) for value in (0.0, 1.0)
        ]


@on_every_device
@pytest.mark.parametrize(
    "counters, overflow, options, scale, after",
    [
        ((1, -1, -1, 0), 0, {"window": 3}, 64.0, (2, -1, -1, 0)),
        ((2, -1, -1, 0), 0, {"window": 3}, 128.0, (3, -1, 2, 0)),
        ((5, 2, 2, 0), 1, {"window": 3}, 32.0, (6, 5, 5, 0)),
        ((5, 2, 2, 0), 1, {"tolerance": 0.5}, 64.0, (6, 5, 2, 1)),
        ((5, 2, 2, 1), 1, {"tolerance": 0.5}, 32.0, (6, 5, 5, 0)),
        ((5, 2, 2, 0), 1, {"factor": 4.0, "threshold": 20.0}, 20.0, (6, 5, 5, 0)),
    ],
)
def test_one_update(counters, overflow, options, scale, after, device) -> None:
    arguments = state(device, counters=counters)
    loss_scale_update(**arguments, found_inf=flag(overflow, device), **options)
    assert arguments["scale"].tolist() == [scale]
    assert tuple(arguments["counters"].tolist()) == after
    assert arguments["exhausted"].tolist() == [0.0]


@on_every_device
def test_minimum(device) -> None:
    arguments = state(device, scale=2.0)
    loss_scale_update(**arguments, found_inf=flag(1, device), min_scale=1.0)
    assert [arguments[name].item() for name in ("exhausted", "scale")] == [1.0, 2.0]
    loss_scale_update(**arguments, found_inf=flag(0, device), window=1, min_scale=1.0)
    assert [arguments[name].item() for name in ("exhausted", "scale")] == [1.0, 4.0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="loss_scale_update: argument factor = 1.0 must be above 1"):
        loss_scale_update(**state("cpu"), found_inf=flag(0, "cpu"), factor=1.0)
    with pytest.raises(ValueError, match="argument window = 0 must be at least 1"):
        loss_scale_update(**state("cpu"), found_inf=flag(0, "cpu"), window=0)
    arguments = {**state("cpu"), "counters": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(TypeError, match="argument counters has dtype torch.int32"):
        loss_scale_update(**arguments, found_inf=flag(0, "cpu"))

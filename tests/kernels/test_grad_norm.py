from __future__ import annotations

import math

import pytest
import torch

from ls_train.ops import grad_norm
from ls_train.ops.grad_norm import grad_norm_workspace
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type

SIZES = (0, 1, 2, 7, 255, 256, 257, 1023, 1024, 1025, 4999, 100003)


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        scalars = torch.empty(2, 1, device=device)
        inputs = {
            "norm": scalars[0],
            "found_inf": scalars[1],
            "workspace": torch.empty(grad_norm_workspace(), device=device),
            "grad": torch.randn(5003, device=device).to(dtype),
            "segments": torch.tensor([0, 17, 17, 2000, 5003], device=device),
        }
        active = torch.tensor([1, 1, 0, 1], dtype=torch.uint8, device=device)
        return [call("grad_norm", **inputs, active=active), call("grad_norm", **inputs, active=None)]


@on_every_type
@pytest.mark.parametrize("size", SIZES)
def test_matches_torch(size: int, device: str, dtype: torch.dtype) -> None:
    grad = torch.randn(size, device=device).to(dtype)
    norm, found_inf = grad_norm(grad, torch.tensor([0, size], device=device))
    assert float(norm) == pytest.approx(float(grad.double().norm()), rel=1e-5)
    assert float(found_inf) == 0


@on_every_type
def test_only_active_slots_count(device: str, dtype: torch.dtype) -> None:
    grad = torch.randn(1000, device=device).to(dtype)
    grad[100:500] = float("nan")
    grad[100:500:2] = float("inf")
    segments = torch.tensor([0, 100, 333, 500, 501, 1000], device=device)
    active = torch.tensor([1, 0, 0, 1, 1], dtype=torch.uint8, device=device)
    norm, found_inf = grad_norm(grad, segments, active)
    kept = torch.cat([grad[:100], grad[500:]]).double()
    assert float(norm) == pytest.approx(float(kept.norm()), rel=1e-5)
    assert float(found_inf) == 0
    assert [float(x) for x in grad_norm(grad, segments, torch.zeros_like(active))] == [0, 0]


@on_every_type
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1022, 4998])
def test_one_bad_element_is_found(place: int, value: float, device: str, dtype: torch.dtype) -> None:
    grad = torch.randn(4999, device=device).to(dtype)
    grad[place] = value
    _, found_inf = grad_norm(grad, torch.tensor([0, 1023, 4999], device=device))
    assert float(found_inf) == 1


@on_every_type
def test_large_finite_gradients_are_no_overflow(device: str, dtype: torch.dtype) -> None:
    """The norm of float16 gradients may be far beyond float16's range."""
    grad = torch.full((4999,), 6e4, device=device).to(dtype)
    norm, found_inf = grad_norm(grad, torch.tensor([0, 4999], device=device))
    assert float(norm) == pytest.approx(float(grad.double().norm()), rel=1e-5)
    assert float(found_inf) == 0


def test_errors() -> None:
    grad = torch.randn(5)
    with pytest.raises(
        TypeError, match="grad_norm: argument segments has dtype torch.int32; convert it to torch.int64"
    ):
        grad_norm(grad, torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"argument active has shape \(2,\); it needs \(1,\)"):
        grad_norm(grad, torch.tensor([0, 5]), torch.ones(2, dtype=torch.uint8))

from __future__ import annotations

import pytest
import torch

from ls_train.ops import bias_dropout_add
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.testing import ROW_SHAPES, assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_a_card, on_every_type, seed_tensor
from tests.kernels.test_dropout import RATES, kept


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        rows, columns = 13, 24
        x, residual, y, dy, dx = torch.randn(5, rows, columns, device=device).to(dtype)
        bias, dbias = torch.randn(2, columns, device=device).to(dtype)
        workspace = torch.empty(bias_dropout_add_workspace(rows, columns), device=device)
        seed = seed_tensor(3, device)
        forward = {"y": y, "x": x, "residual": residual, "rows": None, "offset": 2}
        backward = {"partial_rows": None, "dy": dy, "rows": None, "offset": 2, "accumulate": False}
        return [
            call("bias_dropout_add_fwd", **forward, bias=bias, seed=seed, p=0.3),
            call("bias_dropout_add_fwd", **forward, bias=None, seed=None, p=0.0),
            call("bias_dropout_add_bwd", **backward, dx=dx, dbias=dbias, workspace=workspace, seed=seed, p=0.3),
            call("bias_dropout_add_bwd", **backward, dx=dx, dbias=None, workspace=None, seed=seed, p=0.3),
            call("bias_dropout_add_bwd", **backward, dx=None, dbias=dbias, workspace=workspace, seed=None, p=0.0),
        ]


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3])
# The last: blocks that walk over several tiles.
@pytest.mark.parametrize("shape", [*ROW_SHAPES, *on_a_card((9000, 256))])
def test_matches_torch(shape: tuple[int, int], p: float, device: str, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    bias = torch.randn(shape[1], device=device).to(dtype)
    seed = seed_tensor(11, device)
    assert_matches_torch(
        lambda x, b, r: bias_dropout_add(x, b, r, p, seed, 4),
        lambda x, b, r: r + kept(x + b, 11, 4, p),
        (x, bias, residual),
    )


@on_every_type
@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("columns", [72, 71], ids=["packs", "single"])
def test_masks_of_every_rate(columns: int, p: float, device: str, dtype: torch.dtype) -> None:
    x = torch.ones(61, columns, device=device, dtype=dtype)
    dx, dbias = torch.empty_like(x), torch.empty(columns, device=device, dtype=dtype)
    workspace = torch.empty(bias_dropout_add_workspace(*x.shape), device=device)
    seed = seed_tensor(5, device)
    torch.ops.ls_train.bias_dropout_add_bwd(dx, dbias, workspace, None, x, seed, None, p, 3, False)
    reference = kept(x.double(), 5, 3, p)
    assert torch.equal(dx, reference.to(dtype))
    assert_accurate(dbias, reference.sum(0), dtype, reference.sum(0).to(dtype))


@on_every_type
def test_without_bias(device: str, dtype: torch.dtype) -> None:
    inputs = tuple(torch.randn(2, 9, 33, device=device).to(dtype))
    assert_matches_torch(lambda x, r: bias_dropout_add(x, None, r), lambda x, r: r + x, inputs)


def test_gradcheck() -> None:
    x, residual = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([3])
    assert torch.autograd.gradcheck(lambda *a: bias_dropout_add(*a, p=0.3, seed=seed), (x, bias, residual))


def test_errors() -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    with pytest.raises(ValueError, match=r"bias_dropout_add: argument residual has shape \(2, 4\); it needs \(3, 4\)"):
        bias_dropout_add(x, bias, x[:2])
    with pytest.raises(ValueError, match="bias_dropout_add: argument seed is missing"):
        bias_dropout_add(x, bias, x, p=0.1)
    with pytest.raises(ValueError, match=r"bias_dropout_add_bwd: argument dx is missing with p = 0.1"):
        torch.ops.ls_train.bias_dropout_add_bwd(None, None, None, None, x, torch.tensor([1]), None, 0.1, 0, False)

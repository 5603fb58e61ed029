from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ls_train.ops import bias_dropout_add_layer_norm
from ls_train.ops._arguments import statistics_dtype
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm_workspace
from ls_train.testing import assert_matches_torch
from tests.kernels.leaf_contract import (
    Call,
    LeafContract,
    call,
    on_every_gpu_type,
    on_every_type,
    row_count,
    run,
    seed_tensor,
)
from tests.kernels.test_dropout import kept
from tests.kernels.test_layer_norm import NORM_SHAPES


def native(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, p: float) -> list[Tensor]:
    total = residual + kept(x + bias, 11, 4, p)
    return [F.layer_norm(total, weight.shape, weight, norm_bias), total]


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        rows, columns = 13, 24
        x, residual, y, total, dy, dsum, dx, dresidual = torch.randn(8, rows, columns, device=device).to(dtype)
        bias, weight, norm_bias, dbias, dweight, dnorm_bias = torch.randn(6, columns, device=device).to(dtype)
        mean, rstd = torch.empty(2, rows, dtype=statistics_dtype(dtype), device=device)
        site = {"seed": seed_tensor(3, device), "rows": None, "p": 0.3, "offset": 2}
        forward = {
            "y": y, "sum": total, "mean": mean, "rstd": rstd, "x": x, "bias": bias, "residual": residual,
            "weight": weight, "norm_bias": norm_bias, "eps": 1e-5,
        }  # fmt: skip
        run("bias_dropout_add_layer_norm_fwd", forward | site)
        workspace = torch.empty(bias_dropout_add_layer_norm_workspace(rows, columns), device=device)
        backward = {
            "dx": dx, "dresidual": dresidual, "dbias": dbias, "dweight": dweight, "dnorm_bias": dnorm_bias,
            "workspace": workspace, "partial_rows": None, "dy": dy, "dsum": dsum, "sum": total, "mean": mean,
            "rstd": rstd, "weight": weight, "accumulate": False,
        }  # fmt: skip
        no_dropout = site | {"seed": None, "p": 0.0}
        return [
            call("bias_dropout_add_layer_norm_fwd", **forward, **site),
            call("bias_dropout_add_layer_norm_fwd", **forward | {"bias": None}, **no_dropout),
            call("bias_dropout_add_layer_norm_bwd", **backward, **site),
            call("bias_dropout_add_layer_norm_bwd", **backward | {"dx": None, "dsum": None}, **no_dropout),
            call("bias_dropout_add_layer_norm_bwd", **backward | {"dbias": None}, **site),
        ]


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_matches_torch(shape: tuple[int, int], p: float, device: str, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    bias, weight, norm_bias = torch.randn(3, shape[1], device=device).to(dtype)
    seed = seed_tensor(11, device)
    assert_matches_torch(
        lambda *inputs: bias_dropout_add_layer_norm(*inputs, p=p, seed=seed, offset=4),
        lambda *inputs: native(*inputs, p=p),
        (x, bias, residual, weight, norm_bias),
    )


@on_every_gpu_type
@pytest.mark.parametrize("columns", [24, 1000])
def test_without_bias_two_sums_are_written(columns: int, device: str, dtype: torch.dtype) -> None:
    """The scratch of a layer has no place for the partial rows of a sum that nobody wants."""
    rows = 40
    dy, total, dx, dresidual = torch.randn(4, rows, columns, device=device).to(dtype)
    weight, dweight, dnorm_bias = torch.randn(3, columns, device=device).to(dtype)
    mean, rstd = torch.rand(2, rows, device=device) + 0.5
    scratch = torch.full((3 * rows * columns,), 7.0, device=device)
    run("bias_dropout_add_layer_norm_bwd", {
        "dx": dx, "dresidual": dresidual, "dbias": None, "dweight": dweight, "dnorm_bias": dnorm_bias,
        "workspace": scratch[: 2 * rows * columns], "partial_rows": None, "dy": dy, "dsum": None, "sum": total,
        "mean": mean, "rstd": rstd, "weight": weight, "seed": seed_tensor(3, device), "rows": None, "p": 0.3,
        "offset": 2, "accumulate": False,
    })  # fmt: skip
    assert bool((scratch[2 * rows * columns :] == 7).all())


@on_every_gpu_type
@pytest.mark.parametrize("columns", [64, 512, 1000, 1024])
@pytest.mark.parametrize("used", [0, 1, 4000, 4001, 4095, 4097])
def test_rows_in_use_of_many(used: int, columns: int, device: str, dtype: torch.dtype) -> None:
    """A thread that has several rows leaves out those beyond the used ones and beyond the last."""
    rows = 4097
    x, residual = torch.randn(2, rows, columns, device=device).to(dtype)
    bias, weight, norm_bias = torch.randn(3, columns, device=device).to(dtype)

    def forward(count: int, in_use: Tensor | None) -> tuple[Tensor, ...]:
        y, total = torch.full((2, count, columns), float("nan"), device=device).to(dtype)
        mean, rstd = torch.full((2, count), float("nan"), device=device)
        outputs = run("bias_dropout_add_layer_norm_fwd", {
            "y": y, "sum": total, "mean": mean, "rstd": rstd, "x": x[:count], "bias": bias,
            "residual": residual[:count], "weight": weight, "norm_bias": norm_bias, "seed": seed_tensor(3, device),
            "rows": in_use, "eps": 1e-5, "p": 0.3, "offset": 2,
        })  # fmt: skip
        return tuple(outputs[name] for name in ("y", "sum", "mean", "rstd"))

    whole, part = forward(rows, row_count(used, device)), forward(used, None)
    for got, wanted in zip(whole, part, strict=True):
        assert torch.equal(got[:used], wanted)
        assert not got[used:].any()


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_used(used: int) -> None:
    """A pre-norm block may use the sum alone, a post-norm block uses the normalised value alone."""
    inputs = [torch.randn(3, 6), torch.randn(6), torch.randn(3, 6), torch.randn(6), torch.randn(6)]
    seed = torch.tensor([11])
    assert_matches_torch(
        lambda *inputs: bias_dropout_add_layer_norm(*inputs, p=0.3, seed=seed, offset=4)[used],
        lambda *inputs: native(*inputs, p=0.3)[used] + 0 * sum(x.sum() for x in inputs),
        inputs,
    )


def test_gradcheck() -> None:
    x, residual = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias, weight, norm_bias = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seed = torch.tensor([3])
    assert torch.autograd.gradcheck(
        lambda *inputs: bias_dropout_add_layer_norm(*inputs, p=0.3, seed=seed), (x, bias, residual, weight, norm_bias)
    )


def test_errors() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4)
    with pytest.raises(TypeError, match="bias_dropout_add_layer_norm: argument norm_bias has dtype torch.float64"):
        bias_dropout_add_layer_norm(x, weight, x, weight, weight.double())
    with pytest.raises(ValueError, match="argument seed is missing with p = 0.1"):
        bias_dropout_add_layer_norm(x, weight, x, weight, weight, p=0.1)

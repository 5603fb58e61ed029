from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ls_train.ops import bias_dropout_add_layer_norm, layer_norm, layer_norm_residual
from ls_train.ops._arguments import statistics_dtype
from ls_train.ops.layer_norm import layer_norm_workspace
from ls_train.testing import ROW_SHAPES, assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_gpu_type, on_every_type, run, seed_tensor

NORM_SHAPES = (
    *(shape for shape in ROW_SHAPES if shape[1] > 1),
    *((40, 512), (9, 1000), (5, 2048), (5, 4096), (3, 8192), (3, 8200), (3, 16384), (5, 4098), (2500, 256)),
)
"""Rows held in one, two and four packs a thread, by one warp and many, and not at all; more rows than row groups."""


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        rows, columns = 13, 24
        x, dy, dresidual, y, dx = torch.randn(5, rows, columns, device=device).to(dtype)
        weight, bias, dweight, dbias = torch.randn(4, columns, device=device).to(dtype)
        mean, rstd = torch.empty(2, rows, dtype=statistics_dtype(dtype), device=device)
        forward = call("layer_norm_fwd", y=y, mean=mean, rstd=rstd, x=x, weight=weight, bias=bias, rows=None, eps=1e-5)
        run(*forward)
        backward = call(
            "layer_norm_bwd", dx=dx, dweight=dweight, dbias=dbias,
            workspace=torch.empty(layer_norm_workspace(rows, columns), device=device), partial_rows=None, dy=dy,
            dresidual=dresidual, x=x, mean=mean, rstd=rstd, weight=weight, rows=None, accumulate=False,
        )  # fmt: skip
        return [forward, backward, call(backward[0], **backward[1] | {"dresidual": None})]


@on_every_type
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_matches_torch(shape: tuple[int, int], device: str, dtype: torch.dtype) -> None:
    columns = shape[1]
    x = torch.randn(shape, device=device).to(dtype)
    weight, bias = torch.randn(2, columns, device=device).to(dtype)
    assert_matches_torch(layer_norm, lambda x, w, b: F.layer_norm(x, (columns,), w, b), (x, weight, bias))


@on_every_type
def test_one_column(device: str, dtype: torch.dtype) -> None:
    """A single column is its own mean: the result is the bias and no gradient reaches x."""
    x = torch.randn(5, 1, device=device).to(dtype).requires_grad_()
    weight, bias = torch.randn(2, 1, device=device).to(dtype)
    y = layer_norm(x, weight, bias)
    assert torch.equal(y, bias.expand(5, 1))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert float(grad.abs().max()) < 1e-3


@on_every_type
def test_residual_gradient_joins(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(13, 40, device=device).to(dtype)
    weight, bias = torch.randn(2, 40, device=device).to(dtype)
    assert_matches_torch(layer_norm_residual, lambda x, w, b: (F.layer_norm(x, (40,), w, b), x * 1), (x, weight, bias))


def test_only_one_output_used() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(layer_norm_residual(x, weight, bias)[1].sum(), x)
    assert torch.equal(grad, torch.ones(3, 4))


MANY_ROWS = 16400
"""Enough for every geometry that the forward kernels choose by the number of rows."""

ROWS_OF_LONG_SHARES = 36000
"""More than 64 rows for each of four groups in 132 blocks: the backward loads statistics of 32 rows at a time."""


@on_every_gpu_type
@pytest.mark.parametrize("columns", [64, 256, 512, 520, 1000, 1024])
def test_forward_bits_do_not_depend_on_the_number_of_rows(columns: int, device: str, dtype: torch.dtype) -> None:
    """Nor on the operator: the backward makes the outputs of a layer again from the sums."""
    x, residual = torch.randn(2, MANY_ROWS, columns, device=device).to(dtype)
    bias, weight, norm_bias = torch.randn(3, columns, device=device).to(dtype)
    seed = seed_tensor(5, device)
    results = []
    for rows in (8, 1200, 4001, MANY_ROWS):
        y, total = bias_dropout_add_layer_norm(
            x[:rows], bias, residual[:rows], weight, norm_bias, p=0.3, seed=seed, offset=2
        )
        results.append((total[:8], y[:8], layer_norm(total, weight, norm_bias)[:8]))
        assert torch.equal(results[-1][1], results[-1][2]), rows
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True)), rows


@on_every_gpu_type
@pytest.mark.parametrize("columns", [1000, 1024])
def test_backward_of_many_rows(columns: int, device: str, dtype: torch.dtype) -> None:
    """With most of the gradient zero, as sums over all rows would hide the error of one."""
    x, dy = torch.randn(2, ROWS_OF_LONG_SHARES, columns, device=device).to(dtype)
    dy[9:-9] = 0
    weight, bias = torch.randn(2, columns, device=device).to(dtype)

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x[rows], weight, bias)]
        return list(torch.autograd.grad(layer_norm(*inputs), inputs, dy[rows]))

    everything = torch.arange(ROWS_OF_LONG_SHARES, device=device)
    few = torch.cat([everything[:9], everything[-9:]])
    dx, dweight, dbias = gradients(everything)
    assert not dx[9:-9].any()
    for got, wanted in zip((dx[few], dweight, dbias), gradients(few), strict=True):
        torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@on_every_gpu_type
@pytest.mark.parametrize("columns", [64, 512, 1000, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("used", [0, 1, 130, 2999])
def test_backward_of_rows_in_use(used: int, columns: int, device: str, dtype: torch.dtype) -> None:
    """Of shares of several rows that are asked for before the number of used ones is known."""
    rows = 3000
    x, dy, dresidual = torch.randn(3, rows, columns, device=device).to(dtype)
    weight, bias = torch.randn(2, columns, device=device).to(dtype)
    mean, rstd = torch.empty(2, rows, dtype=statistics_dtype(dtype), device=device)
    run("layer_norm_fwd", {
        "y": torch.empty_like(x), "mean": mean, "rstd": rstd, "x": x, "weight": weight, "bias": bias, "rows": None,
        "eps": 1e-5,
    })  # fmt: skip

    def gradients(count: int, in_use: torch.Tensor | None) -> dict[str, torch.Tensor]:
        dweight, dbias = torch.full((2, columns), float("nan"), device=device).to(dtype)
        return run("layer_norm_bwd", {
            "dx": torch.full((count, columns), float("nan"), device=device).to(dtype), "dweight": dweight,
            "dbias": dbias, "workspace": torch.empty(layer_norm_workspace(count, columns), device=device),
            "partial_rows": None, "dy": dy[:count], "dresidual": dresidual[:count], "x": x[:count],
            "mean": mean[:count], "rstd": rstd[:count], "weight": weight, "rows": in_use, "accumulate": False,
        })  # fmt: skip

    expected = gradients(used, None)
    for unused in (x, dy, dresidual, mean, rstd):
        unused[used:] = float("nan")
    actual = gradients(rows, torch.tensor([used], dtype=torch.int32, device=device))
    assert torch.equal(actual["dx"][:used], expected["dx"])
    assert not actual["dx"][used:].any()
    for name in ("dweight", "dbias"):
        # Added in another order: float32 sums of `used` numbers of about one, each rounded once.
        close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5 * max(1, used) ** 0.5}
        torch.testing.assert_close(actual[name], expected[name], **close)


@on_every_type
def test_large_mean(device: str, dtype: torch.dtype) -> None:
    """The variance of rows far from zero survives: no E[x^2] - E[x]^2."""
    x = (torch.randn(7, 512, device=device) + 2000).to(dtype)
    weight, bias = torch.ones(512, device=device).to(dtype), torch.zeros(512, device=device).to(dtype)
    reference = F.layer_norm(x.double(), (512,))
    if dtype == torch.float32:
        # The mean itself is rounded to float32: an error of half a unit of 2000 in every element.
        assert float((layer_norm(x, weight, bias) - reference).abs().max()) < 1e-3
    else:
        assert_accurate(layer_norm(x, weight, bias), reference, dtype, F.layer_norm(x, (512,)))


def test_gradcheck() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(layer_norm_residual, (x, weight, bias))


def test_errors() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4)
    with pytest.raises(
        TypeError, match=r"layer_norm: argument weight has dtype torch.float16; convert it to torch.float32"
    ):
        layer_norm(x, weight.half(), weight)
    with pytest.raises(ValueError, match=r"argument bias has shape \(5,\); it needs \(4,\)"):
        layer_norm(x, weight, torch.randn(5))
    with pytest.raises(ValueError, match=r"argument x has strides \(1, 3\); call .contiguous\(\)"):
        layer_norm(torch.randn(4, 3).t(), weight, weight)
    with pytest.raises(ValueError, match="argument weight is on meta but x is on cpu; move both to one device"):
        layer_norm(x, weight.to("meta"), weight)
    with pytest.raises(TypeError, match="argument x has dtype torch.int64; use float32"):
        layer_norm(x.long(), weight, weight)

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ls_train.ops import bias_activation_dropout
from ls_train.ops.bias_activation_dropout import ACTIVATIONS, bias_activation_dropout_workspace
from ls_train.rng import keep_mask, keep_scale
from ls_train.testing import ROW_SHAPES, assert_accurate, assert_matches_torch, gpus
from tests.kernels.leaf_contract import Call, LeafContract, call, on_a_card, on_every_type, run, seed_tensor
from tests.kernels.test_dropout import RATES, kept

NATIVE = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
}


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        return [case for columns in (24, 23) for case in self.calls_of(13, columns, device, dtype)]

    def calls_of(self, rows: int, columns: int, device: str, dtype: torch.dtype) -> list[Call]:
        x, y, dy, dx = torch.randn(4, rows, columns, device=device).to(dtype)
        bias, dbias = torch.randn(2, columns, device=device).to(dtype)
        workspace = torch.empty(bias_activation_dropout_workspace(rows, columns), device=device)
        site = {"seed": seed_tensor(3, device), "rows": None, "p": 0.3, "offset": 2}
        no_dropout = site | {"seed": None, "p": 0.0}
        calls = [call("bias_activation_dropout_fwd", y=y, x=x, bias=None, **no_dropout, activation="gelu")]
        for activation in ACTIVATIONS:
            forward = call("bias_activation_dropout_fwd", y=y.clone(), x=x, bias=bias, **site, activation=activation)
            run(*forward)
            backward = {
                "dx": dx, "dbias": dbias, "workspace": workspace, "partial_rows": None, "dy": dy, "bias": bias,
                "saved": forward[1]["y"] if activation == "relu" else x, "activation": activation,
                "accumulate": False,
            }  # fmt: skip
            calls += [forward, call("bias_activation_dropout_bwd", **backward, **site)]
        without_bias = backward | {"bias": None, "dbias": None, "workspace": None}
        calls.append(call("bias_activation_dropout_bwd", **without_bias, **no_dropout))
        return calls


@on_every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
# The last: blocks that walk over several tiles.
@pytest.mark.parametrize("shape", [*ROW_SHAPES, *on_a_card((3000, 1024))])
def test_matches_torch(shape: tuple[int, int], p: float, activation: str, device: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    bias = torch.randn(shape[1], device=device).to(dtype)
    seed = seed_tensor(11, device)
    assert_matches_torch(
        lambda x, b: bias_activation_dropout(x, b, activation, p, seed, 4),
        lambda x, b: kept(NATIVE[activation](x + b), 11, 4, p),
        (x, bias),
    )


@on_every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("columns", [72, 71], ids=["packs", "single"])
def test_masks_of_every_rate(columns: int, p: float, activation: str, device: str, dtype: torch.dtype) -> None:
    x = torch.ones(61, columns, device=device, dtype=dtype)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    seed = seed_tensor(5, device)
    site = (None, seed, None, p, 3, activation)
    torch.ops.ls_train.bias_activation_dropout_fwd(y, x, *site)
    saved = y if activation == "relu" else x
    torch.ops.ls_train.bias_activation_dropout_bwd(dx, None, None, None, x, saved, *site, False)
    mask = kept(x, 5, 3, p) != 0
    assert torch.equal(y != 0, mask)
    assert torch.equal(dx != 0, mask)


@on_every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_inputs(activation: str, device: str, dtype: torch.dtype) -> None:
    """Values far outside the activation's curved part neither overflow nor become NaN."""
    x = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]], device=device).to(dtype)
    assert_matches_torch(lambda x: bias_activation_dropout(x, None, activation), NATIVE[activation], (x,))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("columns", [8, 7], ids=["packs", "single"])
@pytest.mark.parametrize("dtype, smallest", [(torch.float16, -14), (torch.bfloat16, -20)], ids=str)
@pytest.mark.parametrize("device", gpus())
def test_gelu_of_every_value(device: str, dtype: torch.dtype, smallest: int, columns: int, p: float) -> None:
    """All finite numbers: three quarters of a unit in the last place, of which rounding makes half, and 2e-7; gradients
    2e-5 beside the rounding. With dropout, whose factor is in the coefficients of packs, the same of what is kept and
    fits, times the factor. The CPU's reference is torch's own gelu, whose error depends on its version."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    x = x[: x.numel() // columns * columns].view(-1, columns).to(device)
    seed, leaf = seed_tensor(3, device), torch.ops.ls_train
    mask, factor = keep_mask(seed.cpu(), 0, *x.shape, p).to(device), keep_scale(p)
    y, dx, ones = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x)
    leaf.bias_activation_dropout_fwd(y, x, None, seed, None, p, 0, "gelu")
    leaf.bias_activation_dropout_bwd(dx, None, None, None, ones, x, None, seed, None, p, 0, "gelu", False)
    reference = x.double().requires_grad_()
    F.gelu(reference).backward(torch.ones_like(reference))
    expected, slope = factor * F.gelu(reference.detach()), factor * reference.grad
    assert not y[~mask].any()
    assert not dx[~mask].any()

    def units(values: torch.Tensor, least: int) -> torch.Tensor:
        return torch.finfo(dtype).eps * torch.exp2(values.abs().clamp(min=2.0**least).log2().floor())

    fits = mask & (factor * reference.detach().abs() < torch.finfo(dtype).max)
    error = (y.double() - expected).abs() - units(expected, smallest) * 0.75
    assert error[fits].max() <= 2e-7 * factor
    error = (dx.double() - slope).abs() - units(slope, smallest) / 2
    assert error[fits].max() <= 2e-5 * factor


@on_every_type
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_overflow_stays_visible(activation: str, device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[math.inf, math.nan, 1.0, -1.0] * 4], device=device).to(dtype)
    if device == "cpu" and activation == "gelu" and F.gelu(x).isnan()[0, 0]:
        pytest.skip("the reference is torch's gelu, which makes NaN of inf in this version")
    y = bias_activation_dropout(x, None, activation)
    assert torch.equal(y.isposinf(), x.isposinf())
    assert torch.equal(y.isnan(), x.isnan())
    lowest = torch.full_like(x, -math.inf)
    assert torch.equal(bias_activation_dropout(lowest, None, activation).isnan(), NATIVE[activation](lowest).isnan())


@on_every_type
def test_relu_backward_needs_no_random_numbers(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(13, 20, device=device).to(dtype)
    y, dx, dy = torch.empty_like(x), torch.empty_like(x), torch.randn_like(x)
    seed = seed_tensor(11, device)
    torch.ops.ls_train.bias_activation_dropout_fwd(y, x, None, seed, None, 0.3, 4, "relu")
    leaf = torch.ops.ls_train
    leaf.bias_activation_dropout_bwd(dx, None, None, None, dy, y, None, seed + 1, None, 0.3, 4, "relu", False)
    reference = kept(dy.double() * (x > 0), 11, 4, 0.3)
    assert_accurate(dx, reference, dtype, reference.to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([3])
    assert torch.autograd.gradcheck(lambda x, b: bias_activation_dropout(x, b, activation, 0.3, seed), (x, bias))


def test_errors() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="activation = 'tanh' is unknown; use one of relu, gelu, gelu_tanh, swish"):
        bias_activation_dropout(x, None, "tanh")
    with pytest.raises(ValueError, match=r"bias_activation_dropout: argument bias has shape \(3,\); it needs \(4,\)"):
        bias_activation_dropout(x, torch.randn(3))

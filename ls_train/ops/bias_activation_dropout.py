"""Bias, activation and dropout in one pass: y = dropout(activation(x + bias)).

Activations: ``relu``; ``gelu`` (x * Phi(x) with the error function) and ``gelu_tanh`` (its tanh approximation), both of
Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; ``swish`` (x * sigmoid(x), Ramachandran et al., 2017).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train import rng
from ls_train._library import define, reference
from ls_train.ops._arguments import ROW_BLOCKS, Arguments, check_kinds
from ls_train.ops._reference import drop, finish_sums, store, used_rows, wide

define(
    "bias_activation_dropout_fwd",
    "(Tensor(a!) y, Tensor x, Tensor? bias, Tensor? seed, Tensor? rows, float p, int offset, str activation) -> ()",
)
define(
    "bias_activation_dropout_bwd",
    "(Tensor(a!) dx, Tensor(b!)? dbias, Tensor(c!)? workspace, Tensor(d!)? partial_rows, Tensor dy, Tensor saved,"
    " Tensor? bias, Tensor? seed, Tensor? rows, float p, int offset, str activation, bool accumulate) -> ()",
)

_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    "swish": torch.ops.aten.silu_backward,
}
ACTIVATIONS = tuple(_FORWARD)


def bias_activation_dropout_workspace(rows: int, columns: int) -> int:
    """Return the number of float32 elements of scratch that ``bias_activation_dropout_bwd`` needs for ``dbias``."""
    return ROW_BLOCKS * columns


def saves_output(activation: str) -> bool:
    """Return whether the backward of ``activation`` takes the operator's output (True) or its input as ``saved``."""
    return activation == "relu"


@reference("bias_activation_dropout_fwd")
def _forward(
    y: Tensor,
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
    activation: str,
) -> None:
    arguments = _check_inputs("bias_activation_dropout_fwd", "x", x, bias, seed, rows, p, offset, activation)
    arguments.tensor("y", y, x.shape)
    value = wide(x[: used_rows(rows, x.shape[0])])
    store(y, drop(_FORWARD[activation](value if bias is None else value + wide(bias)), seed, offset, p))


@reference("bias_activation_dropout_bwd")
def _backward(
    dx: Tensor,
    dbias: Tensor | None,
    workspace: Tensor | None,
    partial_rows: Tensor | None,
    dy: Tensor,
    saved: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
    activation: str,
    accumulate: bool,
) -> None:
    op = "bias_activation_dropout_bwd"
    arguments = _check_inputs(op, "saved", saved, bias, seed, rows, p, offset, activation)
    arguments.tensor("dx", dx, saved.shape)
    arguments.tensor("dy", dy, saved.shape)
    arguments.tensor("dbias", dbias, saved.shape[1:])
    if dbias is not None:
        arguments.column_sums(workspace, partial_rows, bias_activation_dropout_workspace(*saved.shape))
    used = used_rows(rows, saved.shape[0])
    grad, value = wide(dy[:used]), wide(saved[:used])
    if saves_output(activation):
        # A dropped or negative element is zero in the output: neither mask nor bias is needed again.
        grad = torch.where(value > 0, grad * rng.keep_scale(p), grad.new_zeros(()))
    else:
        grad = _BACKWARD[activation](drop(grad, seed, offset, p), value if bias is None else value + wide(bias))
    store(dx, grad)
    if dbias is not None:
        finish_sums((dbias,), (grad.sum(0),), workspace, partial_rows, accumulate)


@check_kinds
def bias_activation_dropout(
    x: Tensor,
    bias: Tensor | None,
    activation: str = "relu",
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return dropout(activation(x + bias)).

    Args:
        x: (N, C), contiguous.
        bias: (C,) or None, same dtype as ``x``.
        activation: ``relu``, ``gelu``, ``gelu_tanh`` or ``swish``.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.
        rows: int32 (1,) on the device, number of used rows; the result is zero in the others. None: all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``activation``, ``p``, ``seed`` or ``offset`` does not fit.
    """
    _check_inputs("bias_activation_dropout", "x", x, bias, seed, rows, p, offset, activation)
    return _BiasActivationDropout.apply(x, bias, activation, p, seed, offset, rows)


def _check_inputs(
    op: str,
    name: str,
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
    activation: str,
) -> Arguments:
    arguments = Arguments(op, name, x, 2)
    arguments.tensor("bias", bias, x.shape[1:])
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    if activation not in ACTIVATIONS:
        arguments.fail(ValueError, "activation", f"= {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return arguments


class _BiasActivationDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        bias: Tensor | None,
        activation: str,
        p: float,
        seed: Tensor | None,
        offset: int,
        rows: Tensor | None,
    ) -> Tensor:
        y = torch.empty_like(x)
        torch.ops.ls_train.bias_activation_dropout_fwd(y, x, bias, seed, rows, p, offset, activation)
        ctx.save_for_backward(y if saves_output(activation) else x, bias, seed, rows)
        ctx.site = p, offset, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, bias, seed, rows = ctx.saved_tensors
        dx = torch.empty_like(saved)
        dbias = workspace = None
        if bias is not None:
            dbias = torch.empty_like(bias)
            workspace = saved.new_empty(bias_activation_dropout_workspace(*saved.shape), dtype=torch.float32)
        torch.ops.ls_train.bias_activation_dropout_bwd(
            dx, dbias, workspace, None, dy.contiguous(), saved, bias, seed, rows, *ctx.site, False
        )
        return dx, dbias, None, None, None, None, None

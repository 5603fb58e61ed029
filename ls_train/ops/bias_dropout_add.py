"""Bias, dropout and residual addition in one pass: y = residual + dropout(x + bias)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train import rng
from ls_train._library import define, reference
from ls_train.ops._arguments import ROW_BLOCKS, Arguments, check_kinds
from ls_train.ops._reference import drop, finish_sums, store, used_rows, wide

define(
    "bias_dropout_add_fwd",
    "(Tensor(a!) y, Tensor x, Tensor? bias, Tensor residual, Tensor? seed, Tensor? rows, float p, int offset) -> ()",
)
define(
    "bias_dropout_add_bwd",
    "(Tensor(a!)? dx, Tensor(b!)? dbias, Tensor(c!)? workspace, Tensor(d!)? partial_rows, Tensor dy, Tensor? seed,"
    " Tensor? rows, float p, int offset, bool accumulate) -> ()",
)


def bias_dropout_add_workspace(rows: int, columns: int) -> int:
    """Return the number of float32 elements of scratch that ``bias_dropout_add_bwd`` needs for ``dbias``."""
    return ROW_BLOCKS * columns


@reference("bias_dropout_add_fwd")
def _forward(
    y: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
) -> None:
    _check_inputs("bias_dropout_add_fwd", x, bias, residual, seed, rows, p, offset).tensor("y", y, x.shape)
    used = used_rows(rows, x.shape[0])
    store(y, add_dropped(x[:used], bias, residual[:used], seed, p, offset))


def add_dropped(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float, offset: int) -> Tensor:
    """Return residual + dropout(x + bias) of the rows (N, C) in the type of internal arithmetic."""
    return wide(residual) + drop(wide(x) if bias is None else wide(x) + wide(bias), seed, offset, p)


@reference("bias_dropout_add_bwd")
def _backward(
    dx: Tensor | None,
    dbias: Tensor | None,
    workspace: Tensor | None,
    partial_rows: Tensor | None,
    dy: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
    accumulate: bool,
) -> None:
    arguments = Arguments("bias_dropout_add_bwd", "dy", dy, 2)
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    if dx is None and rng.threshold(p) > 0:
        arguments.fail(ValueError, "dx", f"is missing with p = {p}; only without dropout is it dy itself")
    arguments.tensor("dx", dx, dy.shape)
    arguments.tensor("dbias", dbias, dy.shape[1:])
    if dbias is not None:
        arguments.column_sums(workspace, partial_rows, bias_dropout_add_workspace(*dy.shape))
    grad = drop(wide(dy[: used_rows(rows, dy.shape[0])]), seed, offset, p)
    if dx is not None:
        store(dx, grad)
    if dbias is not None:
        finish_sums((dbias,), (grad.sum(0),), workspace, partial_rows, accumulate)


@check_kinds
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return residual + dropout(x + bias).

    Args:
        x: (N, C), contiguous.
        bias: (C,) or None, same dtype as ``x``.
        residual: (N, C), contiguous, same dtype as ``x``.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.
        rows: int32 (1,) on the device, number of used rows; the result is zero in the others. None: all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p``, ``seed`` or ``offset`` does not fit.
    """
    _check_inputs("bias_dropout_add", x, bias, residual, seed, rows, p, offset)
    return _BiasDropoutAdd.apply(x, bias, residual, p, seed, offset, rows)


def _check_inputs(
    op: str,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
) -> Arguments:
    arguments = Arguments(op, "x", x, 2)
    arguments.tensor("bias", bias, x.shape[1:])
    arguments.tensor("residual", residual, x.shape)
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    return arguments


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        seed: Tensor | None,
        offset: int,
        rows: Tensor | None,
    ) -> Tensor:
        y = torch.empty_like(x)
        torch.ops.ls_train.bias_dropout_add_fwd(y, x, bias, residual, seed, rows, p, offset)
        ctx.save_for_backward(seed, rows)
        ctx.site = p, offset
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        seed, rows = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        dbias = workspace = None
        if ctx.has_bias:
            dbias = dy.new_empty(dy.shape[1:])
            workspace = dy.new_empty(bias_dropout_add_workspace(*dy.shape), dtype=torch.float32)
        torch.ops.ls_train.bias_dropout_add_bwd(dx, dbias, workspace, None, dy, seed, rows, *ctx.site, False)
        return dx, dbias, dy, None, None, None, None

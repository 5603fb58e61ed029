"""Bias, dropout, residual addition and layer normalisation in one pass.

sum = residual + dropout(x + bias); y = layer_norm(sum). A pre-norm block goes on with ``sum`` as its residual, a
post-norm block with ``y``. The statistics are those of ``sum`` as it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train import rng
from ls_train._library import define, reference
from ls_train.ops._arguments import ROW_BLOCKS, Arguments, check_kinds, statistics_dtype
from ls_train.ops._reference import drop, finish_sums, store, used_rows
from ls_train.ops.bias_dropout_add import add_dropped
from ls_train.ops.layer_norm import normalize, normalize_backward

define(
    "bias_dropout_add_layer_norm_fwd",
    "(Tensor(a!) y, Tensor(b!) sum, Tensor(c!) mean, Tensor(d!) rstd, Tensor x, Tensor? bias, Tensor residual,"
    " Tensor weight, Tensor norm_bias, Tensor? seed, Tensor? rows, float eps, float p, int offset) -> ()",
)
define(
    "bias_dropout_add_layer_norm_bwd",
    "(Tensor(a!)? dx, Tensor(b!) dresidual, Tensor(c!)? dbias, Tensor(d!) dweight, Tensor(e!) dnorm_bias,"
    " Tensor(f!) workspace, Tensor(g!)? partial_rows, Tensor dy, Tensor? dsum, Tensor sum, Tensor mean, Tensor rstd,"
    " Tensor weight, Tensor? seed, Tensor? rows, float p, int offset, bool accumulate) -> ()",
)


def bias_dropout_add_layer_norm_workspace(rows: int, columns: int) -> int:
    """Return the number of float32 elements of scratch that ``bias_dropout_add_layer_norm_bwd`` needs."""
    return ROW_BLOCKS * 3 * columns


@reference("bias_dropout_add_layer_norm_fwd")
def _forward(
    y: Tensor,
    sum: Tensor,
    mean: Tensor,
    rstd: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    eps: float,
    p: float,
    offset: int,
) -> None:
    op = "bias_dropout_add_layer_norm_fwd"
    arguments = _check_inputs(op, x, bias, residual, weight, norm_bias, seed, rows, p, offset)
    arguments.tensor("y", y, x.shape)
    arguments.tensor("sum", sum, x.shape)
    arguments.tensor("mean", mean, x.shape[:1], arguments.statistics)
    arguments.tensor("rstd", rstd, x.shape[:1], arguments.statistics)
    used = used_rows(rows, x.shape[0])
    store(sum, add_dropped(x[:used], bias, residual[:used], seed, p, offset))
    for out, value in zip((y, mean, rstd), normalize(sum[:used], weight, norm_bias, eps), strict=True):
        store(out, value)


@reference("bias_dropout_add_layer_norm_bwd")
def _backward(
    dx: Tensor | None,
    dresidual: Tensor,
    dbias: Tensor | None,
    dweight: Tensor,
    dnorm_bias: Tensor,
    workspace: Tensor,
    partial_rows: Tensor | None,
    dy: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
    accumulate: bool,
) -> None:
    arguments = Arguments("bias_dropout_add_layer_norm_bwd", "sum", sum, 2)
    if dx is None and rng.threshold(p) > 0:
        arguments.fail(ValueError, "dx", f"is missing with p = {p}; only without dropout is it dresidual itself")
    for name, tensor in (("dx", dx), ("dresidual", dresidual), ("dy", dy), ("dsum", dsum)):
        arguments.tensor(name, tensor, sum.shape)
    for name, tensor in (("dbias", dbias), ("dweight", dweight), ("dnorm_bias", dnorm_bias), ("weight", weight)):
        arguments.tensor(name, tensor, sum.shape[1:])
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        arguments.tensor(name, tensor, sum.shape[:1], arguments.statistics)
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    arguments.column_sums(workspace, partial_rows, bias_dropout_add_layer_norm_workspace(*sum.shape))
    used = used_rows(rows, sum.shape[0])
    grad, grad_weight, grad_norm_bias = normalize_backward(dy[:used], sum[:used], mean[:used], rstd[:used], weight)
    if dsum is not None:
        grad = grad + dsum[:used]
    store(dresidual, grad)
    dropped = drop(grad, seed, offset, p)
    if dx is not None:
        store(dx, dropped)
    gradients, sums = (dweight, dnorm_bias, dbias), (grad_weight, grad_norm_bias, dropped.sum(0))
    finish_sums(gradients, sums, workspace, partial_rows, accumulate)


@check_kinds
def bias_dropout_add_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float = 1e-5,
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(sum), sum) with sum = residual + dropout(x + bias).

    Args:
        x: (N, C), contiguous.
        bias: (C,) or None, same dtype as ``x``.
        residual: (N, C), contiguous, same dtype as ``x``.
        weight: (C,), of the normalisation, same dtype as ``x``.
        norm_bias: (C,), of the normalisation, same dtype as ``x``.
        eps: added to the variance.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.
        rows: int32 (1,) on the device, number of used rows; the results are zero in the others. None: all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p``, ``seed`` or ``offset`` does not fit.
    """
    _check_inputs("bias_dropout_add_layer_norm", x, bias, residual, weight, norm_bias, seed, rows, p, offset)
    return _BiasDropoutAddLayerNorm.apply(x, bias, residual, weight, norm_bias, eps, p, seed, offset, rows)


def _check_inputs(
    op: str,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
) -> Arguments:
    arguments = Arguments(op, "x", x, 2)
    arguments.tensor("residual", residual, x.shape)
    for name, tensor in (("bias", bias), ("weight", weight), ("norm_bias", norm_bias)):
        arguments.tensor(name, tensor, x.shape[1:])
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    return arguments


class _BiasDropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        p: float,
        seed: Tensor | None,
        offset: int,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        y, total = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = x.new_empty((2, x.shape[0]), dtype=statistics_dtype(x.dtype))
        torch.ops.ls_train.bias_dropout_add_layer_norm_fwd(
            y, total, mean, rstd, x, bias, residual, weight, norm_bias, seed, rows, eps, p, offset
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, mean, rstd, weight, seed, rows)
        ctx.site = p, offset
        ctx.has_bias = bias is not None
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight, seed, rows = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dx, dresidual = torch.empty_like(total), torch.empty_like(total)
        dweight, dnorm_bias = torch.empty_like(weight), torch.empty_like(weight)
        dbias = torch.empty_like(weight) if ctx.has_bias else None
        workspace = total.new_empty(bias_dropout_add_layer_norm_workspace(*total.shape), dtype=torch.float32)
        torch.ops.ls_train.bias_dropout_add_layer_norm_bwd(
            dx,
            dresidual,
            dbias,
            dweight,
            dnorm_bias,
            workspace,
            None,
            dy,
            None if dsum is None else dsum.contiguous(),
            total,
            mean,
            rstd,
            weight,
            seed,
            rows,
            *ctx.site,
            False,
        )
        return dx, dbias, dresidual, dweight, dnorm_bias, None, None, None, None, None

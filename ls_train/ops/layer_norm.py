"""Layer normalisation over the last dimension, statistics in float32.

y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps) with the biased variance (Ba et al., "Layer
Normalization", 2016). The backward adds the gradient that reaches x by another path (pre-norm residuals) in its pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train._library import define, reference
from ls_train.ops._arguments import ROW_BLOCKS, Arguments, check_kinds
from ls_train.ops._reference import finish_sums, store, used_rows, wide

define(
    "layer_norm_fwd",
    "(Tensor(a!) y, Tensor(b!) mean, Tensor(c!) rstd, Tensor x, Tensor weight, Tensor bias, Tensor? rows, float eps)"
    " -> ()",
)
define(
    "layer_norm_bwd",
    "(Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!) dbias, Tensor(d!) workspace, Tensor(e!)? partial_rows, Tensor dy,"
    " Tensor? dresidual, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? rows, bool accumulate) -> ()",
)


def layer_norm_workspace(rows: int, columns: int) -> int:
    """Return the number of float32 elements of scratch that ``layer_norm_bwd`` needs."""
    return ROW_BLOCKS * 2 * columns


def normalize(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, rstd) of the rows ``x`` (N, C), all in the type of internal arithmetic."""
    y, mean, rstd = torch.native_layer_norm(wide(x), (x.shape[1],), wide(weight), wide(bias), eps)
    return y, mean.squeeze(1), rstd.squeeze(1)


def normalize_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) of the rows ``x`` (N, C), all in the type of internal arithmetic."""
    return torch.ops.aten.native_layer_norm_backward(
        wide(dy), wide(x), (x.shape[1],), mean[:, None], rstd[:, None], wide(weight), wide(weight), [True, True, True]
    )


@reference("layer_norm_fwd")
def _forward(
    y: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None, eps: float
) -> None:
    arguments = _check_inputs("layer_norm_fwd", x, weight, bias, rows)
    arguments.tensor("y", y, x.shape)
    arguments.tensor("mean", mean, x.shape[:1], arguments.statistics)
    arguments.tensor("rstd", rstd, x.shape[:1], arguments.statistics)
    used = used_rows(rows, x.shape[0])
    for out, value in zip((y, mean, rstd), normalize(x[:used], weight, bias, eps), strict=True):
        store(out, value)


@reference("layer_norm_bwd")
def _backward(
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    workspace: Tensor,
    partial_rows: Tensor | None,
    dy: Tensor,
    dresidual: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    rows: Tensor | None,
    accumulate: bool,
) -> None:
    arguments = _check_inputs("layer_norm_bwd", x, weight, None, rows)
    for name, tensor in (("dx", dx), ("dy", dy), ("dresidual", dresidual)):
        arguments.tensor(name, tensor, x.shape)
    for name, tensor in (("dweight", dweight), ("dbias", dbias)):
        arguments.tensor(name, tensor, weight.shape)
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        arguments.tensor(name, tensor, x.shape[:1], arguments.statistics)
    arguments.column_sums(workspace, partial_rows, layer_norm_workspace(*x.shape))
    used = used_rows(rows, x.shape[0])
    grad, grad_weight, grad_bias = normalize_backward(dy[:used], x[:used], mean[:used], rstd[:used], weight)
    store(dx, grad if dresidual is None else grad + dresidual[:used])
    finish_sums((dweight, dbias), (grad_weight, grad_bias), workspace, partial_rows, accumulate)


@check_kinds
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, rows: Tensor | None = None) -> Tensor:
    """Return the layer normalisation of ``x``.

    Args:
        x: (N, C), contiguous.
        weight: (C,), same dtype as ``x``.
        bias: (C,), same dtype as ``x``.
        eps: added to the variance.
        rows: int32 (1,) on the device, number of used rows; the result is zero in the others. None: all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or memory layout does not fit.
    """
    return layer_norm_residual(x, weight, bias, eps, rows)[0]


@check_kinds
def layer_norm_residual(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (layer normalisation of ``x``, ``x``); the backward joins both gradients of ``x`` in one pass.

    Arguments and errors are those of :func:`layer_norm`. Use the second result as the residual of a pre-norm block.
    """
    _check_inputs("layer_norm", x, weight, bias, rows)
    return _LayerNorm.apply(x, weight, bias, eps, rows)


def _check_inputs(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Arguments:
    arguments = Arguments(op, "x", x, 2)
    arguments.tensor("weight", weight, x.shape[1:])
    arguments.tensor("bias", bias, x.shape[1:])
    arguments.rows(rows)
    return arguments


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        mean, rstd = x.new_empty((2, x.shape[0]), dtype=Arguments("layer_norm", "x", x, 2).statistics)
        torch.ops.ls_train.layer_norm_fwd(y, mean, rstd, x, weight, bias, rows, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, rstd, rows)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor | None, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dresidual, None, None, None, None
        x, weight, mean, rstd, rows = ctx.saved_tensors
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        workspace = x.new_empty(layer_norm_workspace(*x.shape), dtype=torch.float32)
        torch.ops.ls_train.layer_norm_bwd(
            dx,
            dweight,
            dbias,
            workspace,
            None,
            dy.contiguous(),
            None if dresidual is None else dresidual.contiguous(),
            x,
            mean,
            rstd,
            weight,
            rows,
            False,
        )
        return dx, dweight, dbias, None, None

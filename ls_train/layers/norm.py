"""Layer norm of packed rows outside layers: after embeddings and at the end of pre-norm stacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ls_train.layers import modules
from ls_train.layers.gradients import (
    GradientWriter,
    Held,
    given,
    once_differentiable,
    save_parameters,
    saved_parameters,
)
from ls_train.memory import workspace
from ls_train.ops.layer_norm import layer_norm_workspace

ops = torch.ops.ls_train

_INDEX = {"weight": 0, "bias": 1}


class NormFunction(torch.autograd.Function):
    """Layer norm whose parameter gradients go into slots of a flat buffer where there are any."""

    @staticmethod
    def forward(ctx: FunctionCtx, eps: float, rows: Tensor, x: Tensor, *arguments: Tensor | Held) -> Tensor:
        """Return the layer norm of ``x`` (N, C)."""
        y, ((weight, bias), _) = torch.empty_like(x), given(arguments)
        mean, rstd = x.new_empty((2, x.shape[0]), dtype=torch.promote_types(x.dtype, torch.float32))
        ops.layer_norm_fwd(y, mean, rstd, x, weight, bias, rows, eps)
        ctx.rows = rows
        save_parameters(ctx, arguments, x, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, ``weight`` and ``bias``."""
        (x, mean, rstd), parameters = saved_parameters(ctx, 3)
        dx = torch.empty_like(x)
        with workspace(x) as scratch:
            sums = scratch.take((layer_norm_workspace(*x.shape),), torch.float32)
            writer = GradientWriter.of(ctx, _INDEX, parameters)
            (dweight, dbias), add = writer.open(("weight",), ("bias",), always=True)
            ops.layer_norm_bwd(
                dx, dweight, dbias, sums, None, dy.contiguous(), None, x, mean, rstd, parameters[0], ctx.rows, add
            )
        return None, None, dx, *writer.finish()


def layer_norm(module: nn.LayerNorm, x: Tensor, rows: Tensor) -> Tensor:
    """Return ``module`` applied to packed rows ``x`` (N, C); ``rows`` int32 (1,): number of used rows."""
    (x,), _, arguments = modules.prepare("layer norm", (x,), (module.weight, module.bias))
    return modules.apply(NormFunction, module.eps, rows, x.contiguous(), *arguments)

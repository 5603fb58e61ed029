"""Layer norm of packed rows outside layers: after embeddings and at the end of pre-norm stacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train.layers import modules
from ls_train.layers.gradients import GradientWriter
from ls_train.memory import workspace
from ls_train.ops.layer_norm import layer_norm_workspace

ops = torch.ops.ls_train

_INDEX = {"weight": 0, "bias": 1}


class NormFunction(torch.autograd.Function):
    """Layer norm whose parameter gradients go into slots of a flat buffer where there are any."""

    @staticmethod
    def forward(ctx: FunctionCtx, eps: float, rows: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the layer norm of ``x`` (N, C)."""
        y = torch.empty_like(x)
        mean, rstd = x.new_empty((2, x.shape[0]), dtype=torch.promote_types(x.dtype, torch.float32))
        ops.layer_norm_fwd(y, mean, rstd, x, weight, bias, rows, eps)
        ctx.rows = rows
        ctx.leaves = [parameter if parameter.is_leaf else None for parameter in (weight, bias)]
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, ``weight`` and ``bias``."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        with workspace(x) as scratch:
            sums = scratch.take((layer_norm_workspace(*x.shape),), torch.float32)
            writer = GradientWriter(
                {"weight": 0, "bias": 1}, (weight, bias), ctx.leaves, ctx.needs_input_grad[3:], sums
            )
            (dweight, dbias), add = writer.open(("weight",), ("bias",), always=True)
            ops.layer_norm_bwd(dx, dweight, dbias, sums, dy.contiguous(), None, x, mean, rstd, weight, ctx.rows, add)
        return None, None, dx, *writer.finish()


def layer_norm(module: nn.LayerNorm, x: Tensor, rows: Tensor) -> Tensor:
    """Return ``module`` applied to packed rows ``x`` (N, C); ``rows`` int32 (1,): number of used rows."""
    x, weight, bias = modules.autocast_inputs((x, module.weight, module.bias))
    modules.check_types("layer norm", (x,), (weight, bias))
    return modules.apply(NormFunction, module.eps, rows, x.contiguous(), weight, bias)

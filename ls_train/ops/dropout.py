"""Dropout whose keep mask is a function of (seed, offset, element), see ``ls_train/rng.py``.

The backward is the same operator on the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds
from ls_train.ops._reference import drop, store, used_rows

define("dropout_fwd", "(Tensor(a!) y, Tensor x, Tensor seed, Tensor? rows, float p, int offset) -> ()")


@reference("dropout_fwd")
def _forward(y: Tensor, x: Tensor, seed: Tensor, rows: Tensor | None, p: float, offset: int) -> None:
    _check_inputs("dropout_fwd", x, seed, rows, p, offset).tensor("y", y, x.shape)
    store(y, drop(x[: used_rows(rows, x.shape[0])], seed, offset, p))


@check_kinds
def dropout(x: Tensor, p: float, seed: Tensor | None, offset: int = 0, rows: Tensor | None = None) -> Tensor:
    """Return ``x`` with elements dropped with probability ``p`` and the others scaled by the inverse keep rate.

    Args:
        x: (N, C), contiguous.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.
        rows: int32 (1,) on the device, number of used rows; the result is zero in the others. None: all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p`` or ``offset`` does not fit.
    """
    _check_inputs("dropout", x, seed, rows, p, offset)
    return _Dropout.apply(x, p, seed, offset, rows)


def _check_inputs(op: str, x: Tensor, seed: Tensor, rows: Tensor | None, p: float, offset: int) -> Arguments:
    arguments = Arguments(op, "x", x, 2)
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    return arguments


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, p: float, seed: Tensor, offset: int, rows: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        torch.ops.ls_train.dropout_fwd(y, x, seed, rows, p, offset)
        ctx.save_for_backward(seed, rows)
        ctx.site = p, offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        seed, rows = ctx.saved_tensors
        p, offset = ctx.site
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        torch.ops.ls_train.dropout_fwd(dx, dy.contiguous(), seed, rows, p, offset)
        return dx, None, None, None, None

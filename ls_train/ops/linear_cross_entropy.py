"""Output projection and label-smoothed cross entropy together, without ever holding the whole logits.

The rows go through in chunks: logits of a chunk, ``cross_entropy_inplace`` turns them into their gradient, and two
products give the chunk's part of the gradients of input and weight, all during the forward. The backward multiplies
by the incoming gradient. Only the sum over rows can therefore be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train.ops._arguments import Arguments, check_kinds, statistics_dtype
from ls_train.ops.cross_entropy import CrossEntropy, check_label_smoothing
from ls_train.params import grad_slot

_PARTS = 4
_MANY_ROWS, _MANY_PARTS = 8192, 8  # an eighth of so many rows still fills the GPU
# Smoothing spreads eps / (V - 1), 2.5e-6 for 0.1 over 40000 words, which is subnormal in float16.
_FLOAT16_GRAD_SCALE = 32.0


@check_kinds
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    rows: Tensor | None = None,
    count_correct: bool = False,
) -> CrossEntropy:
    """Return the sums over the rows of the label-smoothed cross entropy of the logits ``x weight^T``.

    Args:
        x: (N, C), contiguous. Its unused rows must be finite.
        weight: (V, C), contiguous, same dtype as ``x``.
        target: int64 (N,), contiguous.
        label_smoothing: eps of :mod:`ls_train.ops.cross_entropy`, in [0, 1).
        ignore_index: target value of rows that give no loss and no gradient.
        rows: int32 (1,) on the device, number of used rows; the others contribute nothing. None: all.
        count_correct: also count the rows whose largest logit (the first of equal ones) is the target's.

    Returns:
        ``loss`` () and, not differentiable, ``nll`` (), both float32 (float64 for float64), and ``correct`` int64 ()
        or None. While ``direct_grads`` is on the weight's gradient goes into its slot.

    Raises:
        IndexError: on the CPU, a target is out of range.
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout or ``label_smoothing`` does not fit.
    """
    arguments = Arguments("linear_cross_entropy", "x", x, 2)
    arguments.tensor("weight", weight, (weight.shape[0], x.shape[1]))
    arguments.tensor("target", target, x.shape[:1], torch.int64)
    arguments.rows(rows)
    check_label_smoothing(arguments, label_smoothing, weight.shape[0])
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return CrossEntropy(
        *_LinearCrossEntropy.apply(x, weight, target, label_smoothing, ignore_index, rows, count_correct, differentiate)
    )


def chunk_rows(rows: int) -> int:
    """Return the number of rows whose logits are held at a time, evenly: a quarter, of 8192 or more an eighth."""
    largest = max(1, rows // (_MANY_PARTS if rows >= _MANY_ROWS else _PARTS))
    chunks = max(1, -(-rows // largest))
    return -(-rows // chunks)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        label_smoothing: float,
        ignore_index: int,
        rows: Tensor | None,
        count_correct: bool,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        total, wide = x.shape[0], statistics_dtype(x.dtype)
        loss, nll = x.new_empty((2, total), dtype=wide)
        lse = None if differentiate else x.new_empty(total, dtype=wide)
        correct = x.new_empty(total, dtype=torch.int32) if count_correct else None
        dx = torch.empty_like(x) if differentiate and ctx.needs_input_grad[0] else None
        dweight = None
        if differentiate and ctx.needs_input_grad[1]:
            # Float32 for the 16-bit types: chunks are added up without rounding, and no sum can overflow.
            dweight = torch.zeros_like(weight, dtype=wide)
        ctx.grad_scale = _FLOAT16_GRAD_SCALE if x.dtype == torch.float16 else 1.0
        grad_scale = x.new_full((1,), ctx.grad_scale, dtype=torch.float32) if ctx.grad_scale != 1.0 else None
        step = max(1, chunk_rows(total))
        if rows is not None:
            used = (rows - torch.arange(0, total, step, dtype=rows.dtype, device=rows.device)).clamp_(0, step)
        buffer, weight_t = x.new_empty(min(step, total), weight.shape[0]), weight.t()
        # One call for the views of all chunks instead of one a chunk.
        views = [None if tensor is None else tensor.split(step) for tensor in (x, loss, nll, lse, correct, target, dx)]
        for i in range(-(-total // step)):
            part, losses, nlls, sums, outputs, targets, gradient = (view and view[i] for view in views)
            logits = buffer if part.shape[0] == buffer.shape[0] else buffer[: part.shape[0]]
            torch.mm(part, weight_t, out=logits)
            count = None if rows is None else used[i : i + 1]
            if not differentiate:
                torch.ops.ls_train.cross_entropy_fwd(
                    losses, nlls, sums, outputs, logits, targets, count, label_smoothing, ignore_index
                )
                continue
            torch.ops.ls_train.cross_entropy_inplace(
                logits, losses, nlls, outputs, targets, count, grad_scale, label_smoothing, ignore_index
            )
            if gradient is not None:
                torch.mm(logits, weight, out=gradient)
            if dweight is not None:
                _add_product(dweight, logits.t(), part)
        ctx.save_for_backward(dx, dweight, weight)
        loss, nll = loss.sum(), nll.sum()
        correct = None if correct is None else correct.sum()
        ctx.mark_non_differentiable(nll, *(() if correct is None else (correct,)))
        return loss, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight, weight = ctx.saved_tensors
        # One dimension, so that 16-bit gradients are multiplied in float32: the loss scale may exceed float16's range.
        factor = (dloss / ctx.grad_scale).view(1)
        if dx is not None:
            dx = torch.mul(dx, factor, out=torch.empty_like(dx))
        if dweight is not None:
            dweight = _weight_gradient(weight, dweight, factor)
        return dx, dweight, *(None,) * 6


def _weight_gradient(weight: Tensor, dweight: Tensor, factor: Tensor) -> Tensor | None:
    """Return the gradient in the weight's type, or None after writing it into the weight's slot."""
    slot = grad_slot(weight)
    if slot is None:
        return torch.mul(dweight, factor, out=torch.empty_like(weight))
    if slot.written:
        torch.addcmul(slot.tensor, dweight, factor, out=slot.tensor)
    else:
        torch.mul(dweight, factor, out=slot.tensor)
    slot.commit()
    return None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a b`` to ``total``, which may be float32 with 16-bit factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))

"""Output projection and label-smoothed cross entropy together, without ever holding the whole logits.

The rows go through in chunks: logits of a chunk, ``cross_entropy_inplace`` turns them into their gradient, and two
products give the chunk's part of the gradients of input and weight. Large chunks use two streams: logits and loss by
halves, then the products side by side, so that what one kernel leaves idle at its start and end is used by another.
Only the sum over rows can therefore be differentiated. :func:`linear_cross_entropy` does all this in its forward, and
its backward multiplies by the incoming gradient. Who knows that gradient before (a training step does: it is the loss
scale) calls :func:`linear_cross_entropy_gradients`: the logits' gradients carry it, so that both gradients are final.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train._library import compiled
from ls_train.memory import workspace
from ls_train.ops._arguments import Arguments, check_kinds, statistics_dtype
from ls_train.ops._product import gemm_workspace, product
from ls_train.ops.cross_entropy import CrossEntropy, check_label_smoothing
from ls_train.params import grad_slot

_PARTS = 4
_MANY_ROWS, _MANY_PARTS = 8192, 8  # an eighth of so many rows still fills the GPU
_SIDE_ROWS = 512  # chunks of so many rows use two streams
_SIDE_PARTS = 2  # of a chunk's logits
# Smoothing spreads eps / (V - 1), 2.5e-6 for 0.1 over 40000 words, which is subnormal in float16.
_FLOAT16_GRAD_SCALE = 32.0


class _Loss(NamedTuple):
    label_smoothing: float
    ignore_index: int
    rows: Tensor | None
    count_correct: bool


class _Gradients(NamedTuple):
    """Where the gradients go: ``dx`` and ``dweight`` may be None; ``scale``, float32 (1,) or None, is a factor.

    ``is_held``: until the backward, besides the weight's gradient that it becomes.
    """

    dx: Tensor | None
    dweight: Tensor | None
    accumulate: bool
    scale: Tensor | None
    is_held: bool


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
    _check("linear_cross_entropy", x, weight, target, label_smoothing, rows)
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss = _Loss(label_smoothing, ignore_index, rows, count_correct)
    return CrossEntropy(*_LinearCrossEntropy.apply(x, weight, target, loss, differentiate))


@check_kinds
@torch.no_grad()
def linear_cross_entropy_gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    gradient: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    rows: Tensor | None = None,
    count_correct: bool = False,
) -> tuple[CrossEntropy, Tensor, Tensor | None]:
    """Return :func:`linear_cross_entropy` and the gradients of ``gradient * loss``, without autograd.

    The gradient of ``weight`` is summed chunk by chunk in its own type, where the result belongs: each of these few
    sums is rounded, which the rule of :mod:`ls_train.testing` allows. In float16 ``gradient`` should be a loss
    scale: smoothing alone makes subnormal numbers, and what does not fit becomes infinite, as in fairseq.

    Args:
        x: (N, C), contiguous. Its unused rows must be finite.
        weight: (V, C), contiguous, same dtype as ``x``.
        target: int64 (N,), contiguous.
        gradient: float32 (1,) on the device.
        label_smoothing: see :func:`linear_cross_entropy`.
        ignore_index: see :func:`linear_cross_entropy`.
        rows: see :func:`linear_cross_entropy`.
        count_correct: see :func:`linear_cross_entropy`.

    Returns:
        The sums, the gradient (N, C) of ``x``, and that of ``weight``, (V, C). The last one is None where ``weight``
        does not require a gradient, and while ``direct_grads`` is on: then it has gone into its slot.

    Raises:
        IndexError: on the CPU, a target is out of range.
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout or ``label_smoothing`` does not fit.
    """
    arguments = _check("linear_cross_entropy_gradients", x, weight, target, label_smoothing, rows)
    arguments.tensor("gradient", gradient, (1,), torch.float32)
    dweight = slot = None
    if weight.requires_grad:
        slot = grad_slot(weight)
        dweight = torch.empty_like(weight) if slot is None else slot.tensor
    accumulate = slot is not None and slot.written
    gradients = _Gradients(torch.empty_like(x), dweight, accumulate, gradient, False)
    outputs = _run(x, weight, target, _Loss(label_smoothing, ignore_index, rows, count_correct), gradients)
    if slot is not None:
        slot.commit()
        dweight = None
    return outputs, gradients.dx, dweight


def chunk_rows(rows: int, holds_gradient: bool = True) -> int:
    """Return the number of rows whose logits are held at a time, evenly.

    A quarter; of 8192 or more an eighth where the weight's gradient is held besides, as by the autograd form.
    """
    largest = max(1, rows // (_MANY_PARTS if holds_gradient and rows >= _MANY_ROWS else _PARTS))
    chunks = max(1, -(-rows // largest))
    return -(-rows // chunks)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, target: Tensor, loss: _Loss, differentiate: bool
    ) -> CrossEntropy:
        gradients = None
        ctx.grad_scale = _FLOAT16_GRAD_SCALE if x.dtype == torch.float16 else 1.0
        if differentiate:
            gradients = _Gradients(
                torch.empty_like(x) if ctx.needs_input_grad[0] else None,
                # Float32 for the 16-bit types: no sum can overflow, whatever the incoming gradient.
                torch.empty_like(weight, dtype=statistics_dtype(x.dtype)) if ctx.needs_input_grad[1] else None,
                False,
                x.new_full((1,), ctx.grad_scale, dtype=torch.float32) if ctx.grad_scale != 1.0 else None,
                True,
            )
            ctx.save_for_backward(gradients.dx, gradients.dweight, weight)
        outputs = _run(x, weight, target, loss, gradients)
        ctx.mark_non_differentiable(*(tensor for tensor in outputs[1:] if tensor is not None))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight, weight = ctx.saved_tensors
        factor = (dloss / ctx.grad_scale).view(1)
        if dx is not None:
            held, dx = dx, torch.empty_like(dx)
            torch.ops.ls_train.scale_cast(dx, held, factor, False)
        if dweight is not None:
            dweight = _weight_gradient(weight, dweight, factor)
        return dx, dweight, *(None,) * 3


def _check(
    op: str, x: Tensor, weight: Tensor, target: Tensor, label_smoothing: float, rows: Tensor | None
) -> Arguments:
    arguments = Arguments(op, "x", x, 2)
    arguments.tensor("weight", weight, (weight.shape[0], x.shape[1]))
    arguments.tensor("target", target, x.shape[:1], torch.int64)
    arguments.rows(rows)
    check_label_smoothing(arguments, label_smoothing, weight.shape[0])
    return arguments


def _run(x: Tensor, weight: Tensor, target: Tensor, options: _Loss, gradients: _Gradients | None) -> CrossEntropy:
    """Return the sums over the rows, and write the gradients."""
    total, wide = x.shape[0], statistics_dtype(x.dtype)
    losses = x.new_empty((2, total), dtype=wide)
    lse = x.new_empty(total, dtype=wide) if gradients is None else None
    correct = x.new_empty(total, dtype=torch.int32) if options.count_correct else None
    dx, dweight = (None, None) if gradients is None else gradients[:2]
    step = max(1, chunk_rows(total, gradients is not None and gradients.is_held))
    is_split = dx is not None and dweight is not None and step >= _SIDE_ROWS and not torch.compiler.is_compiling()
    main = torch.cuda.current_stream(x.device) if is_split and x.is_cuda else None
    side = None if main is None else _side_stream(main)
    size = -(-step // _SIDE_PARTS) if is_split else step
    rows, smoothing, ignored = options.rows, options.label_smoothing, options.ignore_index
    if rows is not None:
        starts = torch.arange(0, total, step, dtype=rows.dtype, device=rows.device)[:, None]
        if is_split:
            starts = starts + torch.arange(0, step, size, dtype=rows.dtype, device=rows.device)
        used = (rows - starts).clamp_(0, size)
    buffer, weight_t = x.new_empty(min(step, total), weight.shape[0]), weight.t()
    # One call for the views of all chunks instead of one a chunk.
    views = [None if tensor is None else tensor.split(step) for tensor in (x, *losses, lse, correct, target, dx)]
    with _spaces(x) as spaces, _joined_on_error(main, side):
        for i in range(-(-total // step)):
            part, loss, nll, sums, hits, targets, gradient = (view and view[i] for view in views)
            logits = buffer if part.shape[0] == buffer.shape[0] else buffer[: part.shape[0]]
            if gradients is None:
                product(logits, part, weight_t, space=spaces[0])
                count = None if rows is None else used[i]
                torch.ops.ls_train.cross_entropy_fwd(loss, nll, sums, hits, logits, targets, count, smoothing, ignored)
                continue
            _wait(side, main)
            pieces = [(part, logits, loss, nll, hits, targets)]
            if is_split:
                pieces = zip(*(view.split(size) if view is not None else (None,) * _SIDE_PARTS for view in pieces[0]))
            for number, (features, *places, labels) in enumerate(pieces):
                with _on(side if number % 2 else main):
                    product(places[0], features, weight_t, space=spaces[number % 2])
                    count = None if rows is None else used[i, number : number + 1]
                    torch.ops.ls_train.cross_entropy_inplace(
                        *places, labels, count, gradients.scale, smoothing, ignored
                    )
            _wait(side, main)
            _wait(main, side)
            if gradient is not None:
                with _on(side):
                    product(gradient, logits, weight, space=spaces[1])
            if dweight is not None:
                product(dweight, logits.t(), part, None, gradients.accumulate or i > 0, spaces[0])
            _wait(main, side)  # before the next chunk takes the buffer
    if total == 0 and dweight is not None and not gradients.accumulate:
        dweight.zero_()
    return CrossEntropy(losses[0].sum(), losses[1].sum(), None if correct is None else correct.sum())


@contextlib.contextmanager
def _joined_on_error(main: torch.cuda.Stream | None, side: torch.cuda.Stream | None) -> Iterator[None]:
    """After an error let ``main`` wait for ``side``, which may still use what the error frees."""
    try:
        yield
    except BaseException:
        _wait(main, side)
        raise


@contextlib.contextmanager
def _spaces(x: Tensor) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Give each of the two streams' products its scratch, all from the workspace of the current stream."""
    size = gemm_workspace(x.itemsize)
    if size == 0 or torch.compiler.is_compiling() or compiled("product", x) is None:
        yield None, None
        return
    with workspace(x, 2 * size) as scratch:
        yield scratch.take((size,), torch.uint8), scratch.take((size,), torch.uint8)


@functools.lru_cache(maxsize=32)
def _side_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the stream beside ``main``: one for each, as a stream that a graph is captured from must not be shared."""
    return torch.cuda.Stream(main.device)


def _wait(stream: torch.cuda.Stream | None, before: torch.cuda.Stream | None) -> None:
    """Let ``stream`` go on behind what ``before`` has; both are None without a second stream."""
    if stream is not None:
        stream.wait_stream(before)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _weight_gradient(weight: Tensor, dweight: Tensor, factor: Tensor) -> Tensor | None:
    """Return the gradient in the weight's type, or None after writing it into the weight's slot."""
    slot = grad_slot(weight)
    out = torch.empty_like(weight) if slot is None else slot.tensor
    torch.ops.ls_train.scale_cast(out, dweight, factor, slot is not None and slot.written)
    if slot is None:
        return out
    slot.commit()
    return None

"""Label-smoothed cross entropy from logits, fairseq's form.

nll = lse - logit[target], loss = (1 - eps - eps_i) * nll + eps_i * sum_v(lse - logit[v]) with eps_i = eps / (V - 1)
(Szegedy et al., 2016; fairseq ``label_smoothed_nll_loss``). Its gradient is softmax - eps_i, at the target
softmax - (1 - eps).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds, statistics_dtype
from ls_train.ops._reference import store, used_rows, wide

define(
    "cross_entropy_fwd",
    "(Tensor(a!) loss, Tensor(b!) nll, Tensor(c!) lse, Tensor(d!)? correct, Tensor logits, Tensor target,"
    " Tensor? rows, float label_smoothing, int ignore_index) -> ()",
)
define(
    "cross_entropy_bwd",
    "(Tensor(a!) dlogits, Tensor dloss, Tensor logits, Tensor lse, Tensor target, Tensor? rows,"
    " float label_smoothing, int ignore_index) -> ()",
)
define(
    "cross_entropy_inplace",
    "(Tensor(a!) logits, Tensor(b!) loss, Tensor(c!) nll, Tensor(d!)? correct, Tensor target, Tensor? rows,"
    " Tensor? grad_scale, float label_smoothing, int ignore_index) -> ()",
)


class CrossEntropy(NamedTuple):
    """What the cross entropy operators return; only ``loss`` is differentiable."""

    loss: Tensor
    nll: Tensor
    correct: Tensor | None


@reference("cross_entropy_fwd")
def _forward(
    loss: Tensor,
    nll: Tensor,
    lse: Tensor,
    correct: Tensor | None,
    logits: Tensor,
    target: Tensor,
    rows: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    arguments = _check_inputs("cross_entropy_fwd", logits, target, rows, label_smoothing)
    _check_rows(arguments, logits, loss=loss, nll=nll, lse=lse)
    arguments.tensor("correct", correct, target.shape, torch.int32)
    used = used_rows(rows, logits.shape[0])
    labels = _labels(arguments, target[:used], logits, ignore_index)
    store(lse, _losses(loss, nll, correct, wide(logits[:used]), labels, label_smoothing))


@reference("cross_entropy_bwd")
def _backward(
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    rows: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    arguments = _check_inputs("cross_entropy_bwd", logits, target, rows, label_smoothing)
    arguments.tensor("dlogits", dlogits, logits.shape)
    _check_rows(arguments, logits, dloss=dloss, lse=lse)
    used = used_rows(rows, logits.shape[0])
    labels = _labels(arguments, target[:used], logits, ignore_index)
    _store_gradient(dlogits, wide(logits[:used]), lse[:used], labels, dloss[:used, None], label_smoothing)


@reference("cross_entropy_inplace")
def _inplace(
    logits: Tensor,
    loss: Tensor,
    nll: Tensor,
    correct: Tensor | None,
    target: Tensor,
    rows: Tensor | None,
    grad_scale: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    arguments = _check_inputs("cross_entropy_inplace", logits, target, rows, label_smoothing)
    _check_rows(arguments, logits, loss=loss, nll=nll)
    arguments.tensor("correct", correct, target.shape, torch.int32)
    arguments.tensor("grad_scale", grad_scale, (1,), torch.float32)
    used = used_rows(rows, logits.shape[0])
    labels = _labels(arguments, target[:used], logits, ignore_index)
    value = wide(logits[:used])
    lse = _losses(loss, nll, correct, value, labels, label_smoothing)
    _store_gradient(logits, value, lse, labels, grad_scale, label_smoothing)


def _losses(
    loss: Tensor, nll: Tensor, correct: Tensor | None, logits: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """Write the per-row outputs and return the logarithm of the softmax sums; ``labels`` is -1 for ignored rows."""
    ignored = labels < 0
    lse = logits.logsumexp(1)
    nll_value = lse - logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    loss_value = nll_value
    if label_smoothing > 0:
        share = label_smoothing / (logits.shape[1] - 1)
        total = (lse - logits.mean(1)).mul_(logits.shape[1])  # of lse - logit over the classes, without cancellation
        loss_value = (1 - label_smoothing - share) * nll_value + share * total
    store(loss, loss_value.masked_fill(ignored, 0))
    store(nll, nll_value.masked_fill(ignored, 0))
    if correct is not None:
        store(correct, (logits.argmax(1) == labels).to(torch.int32))
    return lse


def _store_gradient(
    out: Tensor, logits: Tensor, lse: Tensor, labels: Tensor, factor: Tensor | None, label_smoothing: float
) -> None:
    """Write factor * (softmax - smoothed target) of the rows ``logits``, which ``out`` may hold, and zeros beyond."""
    used = out[: logits.shape[0]]
    grad = torch.sub(logits, lse[:, None], out=used if used.dtype == logits.dtype else torch.empty_like(logits)).exp_()
    share = label_smoothing / (logits.shape[1] - 1) if label_smoothing > 0 else 0.0
    if share > 0:
        grad.sub_(share)
    at_target = torch.full((labels.numel(), 1), share - (1 - label_smoothing), dtype=grad.dtype)
    grad.scatter_add_(1, labels.clamp(min=0)[:, None], at_target)
    if factor is not None:
        grad.mul_(factor)
    ignored = (labels < 0)[:, None]
    if ignored.any():
        grad.masked_fill_(ignored, 0)
    if grad.dtype != out.dtype:
        used.copy_(grad)
    out[logits.shape[0] :].zero_()


@check_kinds
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    rows: Tensor | None = None,
    count_correct: bool = False,
) -> CrossEntropy:
    """Return the label-smoothed cross entropy of each row.

    Args:
        logits: (N, V), contiguous.
        target: int64 (N,), contiguous.
        label_smoothing: eps of the formula, in [0, 1).
        ignore_index: target value of rows that give no loss and no gradient.
        rows: int32 (1,) on the device, number of used rows; the results are zero in the others. None: all.
        count_correct: also return where the largest logit (the first of equal ones) is the target's.

    Returns:
        ``loss`` (N,) and, not differentiable, ``nll`` (N,), both float32 (float64 for float64), and ``correct`` int32
        (N,) or None.

    Raises:
        IndexError: on the CPU, a target is out of range.
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout or ``label_smoothing`` does not fit.
    """
    _check_inputs("cross_entropy", logits, target, rows, label_smoothing)
    return CrossEntropy(*_CrossEntropy.apply(logits, target, label_smoothing, ignore_index, rows, count_correct))


def _labels(arguments: Arguments, target: Tensor, logits: Tensor, ignore_index: int) -> Tensor:
    """Return ``target`` with -1 for the ignored rows."""
    labels = target.masked_fill(target == ignore_index, -1)
    bad = target[(target != ignore_index) & ((target < 0) | (target >= logits.shape[1]))]
    if bad.numel():
        what = f"holds {int(bad[0])}; it must be between 0 and {logits.shape[1] - 1}, or ignore_index = {ignore_index}"
        arguments.fail(IndexError, "target", what)
    return labels


def _check_inputs(op: str, logits: Tensor, target: Tensor, rows: Tensor | None, label_smoothing: float) -> Arguments:
    arguments = Arguments(op, "logits", logits, 2)
    arguments.tensor("target", target, logits.shape[:1], torch.int64)
    arguments.rows(rows)
    check_label_smoothing(arguments, label_smoothing, logits.shape[1])
    return arguments


def check_label_smoothing(arguments: Arguments, label_smoothing: float, classes: int) -> None:
    """Raise ValueError unless ``label_smoothing`` is in [0, 1) and can be spread over other classes."""
    if not 0.0 <= label_smoothing < 1.0:
        arguments.fail(ValueError, "label_smoothing", f"= {label_smoothing} must be at least 0 and less than 1")
    if label_smoothing > 0 and classes < 2:
        arguments.fail(ValueError, "label_smoothing", f"= {label_smoothing} needs two classes; there is {classes}")


def _check_rows(arguments: Arguments, logits: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        arguments.tensor(name, tensor, logits.shape[:1], arguments.statistics)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        target: Tensor,
        label_smoothing: float,
        ignore_index: int,
        rows: Tensor | None,
        count_correct: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        loss, nll, lse = (logits.new_empty(logits.shape[0], dtype=statistics_dtype(logits.dtype)) for _ in range(3))
        correct = torch.empty_like(target, dtype=torch.int32) if count_correct else None
        torch.ops.ls_train.cross_entropy_fwd(
            loss, nll, lse, correct, logits, target, rows, label_smoothing, ignore_index
        )
        ctx.save_for_backward(logits, lse, target, rows)
        ctx.smoothing = label_smoothing, ignore_index
        ctx.mark_non_differentiable(nll, *(() if correct is None else (correct,)))
        return loss, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, lse, target, rows = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        torch.ops.ls_train.cross_entropy_bwd(dlogits, dloss.contiguous(), logits, lse, target, rows, *ctx.smoothing)
        return dlogits, None, None, None, None, None

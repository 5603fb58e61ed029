"""Masked softmax over the last dimension, then dropout: the stand-alone form of what attention does inside.

A key is masked where ``key_padding_mask`` says so and, if causal, where j > i + (S - T). A row without any key gives
zeros. Dropout row = flat index of (b, h, t), column = key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train import rng
from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds
from ls_train.ops._reference import drop, wide

define(
    "softmax_dropout_fwd",
    "(Tensor(a!)? y, Tensor(b!) probs, Tensor x, Tensor? key_padding_mask, Tensor? seed, bool causal, float p,"
    " int offset) -> ()",
)
define(
    "softmax_dropout_bwd",
    "(Tensor(a!) dx, Tensor dy, Tensor probs, Tensor? seed, float p, int offset) -> ()",
)


@reference("softmax_dropout_fwd")
def _forward(
    y: Tensor | None,
    probs: Tensor,
    x: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    p: float,
    offset: int,
) -> None:
    arguments = _check_inputs("softmax_dropout_fwd", x, key_padding_mask, seed, p, offset)
    if y is None and rng.threshold(p) > 0:
        arguments.fail(ValueError, "y", f"is missing with p = {p}; only without dropout is it probs itself")
    arguments.tensor("y", y, x.shape)
    arguments.tensor("probs", probs, x.shape)
    if x.numel() == 0:
        return
    queries, keys = x.shape[2:]
    scores = wide(x)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
    if causal:
        limit = torch.arange(queries)[:, None] + (keys - queries)
        scores = scores.masked_fill(torch.arange(keys) > limit, float("-inf"))
    empty = scores.amax(-1, keepdim=True) == float("-inf")
    value = scores.softmax(-1).masked_fill_(empty, 0)
    probs.copy_(value)
    if y is not None:
        y.copy_(drop(value.view(-1, keys), seed, offset, p).view(x.shape))


@reference("softmax_dropout_bwd")
def _backward(dx: Tensor, dy: Tensor, probs: Tensor, seed: Tensor | None, p: float, offset: int) -> None:
    arguments = Arguments("softmax_dropout_bwd", "probs", probs, 4)
    arguments.tensor("dx", dx, probs.shape)
    arguments.tensor("dy", dy, probs.shape)
    arguments.dropout(p, seed, offset)
    if probs.numel() == 0:
        return
    value = wide(probs).view(-1, probs.shape[3])
    grad = drop(wide(dy).view(value.shape), seed, offset, p) * value
    dx.copy_((grad - value * grad.sum(-1, keepdim=True)).view(dx.shape))


@check_kinds
def softmax_dropout(
    x: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return dropout(softmax(x)) over the keys that are not masked.

    Args:
        x: (B, H, T, S), contiguous.
        key_padding_mask: bool (B, S), True where padded, or None.
        causal: query i sees only keys j <= i + (S - T).
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p``, ``seed`` or ``offset`` does not fit.
    """
    _check_inputs("softmax_dropout", x, key_padding_mask, seed, p, offset)
    return _SoftmaxDropout.apply(x, key_padding_mask, causal, p, seed, offset)


def _check_inputs(
    op: str, x: Tensor, key_padding_mask: Tensor | None, seed: Tensor | None, p: float, offset: int
) -> Arguments:
    arguments = Arguments(op, "x", x, 4)
    arguments.tensor("key_padding_mask", key_padding_mask, (x.shape[0], x.shape[3]), torch.bool)
    arguments.dropout(p, seed, offset)
    return arguments


class _SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        key_padding_mask: Tensor | None,
        causal: bool,
        p: float,
        seed: Tensor | None,
        offset: int,
    ) -> Tensor:
        probs = torch.empty_like(x)
        y = torch.empty_like(x) if rng.threshold(p) > 0 else None
        torch.ops.ls_train.softmax_dropout_fwd(y, probs, x, key_padding_mask, seed, causal, p, offset)
        ctx.save_for_backward(probs, seed)
        ctx.site = p, offset
        return probs if y is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        probs, seed = ctx.saved_tensors
        dx = torch.empty_like(probs)
        torch.ops.ls_train.softmax_dropout_bwd(dx, dy.contiguous(), probs, seed, *ctx.site)
        return dx, None, None, None, None, None

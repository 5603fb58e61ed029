"""Token embedding: y = dropout(scale * weight[token] + position_weight[position]), and its gradient.

The gradient takes the ids sorted, so that the rows of one id are summed in a fixed order without atomics. Positions are
rows of a table, sinusoidal or learned; a learned table's gradient is the same operator on the positions with scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds
from ls_train.ops._reference import drop, store, store_gradient, used_rows, wide

define(
    "embedding_fwd",
    "(Tensor(a!) y, Tensor tokens, Tensor positions, Tensor weight, Tensor? position_weight, Tensor? seed,"
    " Tensor? rows, float scale, float p, int offset) -> ()",
)
define(
    "embedding_bwd",
    "(Tensor(a!) dweight, Tensor dy, Tensor order, Tensor sorted_ids, Tensor? seed, Tensor? rows, float scale,"
    " float p, int offset, int padding_idx, bool accumulate) -> ()",
)


@reference("embedding_fwd")
def _forward(
    y: Tensor,
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    scale: float,
    p: float,
    offset: int,
) -> None:
    op = "embedding_fwd"
    arguments = _check_inputs(op, tokens, positions, weight, position_weight, seed, rows, p, offset)
    arguments.tensor("y", y, (tokens.shape[0], weight.shape[1]))
    used = used_rows(rows, tokens.shape[0])
    value = wide(_lookup(arguments, "tokens", tokens[:used], weight)) * scale
    if position_weight is not None:
        value = value + _lookup(arguments, "positions", positions[:used], position_weight)
    store(y, drop(value, seed, offset, p))


@reference("embedding_bwd")
def _backward(
    dweight: Tensor,
    dy: Tensor,
    order: Tensor,
    sorted_ids: Tensor,
    seed: Tensor | None,
    rows: Tensor | None,
    scale: float,
    p: float,
    offset: int,
    padding_idx: int,
    accumulate: bool,
) -> None:
    arguments = Arguments("embedding_bwd", "dy", dy, 2)
    arguments.tensor("dweight", dweight, (dweight.shape[0], dy.shape[1]))
    arguments.tensor("order", order, dy.shape[:1], torch.int64)
    arguments.tensor("sorted_ids", sorted_ids, dy.shape[:1], torch.int64)
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    used = used_rows(rows, dy.shape[0])
    contributes = (order < used) & (sorted_ids != padding_idx)
    grad = drop(wide(dy[:used]), seed, offset, p).index_select(0, order[contributes])
    if dweight.dtype == grad.dtype and not accumulate:
        total = dweight.zero_()
    else:
        total = torch.zeros(dweight.shape, dtype=grad.dtype)
    total.index_add_(0, sorted_ids[contributes], grad, alpha=scale)
    if total is not dweight:
        store_gradient(dweight, total, accumulate)


@check_kinds
def embedding(
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_weight: Tensor | None = None,
    scale: float = 1.0,
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rows: Tensor | None = None,
    padding_idx: int = -1,
    position_padding_idx: int = -1,
) -> Tensor:
    """Return dropout(scale * weight[tokens] + position_weight[positions]), (N, C).

    Args:
        tokens: int64 (N,), contiguous.
        positions: int64 (N,), contiguous; row of ``position_weight`` of each token.
        weight: (V, C), contiguous.
        position_weight: (P, C), contiguous, same dtype as ``weight``, or None for no positions.
        scale: factor of the token embedding.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.
        rows: int32 (1,) on the device, number of used rows; the result is zero in the others. None: all.
        padding_idx: row of ``weight`` that gets no gradient, -1 for none.
        position_padding_idx: row of ``position_weight`` that gets no gradient, -1 for none.

    Raises:
        IndexError: on the CPU, an id is out of range. On CUDA its row of the result becomes NaN instead.
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p``, ``seed`` or ``offset`` does not fit.
    """
    _check_inputs("embedding", tokens, positions, weight, position_weight, seed, rows, p, offset)
    return _Embedding.apply(
        tokens, positions, weight, position_weight, scale, p, seed, offset, rows, padding_idx, position_padding_idx
    )


def _lookup(arguments: Arguments, name: str, ids: Tensor, table: Tensor) -> Tensor:
    bad = ids[(ids < 0) | (ids >= table.shape[0])]
    if bad.numel():
        arguments.fail(IndexError, name, f"holds {int(bad[0])}; ids must be between 0 and {table.shape[0] - 1}")
    return table.index_select(0, ids)


def _check_inputs(
    op: str,
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    p: float,
    offset: int,
) -> Arguments:
    arguments = Arguments(op, "weight", weight, 2)
    arguments.tensor("tokens", tokens, (tokens.numel(),), torch.int64)
    arguments.tensor("positions", positions, tokens.shape, torch.int64)
    if position_weight is not None:
        arguments.tensor("position_weight", position_weight, (position_weight.shape[0], weight.shape[1]))
    arguments.rows(rows)
    arguments.dropout(p, seed, offset)
    return arguments


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        tokens: Tensor,
        positions: Tensor,
        weight: Tensor,
        position_weight: Tensor | None,
        scale: float,
        p: float,
        seed: Tensor | None,
        offset: int,
        rows: Tensor | None,
        padding_idx: int,
        position_padding_idx: int,
    ) -> Tensor:
        y = weight.new_empty(tokens.shape[0], weight.shape[1])
        torch.ops.ls_train.embedding_fwd(y, tokens, positions, weight, position_weight, seed, rows, scale, p, offset)
        ctx.save_for_backward(tokens, positions, weight, position_weight, seed, rows)
        ctx.site = p, offset
        ctx.scale = scale
        ctx.padding = padding_idx, position_padding_idx
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        tokens, positions, weight, position_weight, seed, rows = ctx.saved_tensors
        dy = dy.contiguous()

        def gradient(table: Tensor, ids: Tensor, scale: float, padding_idx: int) -> Tensor:
            dtable = torch.empty_like(table)
            sorted_ids, order = ids.sort(stable=True)
            torch.ops.ls_train.embedding_bwd(
                dtable, dy, order, sorted_ids, seed, rows, scale, *ctx.site, padding_idx, False
            )
            return dtable

        dweight = dposition_weight = None
        if ctx.needs_input_grad[2]:
            dweight = gradient(weight, tokens, ctx.scale, ctx.padding[0])
        if position_weight is not None and ctx.needs_input_grad[3]:
            dposition_weight = gradient(position_weight, positions, 1.0, ctx.padding[1])
        return None, None, dweight, dposition_weight, *(None,) * 7

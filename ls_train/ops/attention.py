"""Scaled dot-product attention over packed sequences: out = dropout(softmax(scale * q k^T)) v.

Vaswani et al., "Attention Is All You Need", 2017. Sequence b owns query rows ``cu_q[b]`` to ``cu_q[b + 1] - 1`` and key
rows ``cu_k[b]`` to ``cu_k[b + 1] - 1``. Causal: query i of a sequence sees its keys j <= i + (keys - queries). A query
without keys gives zeros. The backward recomputes the probabilities from the saved logarithm of the softmax sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ls_train import rng
from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds, statistics_dtype
from ls_train.ops._reference import store, wide

define(
    "attention_fwd",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor? seed, int max_q,"
    " int max_k, bool causal, float scale, float p, int offset) -> ()",
)
define(
    "attention_bwd",
    "(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) workspace, Tensor dout, Tensor q, Tensor k, Tensor v,"
    " Tensor out, Tensor lse, Tensor cu_q, Tensor cu_k, Tensor? seed, int max_q, int max_k, bool causal, float scale,"
    " float p, int offset) -> ()",
)


def attention_workspace(queries: int, heads: int, head_dim: int, keys: int) -> int:
    """Return the number of float32 elements of scratch that ``attention_bwd`` needs."""
    return queries * heads


@dataclass(frozen=True)
class _Blocks:
    """Packed rows (N, H, X) as padded blocks (H * B, length, X) and back; padding is zero."""

    batch: int
    length: int
    used: int
    padding: Tensor  # bool (B, length)
    source: Tensor  # int64 (B * length,): packed row of each block row, any used row where padded
    target: Tensor  # int64 (used,): block row of each packed row

    @staticmethod
    def of(cu_seqlens: Tensor) -> _Blocks:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
        batch, used = lengths.numel(), int(cu_seqlens[-1])
        length = int(lengths.max()) if batch else 0
        column = torch.arange(length)
        padding = column >= lengths[:, None]
        source = (starts[:, None] + column).masked_fill_(padding, 0).view(-1)
        return _Blocks(batch, length, used, padding, source, (~padding).view(-1).nonzero().squeeze(1))

    def pad(self, x: Tensor) -> Tensor:
        heads, width = x.shape[1:]
        block = wide(x.index_select(0, self.source)).view(self.batch, self.length, heads, width)
        block = block.masked_fill(self.padding[:, :, None, None], 0)
        return block.permute(2, 0, 1, 3).reshape(heads * self.batch, self.length, width)

    def rows(self, block: Tensor) -> Tensor:
        heads = block.shape[0] // self.batch
        flat = block.view(heads, self.batch * self.length, block.shape[2])
        return flat.index_select(1, self.target).transpose(0, 1)


@dataclass(frozen=True)
class _Scores:
    """Masks of the score blocks (H * B, T, S)."""

    heads: int
    batch: int
    masked: Tensor  # bool (B, T, S)
    keep: Tensor | None  # bool (H * B, T, S)
    factor: float

    @staticmethod
    def of(
        queries: _Blocks, keys: _Blocks, heads: int, seed: Tensor | None, causal: bool, p: float, offset: int
    ) -> _Scores:
        masked = keys.padding[:, None, :].expand(-1, queries.length, -1)
        if causal:
            lead = (~keys.padding).sum(1) - (~queries.padding).sum(1)
            limit = torch.arange(queries.length)[None, :, None] + lead[:, None, None]
            masked = masked | (torch.arange(keys.length) > limit)
        keep = None
        if rng.threshold(p) > 0:
            packed = rng.attention_keep_mask(seed, offset, torch.arange(queries.used), heads, keys.length, p)
            keep = packed.index_select(1, queries.source).view(-1, queries.length, keys.length)
        return _Scores(heads, queries.batch, masked, keep, rng.keep_scale(p))

    def logits(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
        scores.view(self.heads, *self.masked.shape).masked_fill_(self.masked, float("-inf"))
        return scores

    def drop(self, x: Tensor) -> Tensor:
        return x if self.keep is None else torch.where(self.keep, x * self.factor, x.new_zeros(()))


@reference("attention_fwd")
def _forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    seed: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    offset: int,
) -> None:
    arguments = _check_inputs("attention_fwd", q, k, v, cu_q, cu_k, seed, p, offset)
    arguments.tensor("out", out, q.shape)
    arguments.tensor("lse", lse, q.shape[:2], arguments.statistics)
    queries, keys = _blocks(arguments, cu_q, cu_k, max_q, max_k)
    out.zero_()
    lse.fill_(float("-inf"))
    lse[queries.used :].zero_()
    if queries.used == 0 or keys.used == 0:
        return
    scores = _Scores.of(queries, keys, q.shape[1], seed, causal, p, offset)
    logits = scores.logits(queries.pad(q), keys.pad(k), scale)
    sums = logits.logsumexp(-1, keepdim=True)
    probs = logits.sub_(sums.masked_fill(sums == float("-inf"), 0)).exp_()
    store(out, queries.rows(torch.bmm(scores.drop(probs), keys.pad(v))))
    store(lse, queries.rows(sums).squeeze(2))


@reference("attention_bwd")
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    workspace: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    seed: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    offset: int,
) -> None:
    arguments = _check_inputs("attention_bwd", q, k, v, cu_q, cu_k, seed, p, offset)
    arguments.tensor("dq", dq, q.shape, contiguous=False)
    arguments.tensor("dk", dk, k.shape, contiguous=False)
    arguments.tensor("dv", dv, k.shape, contiguous=False)
    arguments.tensor("dout", dout, q.shape)
    arguments.tensor("out", out, q.shape)
    arguments.tensor("lse", lse, q.shape[:2], arguments.statistics)
    arguments.workspace(workspace, attention_workspace(*q.shape, k.shape[0]))
    queries, keys = _blocks(arguments, cu_q, cu_k, max_q, max_k)
    if queries.used == 0 or keys.used == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    scores = _Scores.of(queries, keys, q.shape[1], seed, causal, p, offset)
    q_block, k_block, v_block, grad = queries.pad(q), keys.pad(k), keys.pad(v), queries.pad(dout)
    sums = queries.pad(lse[:, :, None])
    probs = scores.logits(q_block, k_block, scale).sub_(sums.masked_fill(sums == float("-inf"), 0)).exp_()
    store(dv, keys.rows(torch.bmm(scores.drop(probs).transpose(1, 2), grad)))
    dprobs = scores.drop(torch.bmm(grad, v_block.transpose(1, 2)))
    # The row sum equals that of dout * out, but does not carry the rounding of out.
    dscores = dprobs.sub_((dprobs * probs).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
    store(dq, queries.rows(torch.bmm(dscores, k_block)))
    store(dk, keys.rows(torch.bmm(dscores.transpose(1, 2), q_block)))


@check_kinds
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return attention of packed sequences, (Nq, H, D); rows beyond ``cu_q[-1]`` are zero.

    Args:
        q: (Nq, H, D), last dimension contiguous.
        k: (Nk, H, D), last dimension contiguous, same dtype as ``q``.
        v: (Nk, H, D), last dimension contiguous, same dtype as ``q``.
        cu_q: int32 (B + 1,) on the device, first query row of each sequence and the end.
        cu_k: int32 (B + 1,) on the device, first key row of each sequence and the end.
        max_q: no sequence has more queries.
        max_k: no sequence has more keys.
        causal: query i sees only keys j <= i + (keys - queries) of its sequence.
        scale: factor of the scores, None for 1 / sqrt(D).
        p: dropout probability of the softmax probabilities.
        seed: int64 (1,) on the device, needed when p > 0.
        offset: constant of the dropout site, 0 to 2**32 - 1.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``p``, ``seed`` or ``offset`` does not fit, or (found on the CPU
            only) a sequence is longer than ``max_q`` or ``max_k``.
    """
    _check_inputs("attention", q, k, v, cu_q, cu_k, seed, p, offset)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, cu_q, cu_k, seed, max_q, max_k, causal, scale, p, offset)


def _blocks(arguments: Arguments, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> tuple[_Blocks, _Blocks]:
    blocks = _Blocks.of(cu_q), _Blocks.of(cu_k)
    for name, block, longest in zip(("max_q", "max_k"), blocks, (max_q, max_k), strict=True):
        if block.length > longest:
            arguments.fail(ValueError, name, f"= {longest} is less than the longest sequence, {block.length}")
    return blocks


def _check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    seed: Tensor | None,
    p: float,
    offset: int,
) -> Arguments:
    arguments = Arguments(op, "q", q, 3, contiguous=False)
    arguments.tensor("q", q, q.shape, contiguous=False)
    arguments.tensor("k", k, (k.shape[0], *q.shape[1:]), contiguous=False)
    arguments.tensor("v", v, k.shape, contiguous=False)
    arguments.tensor("cu_q", cu_q, (cu_q.numel(),), torch.int32)
    arguments.tensor("cu_k", cu_k, cu_q.shape, torch.int32)
    arguments.dropout(p, seed, offset)
    return arguments


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        seed: Tensor | None,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        p: float,
        offset: int,
    ) -> Tensor:
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=statistics_dtype(q.dtype))
        ctx.plan = max_q, max_k, causal, scale, p, offset
        torch.ops.ls_train.attention_fwd(out, lse, q, k, v, cu_q, cu_k, seed, *ctx.plan)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_q, cu_k, seed = ctx.saved_tensors
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        workspace = q.new_empty(attention_workspace(*q.shape, k.shape[0]), dtype=torch.float32)
        torch.ops.ls_train.attention_bwd(
            dq, dk, dv, workspace, dout.contiguous(), q, k, v, out, lse, cu_q, cu_k, seed, *ctx.plan
        )
        return dq, dk, dv, *(None,) * 9

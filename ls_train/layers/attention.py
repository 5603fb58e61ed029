"""Self-attention and cross attention inside a layer.

y = attention(q, k, v) W_o^T; the bias b_o is added by the residual epilogue. Head h of H owns columns h * D to
(h + 1) * D - 1 of q, k, v and of the attention's output, D = C / H, scores are scaled by D^-0.5 (Vaswani et al.,
"Attention Is All You Need", 2017). Temporaries come from the workspace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train.layers.call import CROSS_ATTENTION, SELF_ATTENTION, Pass
from ls_train.layers.linear import project, project_gradient
from ls_train.layers.residual import bias_gradient
from ls_train.memory import Field
from ls_train.ops._product import product
from ls_train.params import transposed

ops = torch.ops.ls_train


def self_attention_fields(embed_dim: int, heads: int) -> tuple[Field, ...]:
    """Return what self-attention saves."""
    return Field("qkv", 3 * embed_dim), Field("attended", embed_dim), Field("lse", heads, True)


def cross_attention_fields(embed_dim: int, heads: int) -> tuple[Field, ...]:
    """Return what cross attention saves."""
    return Field("query", embed_dim), Field("cross_attended", embed_dim), Field("cross_lse", heads, True)


def self_attention_fwd(y: Tensor, x: Tensor, run: Pass) -> None:
    """Write self-attention of ``x`` (N, C), without output bias, into ``y``."""
    call, p, saved = run.call, run.parameters, run.saved
    project(saved.qkv, x, (p.q_weight, p.k_weight, p.v_weight), (p.q_bias, p.k_bias, p.v_bias))
    q, k, v, attended = _self_heads(run)
    ops.attention_fwd(
        attended,
        saved.lse,
        q,
        k,
        v,
        call.cu,
        call.cu,
        call.seed,
        call.max_length,
        call.max_length,
        call.causal,
        q.shape[2] ** -0.5,
        call.attention_dropout,
        call.offset + SELF_ATTENTION,
    )
    product(y, saved.attended, transposed((p.out_weight,)))


def self_attention_bwd(dx: Tensor, dy: Tensor, x: Tensor, run: Pass, accumulate: bool) -> None:
    """Write (or add, with ``accumulate``) the gradient of :func:`self_attention_fwd`'s input into ``dx``."""
    call, p, saved, scratch, writer, *_ = run
    with scratch:
        dattended = _output_projection_bwd(dy, "out_weight", saved.attended, run)
        dqkv = scratch.take(saved.qkv.shape, x.dtype)
        _attention_bwd(
            scratch.view(dqkv, _split_qkv, call.heads),
            dattended,
            _self_heads(run),
            saved.lse,
            (call.cu, call.cu),
            (call.max_length, call.max_length),
            call.causal,
            SELF_ATTENTION,
            run,
        )
        bias_gradient(("q_bias", "k_bias", "v_bias"), dqkv, writer, run.column_sums, call.rows)
        writer.linear(("q_weight", "k_weight", "v_weight"), dqkv, x)
        project_gradient(dx, dqkv, (p.q_weight, p.k_weight, p.v_weight), accumulate)


def cross_attention_fwd(y: Tensor, x: Tensor, kv: Tensor, run: Pass) -> None:
    """Write attention of ``x`` (N, C) to this layer's slice of ``kv`` (Ns, L * 2C), without output bias, into ``y``."""
    call, p, saved = run.call, run.parameters, run.saved
    project(saved.query, x, (p.cross_q_weight,), (p.cross_q_bias,))
    q, k, v, attended = _cross_heads(kv, run)
    ops.attention_fwd(
        attended,
        saved.cross_lse,
        q,
        k,
        v,
        call.cu,
        call.memory_cu,
        call.seed,
        call.max_length,
        call.memory_max_length,
        False,
        q.shape[2] ** -0.5,
        call.attention_dropout,
        call.offset + CROSS_ATTENTION,
    )
    product(y, saved.cross_attended, transposed((p.cross_out_weight,)))


def cross_attention_bwd(
    dx: Tensor, dkv: Tensor, dy: Tensor, x: Tensor, kv: Tensor, run: Pass, accumulate: bool
) -> None:
    """Write the gradients of :func:`cross_attention_fwd`.

    Args:
        dx: (N, C), written, or added to with ``accumulate``.
        dkv: (Ns, 2C), this layer's part of the gradient of ``kv``, written; rows may lie apart.
    """
    call, p, saved, scratch, writer, *_ = run
    with scratch:
        dattended = _output_projection_bwd(dy, "cross_out_weight", saved.cross_attended, run)
        dquery = scratch.take(saved.query.shape, x.dtype)
        _attention_bwd(
            (scratch.view(dquery, _split_heads, call.heads), *_split_kv(dkv, 0, x.shape[1], call.heads)),
            dattended,
            _cross_heads(kv, run),
            saved.cross_lse,
            (call.cu, call.memory_cu),
            (call.max_length, call.memory_max_length),
            False,
            CROSS_ATTENTION,
            run,
        )
        bias_gradient(("cross_q_bias",), dquery, writer, run.column_sums, call.rows)
        writer.linear(("cross_q_weight",), dquery, x)
        project_gradient(dx, dquery, (p.cross_q_weight,), accumulate)


def _output_projection_bwd(dy: Tensor, weight: str, attended: Tensor, run: Pass) -> Tensor:
    run.writer.linear((weight,), dy, attended)
    dattended = run.scratch.take(attended.shape, dy.dtype)
    product(dattended, dy, getattr(run.parameters, weight))
    return dattended


def _attention_bwd(
    gradients: tuple[Tensor, Tensor, Tensor],
    dattended: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    starts: tuple[Tensor, Tensor],
    lengths: tuple[int, int],
    causal: bool,
    site: int,
    run: Pass,
) -> None:
    call = run.call
    heads, head_dim = inputs[0].shape[1:]
    ops.attention_bwd(
        *gradients,
        run.row_sums,
        run.scratch.view(dattended, _split_heads, heads),
        *inputs,
        lse,
        *starts,
        call.seed,
        *lengths,
        causal,
        head_dim**-0.5,
        call.attention_dropout,
        call.offset + site,
    )


def _self_heads(run: Pass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the output of self-attention, (N, H, D) each; the views stay with the saved block's."""
    saved, heads = run.saved, run.call.heads
    views = getattr(saved, "self_heads", None)
    if views is None:
        views = saved.self_heads = (*_split_qkv(saved.qkv, heads), _split_heads(saved.attended, heads))
    return views


def _cross_heads(kv: Tensor, run: Pass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the output of cross attention, (N or Ns, H, D) each."""
    saved, call = run.saved, run.call
    views = getattr(saved, "cross_heads", None)
    if views is None:
        q, attended = _split_heads(saved.query, call.heads), _split_heads(saved.cross_attended, call.heads)
        keys_values = _split_kv(kv, call.layer, saved.query.shape[1], call.heads)
        views = saved.cross_heads = (q, *keys_values, attended)
    return views


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, x.shape[1] // heads)


def _split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return qkv.view(qkv.shape[0], 3, heads, qkv.shape[1] // (3 * heads)).unbind(1)


def _split_kv(kv: Tensor, layer: int, embed_dim: int, heads: int) -> tuple[Tensor, Tensor]:
    row, column = kv.stride()
    shape, strides = (
        (2, kv.shape[0], heads, embed_dim // heads),
        (embed_dim * column, row, embed_dim // heads * column, column),
    )
    return kv.as_strided(shape, strides, kv.storage_offset() + layer * 2 * embed_dim * column).unbind(0)

"""What one call of a layer needs besides activations and parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ls_train.layers.column_sums import ColumnSums, aligned_sums
from ls_train.layers.gradients import GradientWriter
from ls_train.memory import SavedBlock, Workspace, aligned
from ls_train.ops._arguments import statistics_dtype
from ls_train.ops._product import gemm_workspace
from ls_train.ops.attention import attention_workspace
from ls_train.ops.bias_activation_dropout import bias_activation_dropout_workspace
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm_workspace
from ls_train.ops.layer_norm import layer_norm_workspace

SITES = 8
"""Dropout sites reserved for a layer: site s of the layer with ``rng_offset`` o is constant ``o + s``."""
SELF_ATTENTION, SELF_OUTPUT, CROSS_ATTENTION, CROSS_OUTPUT, ACTIVATION, FFN_OUTPUT = range(6)

_NORM = ("sum", "mean", "rstd")
FIELDS = (
    *("qkv", "attended", "lse", *(f"self_norm_{part}" for part in _NORM)),
    *("query", "cross_attended", "cross_lse", *(f"cross_norm_{part}" for part in _NORM)),
    *(*(f"final_norm_{part}" for part in _NORM), "hidden"),
)
"""Saved tensors in the order in which the operators expect the places where they begin."""


class Call(NamedTuple):
    """Everything one call of a layer needs besides activations and parameters, in the order of the operators.

    Attributes:
        cu: int32 (B + 1,), starts of the sequences in the packed rows.
        rows: int32 (1,), number of used rows.
        seed: int64 (1,), or None without dropout.
        memory_cu: int32 (B + 1,), starts of the sequences in the encoder output; None without cross attention.
        heads: H.
        max_length: no sequence is longer.
        memory_max_length: no encoder sequence is longer; 0 without cross attention.
        layer: which layer's slice of the shared cross-attention keys and values to use.
        offset: dropout constant of the layer's first site.
        normalize_before: pre-norm.
        causal: whether a row sees only itself and earlier rows of its sequence.
        eps: of the layer norms.
        dropout: probability on the output of attention and feed-forward.
        attention_dropout: probability on attention weights.
        activation_dropout: probability after the activation.
        activation: name of the activation.
    """

    cu: Tensor
    rows: Tensor
    seed: Tensor | None
    memory_cu: Tensor | None
    heads: int
    max_length: int
    memory_max_length: int
    layer: int
    offset: int
    normalize_before: bool
    causal: bool
    eps: float
    dropout: float
    attention_dropout: float
    activation_dropout: float
    activation: str


class Sizes(NamedTuple):
    """Memory that the passes of a layer take in calls of one shape.

    Attributes:
        layout: of the saved block.
        begins: byte at which each of the saved tensors :data:`FIELDS` begins.
        forward: bytes of workspace of the forward, without a block that is not saved.
        backward: bytes of workspace of the backward.
        sums: from :func:`backward_sums`.
    """

    layout: SavedBlock
    begins: list[int]
    forward: int
    backward: int
    sums: int


class Pass(NamedTuple):
    """What the pieces of one layer's forward or backward share.

    Attributes:
        call: what the call was about.
        parameters: the layer's parameters by name.
        saved: tensors in the saved block by name.
        scratch: workspace.
        writer: in a backward, where parameter gradients go.
        row_sums: in a backward, scratch for the attention's sums over rows.
        column_sums: in a backward, the column sums that become gradients of biases and norms.
    """

    call: Call
    parameters: NamedTuple
    saved: SimpleNamespace
    scratch: Workspace
    writer: GradientWriter | None = None
    row_sums: Tensor | None = None
    column_sums: ColumnSums | None = None


def backward_pass(
    call: Call,
    parameters: NamedTuple,
    saved: SimpleNamespace,
    scratch: Workspace,
    writer: GradientWriter,
    x: Tensor,
    sums: int,
) -> Pass:
    """Return the :class:`Pass` of a backward, its sums taken from the workspace.

    Args:
        x: (N, C), the layer's input.
        sums: from :func:`backward_sums`.

    The other arguments are the attributes.
    """
    size = attention_workspace(x.shape[0], call.heads, x.shape[1] // call.heads, x.shape[0])
    row_sums = scratch.take((size,), torch.float32)
    column_sums = ColumnSums(scratch.take((sums,), statistics_dtype(x.dtype)))
    return Pass(call, parameters, saved, scratch, writer, row_sums, column_sums)


def layer_sizes(
    layout: SavedBlock,
    rows: int,
    embed_dim: int,
    ffn_dim: int,
    heads: int,
    itemsize: int,
    cross: bool,
    normalize_before: bool,
) -> Sizes:
    """Return the sizes of a layer whose saved block has ``layout``; the arguments are those of the functions below."""
    forward = forward_scratch(rows, embed_dim, ffn_dim, itemsize)
    sums = backward_sums(rows, embed_dim, ffn_dim, cross, normalize_before)
    buffers = 2 + cross + normalize_before
    backward = backward_scratch(rows, embed_dim, ffn_dim, heads, itemsize, sums, buffers)
    return Sizes(layout, layout.begins(FIELDS), forward, backward, sums)


def forward_scratch(rows: int, embed_dim: int, ffn_dim: int, itemsize: int) -> int:
    """Return the bytes of workspace that a layer's forward takes, without a block that is not saved.

    What its products take comes last, where the operators look for it.
    """
    return 2 * aligned(rows * embed_dim * itemsize) + aligned(rows * ffn_dim * itemsize) + gemm_workspace(itemsize)


def backward_sums(rows: int, embed_dim: int, ffn_dim: int, cross: bool, normalize_before: bool) -> int:
    """Return the number of elements that the column sums of a layer's backward need until they are added up.

    Args:
        rows: N.
        embed_dim: C.
        ffn_dim: F.
        cross: with cross attention.
        normalize_before: pre-norm.
    """
    norm = bias_dropout_add_layer_norm_workspace(rows, embed_dim)
    bias = bias_dropout_add_workspace(rows, embed_dim)
    parts = [bias_dropout_add_workspace(rows, 3 * embed_dim), bias_activation_dropout_workspace(rows, ffn_dim), norm]
    parts += [bias, layer_norm_workspace(rows, embed_dim)] if normalize_before else [norm]
    if cross:
        parts += [bias, norm]
    return sum(map(aligned_sums, parts))


def backward_scratch(
    rows: int, embed_dim: int, ffn_dim: int, heads: int, itemsize: int, sums: int, buffers: int
) -> int:
    """Return the bytes of workspace that a layer's backward takes, what its products take last.

    Args:
        rows: N.
        embed_dim: C.
        ffn_dim: F.
        heads: H.
        itemsize: bytes of an activation.
        sums: from :func:`backward_sums`.
        buffers: number of (N, C) buffers that live through the whole backward.
    """
    matrix = aligned(rows * embed_dim * itemsize)
    feed_forward = 2 * aligned(rows * ffn_dim * itemsize)
    attention = matrix + aligned(3 * rows * embed_dim * itemsize)
    statistics = 2 * aligned(rows * max(4, itemsize))
    row_sums = aligned(4 * attention_workspace(rows, heads, embed_dim // heads, rows))
    column_sums = aligned(max(4, itemsize) * sums)
    taken = buffers * matrix + row_sums + column_sums + max(feed_forward, attention, statistics)
    return taken + gemm_workspace(itemsize)

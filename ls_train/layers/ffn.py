"""The feed-forward block inside a layer: y = dropout(act(x W_1^T + b_1)) W_2^T; the epilogue adds b_2."""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train.layers.call import ACTIVATION, Call, Pass
from ls_train.layers.linear import project_gradient
from ls_train.ops._product import product
from ls_train.ops.bias_activation_dropout import bias_activation_dropout_workspace, saves_output
from ls_train.params import transposed

ops = torch.ops.ls_train


def feed_forward_fwd(y: Tensor, x: Tensor, run: Pass) -> None:
    """Write the feed-forward block of ``x`` (N, C), without output bias, into ``y``.

    For relu ``saved.hidden`` is the activation's output, otherwise its input (the output is computed again).
    """
    call, p, saved, scratch, *_ = run
    with scratch:
        inner = scratch.take(saved.hidden.shape, x.dtype)
        before, after = (inner, saved.hidden) if saves_output(call.activation) else (saved.hidden, inner)
        product(before, x, transposed((p.fc1_weight,)))
        _activation_fwd(after, before, p.fc1_bias, call)
        product(y, after, transposed((p.fc2_weight,)))


def feed_forward_bwd(dx: Tensor, dy: Tensor, x: Tensor, run: Pass, accumulate: bool) -> None:
    """Write (or add, with ``accumulate``) the gradient of :func:`feed_forward_fwd`'s input into ``dx``."""
    call, p, saved, scratch, writer, *_ = run
    shape = saved.hidden.shape
    with scratch:
        dhidden = scratch.take(shape, x.dtype)
        dinner = scratch.take(shape, x.dtype)
        if saves_output(call.activation):
            hidden, bias = saved.hidden, None
        else:
            # dinner is free until the activation's backward
            hidden, bias = dinner, p.fc1_bias
            _activation_fwd(hidden, saved.hidden, bias, call)
        writer.linear(("fc2_weight",), dy, hidden)
        product(dhidden, dy, p.fc2_weight)
        (dbias,), add = writer.open(("fc1_bias",))
        sums = run.column_sums.part((dbias,), add, bias_activation_dropout_workspace(*shape))
        ops.bias_activation_dropout_bwd(
            dinner,
            dbias,
            *sums,
            dhidden,
            saved.hidden,
            bias,
            call.seed,
            call.rows,
            call.activation_dropout,
            call.offset + ACTIVATION,
            call.activation,
            add,
        )
        writer.linear(("fc1_weight",), dinner, x)
        project_gradient(dx, dinner, (p.fc1_weight,), accumulate)


def _activation_fwd(y: Tensor, x: Tensor, bias: Tensor, call: Call) -> None:
    ops.bias_activation_dropout_fwd(
        y, x, bias, call.seed, call.rows, call.activation_dropout, call.offset + ACTIVATION, call.activation
    )

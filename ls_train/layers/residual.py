"""The steps around attention and feed-forward: bias, dropout, residual sum and layer norm, and bias gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ls_train.layers.call import Pass
from ls_train.layers.column_sums import ColumnSums
from ls_train.layers.gradients import GradientWriter
from ls_train.memory import Field
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm_workspace
from ls_train.ops.layer_norm import layer_norm_workspace

ops = torch.ops.ls_train


def norm_fields(name: str, embed_dim: int, has_sum: bool = True) -> tuple[Field, ...]:
    """Return what layer norm ``name`` saves: its statistics and, with ``has_sum``, the residual sum it is applied to.

    Its output is not saved: :func:`norm_again` makes it from the sum.
    """
    statistics = Field(f"{name}_mean", 0, True), Field(f"{name}_rstd", 0, True)
    return (Field(f"{name}_sum", embed_dim), *statistics) if has_sum else statistics


def norm_fwd(y: Tensor, x: Tensor, name: str, run: Pass) -> None:
    """Write layer norm ``name`` of ``x`` into ``y`` and its statistics into the saved block."""
    ops.layer_norm_fwd(
        y,
        getattr(run.saved, f"{name}_mean"),
        getattr(run.saved, f"{name}_rstd"),
        x,
        getattr(run.parameters, f"{name}_weight"),
        getattr(run.parameters, f"{name}_bias"),
        run.call.rows,
        run.call.eps,
    )


def norm_again(y: Tensor, x: Tensor, name: str, run: Pass) -> Tensor:
    """Return ``y`` after writing the output of layer norm ``name`` of ``x`` into it again, with the forward's bits."""
    call, parameters = run.call, run.parameters
    with run.scratch as scratch:
        # The saved statistics must not change: a second backward may follow.
        mean, rstd = (scratch.take(x.shape[:1], getattr(run.saved, f"{name}_mean").dtype) for _ in range(2))
        weight, bias = getattr(parameters, f"{name}_weight"), getattr(parameters, f"{name}_bias")
        ops.layer_norm_fwd(y, mean, rstd, x, weight, bias, call.rows, call.eps)
    return y


def norm_bwd(dx: Tensor, dy: Tensor, dresidual: Tensor, x: Tensor, name: str, run: Pass) -> None:
    """Write the gradient of layer norm ``name``'s input plus ``dresidual`` into ``dx``."""
    call, parameters, saved, writer = run.call, run.parameters, run.saved, run.writer
    (dweight, dbias), add = writer.open((f"{name}_weight",), (f"{name}_bias",), always=True)
    ops.layer_norm_bwd(
        dx,
        dweight,
        dbias,
        *run.column_sums.part((dweight, dbias), add, layer_norm_workspace(*x.shape)),
        dy,
        dresidual,
        x,
        getattr(saved, f"{name}_mean"),
        getattr(saved, f"{name}_rstd"),
        getattr(parameters, f"{name}_weight"),
        call.rows,
        add,
    )


def add_fwd(y: Tensor, x: Tensor, bias: Tensor, residual: Tensor, site: int, run: Pass) -> None:
    """Write ``residual + dropout(x + bias)`` into ``y``."""
    call = run.call
    ops.bias_dropout_add_fwd(y, x, bias, residual, call.seed, call.rows, call.dropout, call.offset + site)


def add_bwd(dx: Tensor, dy: Tensor, bias: str, site: int, run: Pass) -> Tensor:
    """Return the gradient of :func:`add_fwd`'s ``x``: written to ``dx``, or ``dy`` itself without dropout."""
    call, writer = run.call, run.writer
    (dbias,), add = writer.open((bias,))
    dropped = call.dropout > 0
    if dropped or dbias is not None:
        ops.bias_dropout_add_bwd(
            dx if dropped else None,
            dbias,
            *run.column_sums.part((dbias,), add, bias_dropout_add_workspace(*dy.shape)),
            dy,
            call.seed,
            call.rows,
            call.dropout,
            call.offset + site,
            add,
        )
    return dx if dropped else dy


def add_norm_fwd(y: Tensor, x: Tensor, bias: Tensor, residual: Tensor, name: str, site: int, run: Pass) -> None:
    """Write the sum ``residual + dropout(x + bias)`` into the saved block and its layer norm ``name`` into ``y``."""
    call, parameters, saved = run.call, run.parameters, run.saved
    ops.bias_dropout_add_layer_norm_fwd(
        y,
        getattr(saved, f"{name}_sum"),
        getattr(saved, f"{name}_mean"),
        getattr(saved, f"{name}_rstd"),
        x,
        bias,
        residual,
        getattr(parameters, f"{name}_weight"),
        getattr(parameters, f"{name}_bias"),
        call.seed,
        call.rows,
        call.eps,
        call.dropout,
        call.offset + site,
    )


def add_norm_bwd(
    dx: Tensor,
    dresidual: Tensor,
    dy: Tensor,
    dsum: Tensor | None,
    bias: str,
    name: str,
    site: int,
    run: Pass,
) -> Tensor:
    """Write the gradient of :func:`add_norm_fwd`'s residual into ``dresidual`` and return that of its ``x``.

    Args:
        dx: (N, C), written with dropout; without it ``dresidual`` is the gradient of ``x`` too.
        dy: gradient of the layer norm's output.
        dsum: gradient that reaches the sum by another path, or None.
        bias: name of the bias parameter.
    """
    call, parameters, saved, writer = run.call, run.parameters, run.saved, run.writer
    (dweight, dnorm_bias, dbias), add = writer.open((f"{name}_weight",), (f"{name}_bias",), (bias,), always=True)
    size = bias_dropout_add_layer_norm_workspace(*dy.shape)
    dropped = call.dropout > 0
    ops.bias_dropout_add_layer_norm_bwd(
        dx if dropped else None,
        dresidual,
        dbias,
        dweight,
        dnorm_bias,
        *run.column_sums.part((dweight, dnorm_bias, dbias), add, size),
        dy,
        dsum,
        getattr(saved, f"{name}_sum"),
        getattr(saved, f"{name}_mean"),
        getattr(saved, f"{name}_rstd"),
        getattr(parameters, f"{name}_weight"),
        call.seed,
        call.rows,
        call.dropout,
        call.offset + site,
        add,
    )
    return dx if dropped else dresidual


def bias_gradient(
    names: Sequence[Hashable], dy: Tensor, writer: GradientWriter, sums: ColumnSums, rows: Tensor
) -> None:
    """Begin the column sums of ``dy``, the gradient of joined biases ``names``."""
    (dbias,), add = writer.open(names)
    if dbias is not None:
        part = sums.part((dbias,), add, bias_dropout_add_workspace(*dy.shape))
        ops.bias_dropout_add_bwd(None, dbias, *part, dy, None, rows, 0.0, 0, add)

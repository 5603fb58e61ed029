"""Products of matrices, and linear projections of packed rows: one GEMM where several weights lie together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_train._library import compiled, define
from ls_train.memory import workspace
from ls_train.params import joined, transposed

define(
    "product",
    "(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias, Tensor workspace, bool accumulate) -> ()",
    compiled_only=True,
)

GEMM_WORKSPACE = 32 << 20
"""Bytes of workspace for a product, what cuBLASLt's kernels for Hopper are recommended to get."""


def gemm_workspace(itemsize: int) -> int:
    """Return the bytes of workspace that products of elements of ``itemsize`` bytes take from their caller."""
    return GEMM_WORKSPACE if itemsize == 2 else 0


def product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """Write ``a b + bias``, or add ``a b`` with ``accumulate``.

    The compiled library makes 16-bit products with plans of its own, which have other bits than torch's and are also
    those of the layers' operators.

    Args:
        out: (M, N), written.
        a: (M, K).
        b: (K, N).
        bias: (N,), or None; without ``accumulate``.
        accumulate: add to what ``out`` holds.
    """
    size = gemm_workspace(out.itemsize)
    run = compiled("product", out) if size else None
    if run is not None:
        with workspace(out, size) as scratch:
            run(out, a, b, bias, scratch.take((size,), torch.uint8), accumulate)
    elif accumulate:
        torch.addmm(out, a, b, out=out)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def _join(tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[0] if len(tensors) == 1 else joined(tensors)


def project(out: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> None:
    """Write ``x w^T + b`` for each weight and bias, side by side, into ``out``.

    Args:
        out: (N, sum of M).
        x: (N, K).
        weights: each (M, K).
        biases: each (M,), or None for none.
    """
    weight = transposed(weights)
    if biases is None:
        if weight is not None:
            product(out, x, weight)
            return
    elif weight is not None and (bias := _join(biases)) is not None:
        product(out, x, weight, bias)
        return
    column = 0
    for i, weight in enumerate(weights):
        part = out[:, column : column + weight.shape[0]]
        product(part, x, weight.t(), None if biases is None else biases[i])
        column += weight.shape[0]


def project_gradient(dx: Tensor, dy: Tensor, weights: Sequence[Tensor], accumulate: bool = False) -> None:
    """Write (or add, with ``accumulate``) the gradient of the input of :func:`project` into ``dx``.

    Args:
        dx: (N, K).
        dy: (N, sum of M), gradient of the output.
        weights: those of the projection, each (M, K).
        accumulate: add to what ``dx`` holds.
    """
    weight = _join(weights)
    if weight is not None:
        weights = (weight,)
    column = 0
    for weight in weights:
        part = dy if len(weights) == 1 else dy[:, column : column + weight.shape[0]]
        product(dx, part, weight, accumulate=accumulate or column > 0)
        column += weight.shape[0]

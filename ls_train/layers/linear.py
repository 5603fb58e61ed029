"""Linear projections of packed rows by one or several weights: one GEMM where the weights lie together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ls_train.ops._product import product
from ls_train.params import joined, transposed


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

"""Products of matrices: 16-bit ones by the compiled library's plans, others by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train._library import compiled, define
from ls_train.memory import workspace

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


def product(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, accumulate: bool = False, space: Tensor | None = None
) -> None:
    """Write ``a b + bias``, or add ``a b`` with ``accumulate``.

    The compiled library makes products of 16-bit factors with plans of its own, which have other bits than torch's and
    are also those of the layers' operators. Code that ``torch.compile`` traces has torch's.

    Args:
        out: (M, N), written; of the factors' type or, without ``bias``, float32.
        a: (M, K).
        b: (K, N).
        bias: (N,), or None; without ``accumulate``.
        accumulate: add to what ``out`` holds.
        space: uint8 (:func:`gemm_workspace`,), scratch that nothing else uses until the product is done; None: taken
            from the workspace of the current stream.

    Raises:
        RuntimeError: types, sizes or memory do not fit.
        ValueError: ``bias`` with ``accumulate``.
    """
    if accumulate and bias is not None:
        raise ValueError("ls_train.product: argument bias must be None with accumulate")
    size = gemm_workspace(a.itemsize)
    run = compiled("product", out) if size and not torch.compiler.is_compiling() else None
    if run is not None and space is not None:
        run(out, a, b, bias, space, accumulate)
    elif run is not None:
        with workspace(out, size) as scratch:
            run(out, a, b, bias, scratch.take((size,), torch.uint8), accumulate)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        is_wide = out.dtype == torch.float32 and a.dtype == b.dtype and a.itemsize == 2  # torch refuses other mixtures
        if is_wide and not out.is_cuda:  # on the CPU torch has no wider results
            a, b = a.float(), b.float()
        kind = {"out_dtype": out.dtype} if is_wide and out.is_cuda else {}
        if accumulate:
            torch.addmm(out, a, b, out=out, **kind)
        else:
            torch.mm(a, b, out=out, **kind)

"""A tensor times a factor on the device, in another type: the last step of gradients that are held wider or scaled.

The product, and with ``accumulate`` the sum, is made in float32 (float64 where a tensor is float64) and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train._library import define, reference
from ls_train.ops._arguments import FLOAT_TYPES, Arguments, check_kinds, statistics_dtype
from ls_train.ops._reference import store_gradient

define("scale_cast", "(Tensor(a!) out, Tensor x, Tensor factor, bool accumulate) -> ()")


@reference("scale_cast")
def _scale_cast(out: Tensor, x: Tensor, factor: Tensor, accumulate: bool) -> None:
    """Write ``factor * x``, or add it with ``accumulate``; ``out`` and ``x`` of different types must not overlap."""
    arguments = Arguments("scale_cast", "out", out, 2)
    wide = _check_inputs(x, factor, out.dtype)
    arguments.tensor("x", x, out.shape, x.dtype)
    store_gradient(out, factor * x.to(wide), accumulate)


@check_kinds
@torch.no_grad()
def scale_cast(x: Tensor, factor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``factor * x`` in ``dtype``, calculated in float32 (float64 if one of the types is) and rounded once.

    It is not differentiable.

    Args:
        x: (N, C), contiguous.
        factor: float32 (1,) on the device; float64 if ``dtype`` or that of ``x`` is.
        dtype: of the result; None: that of ``x``.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or memory layout does not fit.
    """
    if dtype is None:
        dtype = x.dtype
    elif dtype not in FLOAT_TYPES or (dtype == torch.float64 and x.is_cuda):
        what = "float32, float16, bfloat16 or, on the CPU, float64"
        raise TypeError(f"ls_train.scale_cast: argument dtype = {dtype}; use {what}")
    _check_inputs(x, factor, dtype)
    out = torch.empty_like(x, dtype=dtype)
    torch.ops.ls_train.scale_cast(out, x, factor, False)
    return out


def _check_inputs(x: Tensor, factor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the calculation, for a result of ``dtype``."""
    arguments = Arguments("scale_cast", "x", x, 2)
    wide = torch.promote_types(arguments.statistics, statistics_dtype(dtype))
    arguments.tensor("factor", factor, (1,), wide)
    return wide

"""A float32 master of 16-bit parameters in 16 bits more: what rounding to the parameter left out.

- bfloat16 is the upper half of a float32, so the remainder is the lower half, and the pair holds every float32 number.
  That works with one rounding only: to nearest, ties away from zero. With ties to even, 65537 numbers would round to
  one even parameter, one more than 16 bits can tell apart.
- float16 rounds to nearest even, and the remainder counts units of 2^-15 of the parameter's spacing. The pair holds
  every float32 number between 2^-16 and 65504, and below 2^-16 the multiples of 2^-39: a number there changes by at
  most 2^-40 each time it is stored. Where the parameter is infinite, the master is too.
- Every NaN is stored as the parameter 0x7fff and the remainder 0: processors make NaNs of other signs and payloads.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_EXACT = {torch.bfloat16: 0.0, torch.float16: 2.0**-16}
"""Magnitude from which on a finite master is stored exactly."""

_SIGN, _MAGNITUDE = -0x80000000, 0x7FFFFFFF
_INFINITY = 0x7F800000
_FINEST = 2.0**-39
_NAN = 0x7FFF
_COARSE_BELOW = SMALLEST_EXACT[torch.float16]


def split_master(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (param, remainder) of the float32 ``master``: the nearest number of ``dtype`` and what it leaves out.

    Args:
        master: float32, any shape.
        dtype: float16 or bfloat16.

    Returns:
        Tensors of the shape of ``master``: param of type ``dtype``, remainder int16.

    Raises:
        TypeError: a dtype is another.
    """
    if master.dtype != torch.float32:
        raise TypeError(f"master has dtype {master.dtype}; convert it to torch.float32")
    if dtype == torch.bfloat16:
        bits = master.contiguous().view(torch.int32)
        nan = (bits & _MAGNITUDE) > _INFINITY
        high = ((bits & _SIGN) | ((bits & _MAGNITUDE) + 0x8000)) >> 16
        return high.short().masked_fill_(nan, _NAN).view(dtype), torch.where(nan, 0, bits).short()
    if dtype == torch.float16:
        # What can be stored is rounded to the parameter, so that whoever reads the pair finds the same parameter again.
        master = torch.where(master.abs() < _COARSE_BELOW, (master / _FINEST).round() * _FINEST, master)
        param = master.to(dtype).contiguous()
        param.view(torch.int16).masked_fill_(master.isnan(), _NAN)
        steps = (master - param.float()) * _unit(param).reciprocal()
        return param, torch.where(param.isfinite(), steps, 0).short()
    raise TypeError(f"dtype = {dtype} has no remainder; use torch.float16 or torch.bfloat16")


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master that :func:`split_master` divided; of any other pair one that is near ``param``.

    Args:
        param: float16 or bfloat16, any shape.
        remainder: int16, shape of ``param``.

    Raises:
        TypeError: a dtype is another.
    """
    if remainder.dtype != torch.int16:
        raise TypeError(f"remainder has dtype {remainder.dtype}; convert it to torch.int16")
    if param.dtype == torch.bfloat16:
        bits = param.float().view(torch.int32)
        # A parameter that became zero since must not turn negative remainders into NaN.
        return ((bits & _SIGN) | ((bits & _MAGNITUDE) + remainder).clamp_(min=0)).view(torch.float32)
    if param.dtype == torch.float16:
        return param.float() + remainder * _unit(param.contiguous())
    raise TypeError(f"param has dtype {param.dtype}; use torch.float16 or torch.bfloat16")


def rounds_to(master: Tensor, param: Tensor) -> Tensor:
    """Return where ``param`` is the number of its type nearest to the float32 ``master``, either one at a tie.

    Args:
        master: float32, any shape.
        param: float16 or bfloat16, shape of ``master``.
    """
    return (master.to(param.dtype) == param) | (split_master(master, param.dtype)[0] == param)


def _unit(param: Tensor) -> Tensor:
    """Return float32 2^-15 of the distance between float16 ``param`` and the next number away from zero."""
    exponent = (param.view(torch.int16) >> 10 & 0x1F).clamp_(min=1)
    return (exponent.int() + (127 - 15 - 10 - 15) << 23).view(torch.float32)

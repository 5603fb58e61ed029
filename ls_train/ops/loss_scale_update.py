"""The decision of a dynamic loss scale after one update, counters included, on the device.

The rule is fairseq's ``DynamicLossScaler``. With i the update's number from 0, o the last update that overflowed, r the
last that changed the scale and n the overflows since then (n counts this one):

- no overflow: the scale is multiplied by ``factor`` where ``(i - o) % window == 0``;
- overflow: it is divided by ``factor``, not below ``threshold``, where ``n / (i - r) >= tolerance``; where that would
  bring it to ``min_scale`` it stays, and ``exhausted`` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds

define(
    "loss_scale_update",
    "(Tensor(a!) scale, Tensor(b!) counters, Tensor(c!) exhausted, Tensor found_inf, float factor, int window,"
    " float tolerance, float threshold, float min_scale) -> ()",
)

COUNTERS = ("iteration", "last_overflow", "last_rescale", "overflows")
"""Elements of ``counters``: i, o, r and n; a new scale starts at 0, -1, -1 and 0."""


@reference("loss_scale_update")
def _update(
    scale: Tensor,
    counters: Tensor,
    exhausted: Tensor,
    found_inf: Tensor,
    factor: float,
    window: int,
    tolerance: float,
    threshold: float,
    min_scale: float,
) -> None:
    _check(scale, counters, exhausted, found_inf, factor, window)
    iteration, last_overflow, last_rescale, overflows = counters.tolist()
    (value,) = scale.tolist()
    (flag,) = found_inf.tolist()
    if flag > 0:
        last_overflow = iteration
        overflows += 1
        smaller = value
        if overflows / (iteration - last_rescale) >= tolerance:
            smaller = max(value / factor, threshold)
            last_rescale, overflows = iteration, 0
        if smaller <= min_scale:
            exhausted.fill_(1)
        else:
            value = smaller
    elif (iteration - last_overflow) % window == 0:
        value *= factor
        last_rescale = iteration
    scale.fill_(value)
    counters.copy_(torch.tensor([iteration + 1, last_overflow, last_rescale, overflows]))


@check_kinds
def loss_scale_update(
    scale: Tensor,
    counters: Tensor,
    exhausted: Tensor,
    found_inf: Tensor,
    factor: float = 2.0,
    window: int = 2000,
    tolerance: float = 0.0,
    threshold: float = 0.0,
    min_scale: float = 1e-4,
) -> None:
    """Count one update and change the loss scale by fairseq's rule, see the module's text.

    Args:
        scale: float32 (1,), changed.
        counters: int64 (4,), changed, see ``COUNTERS``.
        exhausted: float32 (1,), set to 1 where an overflow would have brought the scale to ``min_scale``.
        found_inf: float32 (1,), the update overflowed where it is > 0.
        factor: the scale is multiplied or divided by it, above 1.
        window: updates without overflow before the scale grows, at least 1.
        tolerance: share of overflows since the last change below which the scale stays.
        threshold: the scale is not reduced below it; 0 for none.
        min_scale: the scale does not reach it.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, memory layout, ``factor`` or ``window`` does not fit.
    """
    _check(scale, counters, exhausted, found_inf, factor, window)
    torch.ops.ls_train.loss_scale_update(
        scale, counters, exhausted, found_inf, factor, window, tolerance, threshold, min_scale
    )


def _check(scale: Tensor, counters: Tensor, exhausted: Tensor, found_inf: Tensor, factor: float, window: int) -> None:
    arguments = Arguments("loss_scale_update", "scale", scale, 1)
    for name, tensor in (("scale", scale), ("exhausted", exhausted), ("found_inf", found_inf)):
        arguments.tensor(name, tensor, (1,), torch.float32)
    arguments.tensor("counters", counters, (len(COUNTERS),), torch.int64)
    if not factor > 1.0:
        arguments.fail(ValueError, "factor", f"= {factor} must be above 1")
    if window < 1:
        arguments.fail(ValueError, "window", f"= {window} must be at least 1")

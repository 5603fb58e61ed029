"""Steps that the CPU implementations share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_train import rng
from ls_train.ops._arguments import statistics_dtype


def used_rows(rows: Tensor | None, total: int) -> int:
    """Return the number of used rows among ``total``: all of them where ``rows`` is None."""
    return total if rows is None else max(0, min(int(rows), total))


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in the type of internal arithmetic."""
    return x.to(statistics_dtype(x.dtype))


def store(out: Tensor, value: Tensor) -> None:
    """Write ``value`` into the first rows of ``out`` and zeros into the remaining ones."""
    out[: value.shape[0]].copy_(value)
    out[value.shape[0] :].zero_()


def store_gradient(out: Tensor | None, value: Tensor, accumulate: bool) -> None:
    """Write, or add in the type of ``value``, a parameter gradient."""
    if out is not None:
        out.copy_(out.to(value.dtype) + value if accumulate else value)


def finish_sums(
    gradients: Sequence[Tensor | None],
    values: Sequence[Tensor],
    workspace: Tensor | None,
    partial_rows: Tensor | None,
    accumulate: bool,
) -> None:
    """Write the column sums ``values`` as gradients or, with ``partial_rows``, as one partial row of each sum."""
    if partial_rows is None:
        for gradient, value in zip(gradients, values, strict=True):
            store_gradient(gradient, value, accumulate)
        return
    wanted = [value for gradient, value in zip(gradients, values, strict=True) if gradient is not None]
    partial_rows.fill_(1)
    workspace[: sum(value.numel() for value in wanted)].copy_(torch.cat(wanted))


def drop(x: Tensor, seed: Tensor | None, offset: int, p: float) -> Tensor:
    """Return dropout of the rows ``x`` (N, C) by the row-wise rule."""
    if rng.threshold(p) == 0:
        return x
    keep = rng.keep_mask(seed, offset, x.shape[0], x.shape[1], p)
    return torch.where(keep, x * rng.keep_scale(p), x.new_zeros(()))

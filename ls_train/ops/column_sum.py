"""Second step of column sums: partial rows, which backward operators leave in their workspaces, to parameter gradients.

The operators that have column sums add up as many rows as one block works on, into partial rows. By themselves they
add these up in a second launch; with ``partial_rows`` they leave them, and one call of ``column_sum`` adds up those of
a whole layer. The order of additions is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_train._library import define, reference
from ls_train.ops._arguments import ROW_BLOCKS, Arguments, check_kinds, statistics_dtype
from ls_train.ops._reference import store_gradient

define(
    "column_sum",
    "(Tensor(a!)[] gradients, Tensor[] partials, Tensor partial_rows, int[] sums, bool accumulate) -> ()",
)


def partial_row_counts(parts: int) -> Tensor:
    """Return int64 (parts,) in host memory, where operators write how many partial rows they have left."""
    return torch.empty(parts, dtype=torch.int64, device="cpu")


@reference("column_sum")
def _column_sum(
    gradients: Sequence[Tensor],
    partials: Sequence[Tensor],
    partial_rows: Tensor,
    sums: Sequence[int],
    accumulate: bool,
) -> None:
    """Add up partial rows.

    ``partials[i]`` holds ``sums[i]`` sums of ``partial_rows[i]`` rows, [sum][row][column], for the next ``sums[i]``
    of ``gradients``.
    """
    if not gradients:
        return
    arguments = Arguments("column_sum", "gradients", gradients[0], 1)
    arguments.tensor("partial_rows", partial_rows, (len(partials),), torch.int64)
    if len(sums) != len(partials):
        arguments.fail(ValueError, "sums", f"has length {len(sums)}; it needs one for each of {len(partials)} partials")
    if sum(sums) != len(gradients):
        arguments.fail(ValueError, "gradients", f"has {len(gradients)} tensors, but sums says {sum(sums)}")
    for i, gradient in enumerate(gradients):
        arguments.tensor("gradients", gradient, (gradient.numel(),))
        for other in gradients[:i]:
            if overlap(gradient, other):
                arguments.fail(
                    ValueError, "gradients", "overlap; add up those of one parameter in calls one after another"
                )
    begun = iter(gradients)
    for partial, rows, count in zip(partials, partial_rows.tolist(), sums, strict=True):
        if not 0 <= rows <= ROW_BLOCKS:
            arguments.fail(ValueError, "partial_rows", f"holds {rows}; it must be between 0 and {ROW_BLOCKS}")
        ended = [next(begun) for _ in range(count)]
        needed = rows * sum(gradient.numel() for gradient in ended)
        arguments.workspace(partial, needed, arguments.statistics, "partials")
        for gradient, part in zip(ended, partial.split([rows * g.numel() for g in ended] + [partial.numel() - needed])):
            store_gradient(gradient, part.view(rows, gradient.numel()).sum(0), accumulate)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors have memory in common."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


@check_kinds
def column_sum(partials: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sums over the rows of ``partials`` as (S, C) of ``dtype``.

    Args:
        partials: (S, R, C), contiguous, S sums of R rows each, R at most 264; of the type of sums, which is float32, or
            float64 for ``dtype`` float64.
        dtype: of the result.

    Raises:
        TypeError: ``dtype`` or that of ``partials`` does not fit.
        ValueError: ``partials`` has another number of dimensions, too many rows, or is not contiguous.
    """
    gradients = torch.empty(partials.shape[0], partials.shape[-1], dtype=dtype, device=partials.device)
    arguments = Arguments("column_sum", "partials", partials, 3)
    if partials.dtype != statistics_dtype(dtype):
        arguments.fail(TypeError, "partials", f"has dtype {partials.dtype}; convert it to {statistics_dtype(dtype)}")
    counts = partial_row_counts(1).fill_(partials.shape[1])
    torch.ops.ls_train.column_sum(gradients.unbind(0), [partials.view(-1)], counts, [partials.shape[0]], False)
    return gradients

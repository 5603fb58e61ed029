"""L2 norm of a flat gradient buffer and a flag for values that are not finite, in one pass.

Slot s of the buffer is elements ``segments[s]`` to ``segments[s + 1] - 1``; slots that are not active do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_train._library import define, reference
from ls_train.ops._arguments import Arguments, check_kinds

define(
    "grad_norm",
    "(Tensor(a!) norm, Tensor(b!) found_inf, Tensor(c!) workspace, Tensor grad, Tensor segments, Tensor? active) -> ()",
)

_BLOCKS = 1024


def grad_norm_workspace() -> int:
    """Return the number of float32 elements of scratch that ``grad_norm`` needs."""
    return 2 * _BLOCKS


@reference("grad_norm")
def _grad_norm(
    norm: Tensor, found_inf: Tensor, workspace: Tensor, grad: Tensor, segments: Tensor, active: Tensor | None
) -> None:
    arguments = _check_inputs(grad, segments, active)
    arguments.tensor("norm", norm, (1,), torch.float32)
    arguments.tensor("found_inf", found_inf, (1,), torch.float32)
    arguments.workspace(workspace, grad_norm_workspace())
    slots = [grad]
    if active is not None:
        slots = [s for s, on in zip(grad.split(segments.diff().tolist()), active.tolist(), strict=True) if on]
    norms = [torch.linalg.vector_norm(slot, dtype=torch.float64) for slot in slots]
    total = torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)
    norm.fill_(total)
    # In float64 the square of no finite gradient overflows: the norm is finite exactly when all elements are.
    finite = bool(total.isfinite()) if grad.dtype != torch.float64 else all(bool(s.isfinite().all()) for s in slots)
    found_inf.fill_(0.0 if finite else 1.0)


@check_kinds
def grad_norm(grad: Tensor, segments: Tensor, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (norm, found_inf), both float32 (1,): the L2 norm of ``grad`` and 1 if an element is not finite, else 0.

    Args:
        grad: (n,), contiguous.
        segments: int64 (S + 1,), ascending from 0 to n: where the slots begin and end.
        active: uint8 (S,), 1 for the slots that count, or None for all.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or memory layout does not fit.
    """
    _check_inputs(grad, segments, active)
    norm, found_inf = (grad.new_empty(1, dtype=torch.float32) for _ in range(2))
    workspace = grad.new_empty(grad_norm_workspace(), dtype=torch.float32)
    torch.ops.ls_train.grad_norm(norm, found_inf, workspace, grad, segments, active)
    return norm, found_inf


def _check_inputs(grad: Tensor, segments: Tensor, active: Tensor | None) -> Arguments:
    arguments = Arguments("grad_norm", "grad", grad, 1)
    arguments.tensor("segments", segments, (segments.numel(),), torch.int64)
    arguments.tensor("active", active, (segments.numel() - 1,), torch.uint8)
    return arguments

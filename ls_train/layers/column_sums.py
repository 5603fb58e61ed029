"""Column sums of one layer's backward, for the gradients of biases and of norms: one launch adds all of them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_train.memory import aligned
from ls_train.ops.column_sum import overlap, partial_row_counts

MAX_PARTS = 7
"""Operators with column sums in one backward: those of a pre-norm decoder layer."""


class ColumnSums:
    """Where the operators of a backward leave partial rows, until :meth:`finish` adds them up.

    Args:
        memory: scratch of the type of sums, large enough for the workspaces of all operators, each aligned.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0
        self._begun: dict[bool, _Begun] = {}  # by whether the sums are added to what the gradients hold

    def part(
        self, gradients: Sequence[Tensor | None], accumulate: bool, size: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return an operator's arguments ``workspace`` and ``partial_rows``.

        Args:
            gradients: what the operator's column sums are, (columns,) each; all None where none is wanted.
            accumulate: add to what they hold.
            size: elements of workspace that the operator needs.
        """
        if gradients[0] is None:
            return None, None
        if any(begun.holds(gradient) for begun in self._begun.values() for gradient in gradients):
            # Two places of the layer share a parameter.
            self.finish()
        workspace = self._memory[self._used : self._used + size]
        self._used += aligned_sums(size)
        if accumulate not in self._begun:
            self._begun[accumulate] = _Begun()
        return workspace, self._begun[accumulate].add(gradients, workspace)

    def finish(self) -> None:
        """Write the gradients that were begun, in one launch, or two where only some hold something already."""
        for accumulate, begun in self._begun.items():
            counts, sums = begun.counts[: len(begun.sums)], begun.sums
            torch.ops.ls_train.column_sum(begun.gradients, begun.workspaces, counts, sums, accumulate)
        self._begun = {}


class _Begun:
    """Sums that one launch adds up."""

    def __init__(self) -> None:
        self.counts = partial_row_counts(MAX_PARTS)
        self.gradients: list[Tensor] = []
        self.workspaces: list[Tensor] = []
        self.sums: list[int] = []

    def add(self, gradients: Sequence[Tensor], workspace: Tensor) -> Tensor:
        """Take another part and return where its number of partial rows goes."""
        part = len(self.sums)
        self.gradients += gradients
        self.workspaces.append(workspace)
        self.sums.append(len(gradients))
        return self.counts[part : part + 1]

    def holds(self, gradient: Tensor) -> bool:
        """Return whether ``gradient`` has memory in common with those that were taken."""
        return any(overlap(gradient, known) for known in self.gradients)


def aligned_sums(size: int) -> int:
    """Return ``size`` float32 elements rounded up to where the next workspace may begin."""
    return aligned(4 * size) // 4

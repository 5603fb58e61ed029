"""Sum of flat gradients over the ranks of a data-parallel run, in a few pieces while the backward is still running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ls_train.params import FlatBuffer, GradSlot

PIECES = 4
"""Into how many pieces a buffer is cut: enough for the last one to be short, few enough for full bandwidth."""


@dataclass
class _Piece:
    buffer: FlatBuffer
    first: int  # slots [first, end)
    end: int
    missing: int | None = None  # writes that are still to come in this backward; None: wait for its end
    sent: bool = field(default=False)

    @property
    def tensor(self) -> Tensor:
        return self.buffer.grad[self.buffer.begins[self.first] : self.buffer.begins[self.end]]


class FlatAllReduce:
    """Sums the gradients in flat buffers over all ranks.

    A piece is sent as soon as its last gradient is written. How often a backward writes each slot (a tied table has
    several writers) is learnt from the backward before, so the first one sends everything at its end. All ranks must
    run the same backward: the pieces go out in the order in which it completes them.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], group: Any = None, pieces: int = PIECES) -> None:
        """Cut ``buffers``; ``group`` is torch's process group, None for the default one."""
        self._group = group
        self._buffers = tuple(buffers)
        self._pieces = [piece for buffer in buffers for piece in _cut(buffer, pieces)]
        self._owner = {
            id(param): piece for piece in self._pieces for param in piece.buffer.params[piece.first : piece.end]
        }
        self._expected: Counter[int] | None = None  # writes of each parameter in a backward
        self._seen: Counter[int] = Counter()
        self._works: list[Any] = []

    def start(self) -> None:
        """Listen to the backward that comes next, the last one before the update."""
        self._seen.clear()
        for piece in self._pieces:
            piece.sent = False
            piece.missing = self._writes(piece)
        for buffer in self._buffers:
            buffer.listeners.append(self._written)

    def stop(self) -> None:
        """Listen no more, where the backward failed."""
        for buffer in self._buffers:
            if self._written in buffer.listeners:
                buffer.listeners.remove(self._written)

    def finish(self) -> None:
        """Send what is left once the backward is through; afterwards the device sees the sums."""
        self.stop()
        for buffer in self._buffers:
            buffer.collect_grads()
        for piece in self._pieces:
            if not piece.sent:
                self._send(piece)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._expected = self._seen.copy()

    def _writes(self, piece: _Piece) -> int | None:
        if self._expected is None:
            return None
        counts = [self._expected[id(param)] for param in piece.buffer.params[piece.first : piece.end]]
        # A gradient that autograd keeps enters the buffer at the end only.
        return sum(counts) if all(counts) else None

    def _written(self, slot: GradSlot) -> None:
        piece = self._owner[id(slot.param)]
        if piece.sent:
            raise RuntimeError(
                f"a gradient of shape {tuple(slot.tensor.shape)} was written after it was sent to the other ranks: "
                "this backward writes it more often than the one before; every update must run the same model"
            )
        self._seen[id(slot.param)] += 1
        if piece.missing is not None:
            piece.missing -= 1
            if piece.missing == 0:
                self._send(piece)

    def _send(self, piece: _Piece) -> None:
        piece.sent = True
        self._works.append(dist.all_reduce(piece.tensor, group=self._group, async_op=True))


def _cut(buffer: FlatBuffer, count: int) -> list[_Piece]:
    """Return pieces of whole slots with about the same number of elements."""
    pieces, first = [], 0
    for index in range(1, count + 1):
        goal = buffer.begins[-1] * index / count
        end = first
        while end < len(buffer.params) and (index == count or buffer.begins[end + 1] <= goal):
            end += 1
        if end > first:
            pieces.append(_Piece(buffer, first, end))
            first = end
    return pieces

"""Sum of flat gradients over the ranks of a data-parallel run, in a few pieces while the backward is still running.

With ``sharded`` each rank gets the sum of its own part of every piece only, updates that part of the parameters, and
the parts are gathered again: the same bytes travel, half of them behind the update and not behind the backward, and the
update is shorter by the number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ls_train.graph import Mark
from ls_train.optim.peer_exchange import PeerExchange, PeerTensor
from ls_train.params import FlatBuffer, GradSlot

PIECES = 6
"""Into how many pieces a buffer is cut: enough for the last one to be short, few enough for full bandwidth.

The last one to be complete in a translation model is the table of embeddings, with 6 a piece of its own.
"""

ALIGNMENT = 8  # elements: a rank's part of a piece begins at a multiple of 16 bytes

# torch 2.13 renamed both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Marks = dict[int, Mark]
"""Where in a captured backward pieces become ready, by number of the piece."""


@dataclass
class _Piece:
    number: int
    buffer: FlatBuffer
    first: int  # slots [first, end)
    end: int
    missing: int | None = None  # writes that are still to come in this backward; None: wait for its end
    is_ready: bool = field(default=False)
    is_closed: bool = field(default=False)  # sent or marked: a further write would be lost

    @property
    def elements(self) -> slice:
        return slice(self.buffer.begins[self.first], self.buffer.begins[self.end])

    @property
    def tensor(self) -> Tensor:
        return self.buffer.grad[self.elements]


class FlatAllReduce:
    """Sums the gradients in flat buffers over all ranks.

    A piece is sent once its last gradient is written and all pieces before it have left. How often a backward writes
    each slot (a tied table has several writers) is learnt from the backward before. The order of the pieces is the one
    in which the first rank's first backward completes them: until it is known everything leaves at the end. So ranks
    send in one order, whether they run a backward, capture it or replay it.

    In a captured backward a mark stands where a piece becomes ready, and after each replay the pieces are sent behind
    their marks.

    Attributes:
        is_sharded: whether each rank has the sums of its :meth:`parts` only.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        group: Any = None,
        pieces: int = PIECES,
        sharded: bool = False,
        gather_group: Any = None,
    ) -> None:
        """Cut ``buffers``.

        Args:
            buffers: of all ranks alike.
            group: torch's process group, None for the default one.
            pieces: into how many each buffer is cut, about.
            sharded: where all buffers can be divided among the ranks.
            gather_group: of the same ranks, for :meth:`gather`; None for ``group``.
        """
        self._group = group
        self._gather_group = group if gather_group is None else gather_group
        self._buffers = tuple(buffers)
        ranks = dist.get_world_size(group) if sharded else 1
        unit = ALIGNMENT * ranks if sharded else 1
        self.is_sharded = sharded and ranks > 1 and all(buffer.begins[-1] % unit == 0 for buffer in buffers)
        self._ranks, self._rank = (ranks, dist.get_rank(group)) if self.is_sharded else (1, 0)
        cuts = [(buffer, *cut) for buffer in buffers for cut in _cut(buffer, pieces, unit if self.is_sharded else 1)]
        self._pieces = [_Piece(number, *cut) for number, cut in enumerate(cuts)]
        self._owner = {
            id(param): piece for piece in self._pieces for param in piece.buffer.params[piece.first : piece.end]
        }
        self._expected: Counter[int] | None = None  # writes of each parameter in a backward
        self._seen: Counter[int] = Counter()
        self._completed: dict[int, None] = {}  # pieces by their last write in this backward
        self._first_order: list[int] | None = None  # this rank's own
        self._order: list[_Piece] | None = None  # that of all ranks
        self._sent = 0  # pieces in this order that have left
        self._is_last = False
        self._new_mark: Callable[[], Mark] | None = None
        self._marks: Marks = {}
        self._sums: dict[int, Any] = {}  # what is under way, by number of the piece
        self._gathers: list[Any] = []
        self._exchange: PeerExchange | None = None

    def connect(self, make: Callable[[int, torch.dtype], PeerTensor]) -> None:
        """Leave the exchange of gradients and parameters to copy engines instead of ``group``; ``is_sharded``.

        Args:
            make: makes tensors that all ranks can read, to which the buffers move.
        """
        largest = max(piece.tensor[self._own(slice(0, len(piece.tensor)))].nbytes for piece in self._pieces)
        self._exchange = PeerExchange(self._buffers, self._rank, self._ranks, largest, make)

    def start(self, is_last: bool = True, new_mark: Callable[[], Mark] | None = None) -> None:
        """Listen to the backward that comes next.

        Args:
            is_last: no other follows before the update, so that pieces may leave.
            new_mark: makes marks where this backward is being captured; then nothing leaves before :meth:`finish`.
        """
        self.stop()
        self._is_last, self._new_mark = is_last, new_mark
        self._seen.clear()
        self._completed.clear()
        self._marks = {}
        for piece in self._pieces:
            piece.is_ready = piece.is_closed = False
            piece.missing = self._writes(piece)
        for buffer in self._buffers:
            buffer.listeners.append(self._written)

    def stop(self) -> None:
        """Listen no more and begin again with the first piece."""
        self._sent = 0
        self._ignore()

    def end(self) -> Marks:
        """Note what the backward wrote; return its marks, none where it was not captured."""
        self._ignore()
        self._expected = self._seen.copy()
        if self._first_order is None:
            complete = [number for number in self._completed if self._writes(self._pieces[number])]
            rest = [piece.number for piece in self._pieces if piece.number not in complete]
            self._first_order = complete + rest
        return self._marks

    def finish(self, marks: Marks, wait: bool = True) -> None:
        """Send what is left once the last backward is enqueued; afterwards the device sees the sums of :meth:`parts`.

        Args:
            marks: those of this backward, where it was replayed.
            wait: False leaves it to :meth:`arrivals` to let the device wait.
        """
        for buffer in self._buffers:
            buffer.collect_grads()
        if self._order is None:
            self._order = self._agreed_order()
        for piece in self._order[self._sent :]:
            mark = marks.get(piece.number)
            with contextlib.nullcontext() if mark is None else mark.reached():
                self._send(piece)
        if wait:
            self.wait()
        self._sent = 0

    def parts(self, buffer: FlatBuffer) -> list[slice]:
        """Return the elements of ``buffer`` that this rank updates, one run a piece."""
        return [self._own(piece.elements) for piece in self._pieces_of(buffer)]

    def arrivals(self, buffer: FlatBuffer) -> Iterator[int]:
        """Yield the numbers of :meth:`parts` in the order they were sent, each when the device waits for its sums."""
        numbers = {piece.number: part for part, piece in enumerate(self._pieces_of(buffer))}
        for piece in self._order or self._pieces:
            if piece.number in numbers:
                if piece.number in self._sums:
                    self._sums.pop(piece.number).wait()
                yield numbers[piece.number]

    def gather(self, buffer: FlatBuffer, flat: Tensor, number: int) -> None:
        """Start to bring all ranks' parts of a piece of ``flat``, laid out as ``buffer``, together on each of them.

        Args:
            buffer: one of the buffers.
            flat: (n,) of any dtype; this rank's part is complete.
            number: of the piece among those of ``buffer``, in the order of :meth:`parts`.
        """
        piece = self._pieces_of(buffer)[number]
        elements = piece.elements
        if self._exchange is not None and flat is buffer.data:
            self._gathers.append(self._exchange.gather(buffer, piece.number, elements))
            return
        whole, own = flat[elements], flat[self._own(elements)]
        if flat.dtype == torch.int16:  # which no backend knows
            whole, own = whole.view(torch.uint8), own.view(torch.uint8)
        self._gathers.append(_all_gather(whole, own, group=self._gather_group, async_op=True))

    def wait(self) -> None:
        """Let the device go on when what was sent and gathered has arrived."""
        for work in (*self._sums.values(), *self._gathers):
            work.wait()
        self._sums.clear()
        self._gathers.clear()

    def _pieces_of(self, buffer: FlatBuffer) -> list[_Piece]:
        return [piece for piece in self._pieces if piece.buffer is buffer]

    def _own(self, elements: slice) -> slice:
        share = (elements.stop - elements.start) // self._ranks
        begin = elements.start + self._rank * share
        return slice(begin, begin + share)

    def _ignore(self) -> None:
        for buffer in self._buffers:
            if self._written in buffer.listeners:
                buffer.listeners.remove(self._written)

    def _agreed_order(self) -> list[_Piece]:
        """Return the first rank's order, for which the host waits once."""
        numbers = torch.tensor(self._first_order, device=self._buffers[0].data.device)
        dist.broadcast(numbers, group=self._group, group_src=0)
        return [self._pieces[number] for number in numbers.tolist()]

    def _writes(self, piece: _Piece) -> int | None:
        if self._expected is None:
            return None
        counts = [self._expected[id(param)] for param in piece.buffer.params[piece.first : piece.end]]
        # A gradient that autograd keeps enters the buffer at the end only.
        return sum(counts) if all(counts) else None

    def _written(self, slot: GradSlot) -> None:
        piece = self._owner[id(slot.param)]
        if piece.is_closed:
            raise RuntimeError(
                f"a gradient of shape {tuple(slot.tensor.shape)} was written after it was sent to the other ranks: "
                "this backward writes it more often than the one before; every update must run the same model"
            )
        self._seen[id(slot.param)] += 1
        self._completed.pop(piece.number, None)
        self._completed[piece.number] = None
        if piece.missing is not None:
            piece.missing -= 1
            if piece.missing == 0:
                self._complete(piece)

    def _complete(self, piece: _Piece) -> None:
        piece.is_ready = True
        if self._new_mark is not None:
            piece.is_closed = True
            mark = self._marks[piece.number] = self._new_mark()
            mark.record()
        elif self._is_last and self._order is not None:
            while self._sent < len(self._order) and self._order[self._sent].is_ready:
                self._send(self._order[self._sent])
                self._sent += 1

    def _send(self, piece: _Piece) -> None:
        piece.is_closed = True
        if self._exchange is not None:
            work = self._exchange.sum(piece.buffer, piece.number, piece.elements)
        elif self.is_sharded:
            own = piece.buffer.grad[self._own(piece.elements)]
            work = _reduce_scatter(own, piece.tensor, group=self._group, async_op=True)
        else:
            work = dist.all_reduce(piece.tensor, group=self._group, async_op=True)
        self._sums[piece.number] = work


def _cut(buffer: FlatBuffer, count: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return pieces [first, end) of whole slots, which end where it is nearest to equal parts of the elements.

    So a slot that is larger than a part, as a table of embeddings is, makes a piece of its own. Each piece has a
    multiple of ``unit`` elements; the whole buffer has.
    """
    begins = np.asarray(buffer.begins)
    cuts = np.flatnonzero(begins % unit == 0)
    goals = begins[-1] * np.arange(1, count + 1) / count
    ends = np.unique(cuts[np.abs(begins[cuts][:, None] - goals).argmin(0)])
    ends = [0, *ends[(ends > 0) & (ends < len(buffer.params))].tolist(), len(buffer.params)]
    return list(itertools.pairwise(ends))

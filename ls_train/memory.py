"""Memory of the layers: the block a layer saves for its backward, and the shared workspace.

Everything comes from torch's caching allocator. A layer call allocates its output and one saved block; all other
intermediates live in the workspace of the device and stream it runs on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace, TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes to which every tensor inside a block or workspace is aligned (16 would do for vector loads)."""


class Field(NamedTuple):
    """One tensor of a saved block: (rows, columns) of the activation type, or of statistics type.

    ``columns`` 0 means one number a row, shape (rows,).
    """

    name: str
    columns: int
    statistics: bool = False


def aligned(size: int) -> int:
    """Return ``size`` bytes rounded up to the alignment of tensors inside a block or workspace."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def round_size(size: int) -> int:
    """Return ``size`` bytes rounded up by at most 1/16, so that batches of similar size ask for equal blocks."""
    step = max(512, 1 << max(0, size.bit_length() - 5))
    return -(-size // step) * step


class SavedBlock:
    """Layout of the one tensor a layer saves for its backward.

    Args:
        fields: the tensors in it.
        rows: number of rows N of each.
        dtype: type of activations; statistics are float32 (float64 for float64).

    Attributes:
        size: bytes of the block.
    """

    def __init__(self, fields: Sequence[Field], rows: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._statistics = torch.promote_types(dtype, torch.float32)
        self._views: list[tuple[str, bool, tuple[int, ...], tuple[int, ...], int]] = []
        start = 0
        for name, columns, statistics in fields:
            itemsize = (self._statistics if statistics else dtype).itemsize
            shape, strides = ((rows, columns), (columns, 1)) if columns else ((rows,), (1,))
            self._views.append((name, statistics, shape, strides, start // itemsize))
            start += aligned(rows * max(1, columns) * itemsize)
        self.size = round_size(start)

    def allocate(self, like: Tensor) -> Tensor:
        """Return an uninitialised block, 1-D of the activation type, on the device of ``like``."""
        return like.new_empty(self.size // self._dtype.itemsize)

    def views(self, block: Tensor) -> SimpleNamespace:
        """Return the tensors inside ``block`` as attributes named after the fields."""
        statistics_block = block.view(self._statistics)
        begin, statistics_begin = block.storage_offset(), statistics_block.storage_offset()
        views = SimpleNamespace()
        for name, statistics, shape, strides, offset in self._views:
            if statistics:
                view = statistics_block.as_strided(shape, strides, statistics_begin + offset)
            else:
                view = block.as_strided(shape, strides, begin + offset)
            setattr(views, name, view)
        return views


class Workspace:
    """Scratch memory that grows when a call needs more and never shrinks; used as a stack.

    Use as a context manager: what was taken inside is given back at the end. Tensors from it must not outlive the
    call that took them.

    Attributes:
        retain: keep outgrown storage alive. Set once a CUDA graph was captured, which goes on writing to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.retain = False
        self._storage = torch.empty(0, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._used = 0
        self._marks: list[int] = []

    def __enter__(self) -> Workspace:
        self._marks.append(self._used)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._used = self._marks.pop()

    @property
    def capacity(self) -> int:
        """Bytes held."""
        return self._storage.numel()

    def reserve(self, size: int) -> None:
        """Grow so that ``size`` more bytes can be taken."""
        size += self._used
        if size <= self.capacity:
            return
        if self.retain:
            self._outgrown.append(self._storage)
        # A first call in inference mode must not make it unusable for training.
        with torch.inference_mode(False):
            self._storage = torch.empty(round_size(size), dtype=torch.uint8, device=self._storage.device)
        self._typed = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor; it is valid until the innermost ``with`` block ends."""
        count = math.prod(shape)
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * shape[i]
        size = aligned(count * dtype.itemsize)
        self.reserve(size)
        start = self._used
        self._used = start + size
        base = self._typed.get(dtype)
        if base is None:
            with torch.inference_mode(False):
                base = self._typed[dtype] = self._storage.view(dtype)
        return base.as_strided(shape, strides, start // dtype.itemsize)


_by_stream: dict[tuple[torch.device, int], Workspace] = {}
_by_thread = threading.local()


def workspace(like: Tensor, size: int = 0) -> Workspace:
    """Return the workspace of the device of ``like`` and its current stream (its current thread on a CPU).

    Work of one stream is ordered, so that all layers, forward and backward, may share one.

    Args:
        like: any tensor on the device.
        size: bytes the caller is going to take, so that the workspace grows at most once.
    """
    device = like.device
    if device.type == "cuda":
        key, spaces = (device, torch.cuda.current_stream(device).cuda_stream), _by_stream
    else:
        key, spaces = device, _by_thread.__dict__
    space = spaces.get(key)
    if space is None:
        space = spaces[key] = Workspace(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        space.retain = True
    space.reserve(size)
    return space

"""Memory of the layers: the block a layer saves for its backward, and the shared workspace.

Everything comes from torch's caching allocator. A layer call allocates its output and one saved block; all other
intermediates live in the workspace of the device and stream it runs on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes to which every tensor inside a block or workspace is aligned (16 would do for vector loads)."""

_REMEMBERED = 1024  # tensors of one workspace


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
        kinds: dict[tuple[int, bool], list[str]] = {}
        for name, columns, statistics in fields:
            kinds.setdefault((columns, statistics), []).append(name)
        # Equal fields lie at equal distances, so that two calls give the views of all of them.
        self._views: list[tuple[list[str], bool, tuple[int, ...], tuple[int, ...], int]] = []
        self._begins: dict[str, int] = {}
        start = 0
        for (columns, statistics), names in kinds.items():
            itemsize = (self._statistics if statistics else dtype).itemsize
            shape, strides = ((rows, columns), (columns, 1)) if columns else ((rows,), (1,))
            size = aligned(rows * max(1, columns) * itemsize)
            if len(names) > 1:
                shape, strides = (len(names), *shape), (size // itemsize, *strides)
            self._views.append((names, statistics, shape, strides, start // itemsize))
            for name in names:
                self._begins[name] = start
                start += size
        self.size = round_size(start)

    def allocate(self, like: Tensor) -> Tensor:
        """Return an uninitialised block, 1-D of the activation type, on the device of ``like``."""
        return like.new_empty(self.size // self._dtype.itemsize)

    def begins(self, names: Sequence[str]) -> list[int]:
        """Return the byte at which each of the tensors ``names`` begins, -1 for one that is not in the block."""
        return [self._begins.get(name, -1) for name in names]

    def views(self, block: Tensor) -> SimpleNamespace:
        """Return the tensors inside ``block`` as attributes named after the fields."""
        statistics_block = block.view(self._statistics)
        begin, statistics_begin = block.storage_offset(), statistics_block.storage_offset()
        views: dict[str, Tensor] = {}
        for names, statistics, shape, strides, offset in self._views:
            if statistics:
                view = statistics_block.as_strided(shape, strides, statistics_begin + offset)
            else:
                view = block.as_strided(shape, strides, begin + offset)
            views.update(zip(names, (view,) if len(names) == 1 else view.unbind(0), strict=True))
        return SimpleNamespace(**views)


def kept(views: SimpleNamespace) -> SimpleNamespace | None:
    """Return ``views`` of a block for the backward to use again, or None while hooks on saved tensors are active.

    Such hooks may move the block somewhere else, and views would keep it where it is. The backward must let go of the
    views, so that the block is freed when autograd drops it.
    """
    return views if _saved_tensors_hooks(False) is None else None


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Workspace:
    """Scratch memory that grows when a call needs more and never shrinks; used as a stack.

    Use as a context manager: what was taken inside is given back at the end. Tensors from it must not outlive the
    call that took them. Layers of one shape take the same tensors, which are therefore remembered.

    Attributes:
        retain: keep outgrown storage alive. Set once a CUDA graph was captured, which goes on writing to it.
        in_capture: storage that is allocated now belongs to the pool of a graph, which keeps the memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.retain = False
        self.in_capture = False
        self._pooled = False
        self._storage = torch.empty(0, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._taken: dict[tuple[int, Sequence[int], torch.dtype], tuple[Tensor, int]] = {}
        self._spare: dict[tuple[int, tuple[int, ...], torch.dtype], Sequence[Tensor]] = {}
        self._views: dict[tuple[Any, ...], Any] = {}
        self._known: set[int] = set()
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
    def in_use(self) -> bool:
        """Whether a call holds tensors of it."""
        return bool(self._marks)

    @property
    def capacity(self) -> int:
        """Bytes held."""
        return self._storage.numel()

    def reserve(self, size: int) -> None:
        """Grow so that ``size`` more bytes can be taken."""
        size += self._used
        if size <= self.capacity:
            return
        if self.retain and not self._pooled:
            self._outgrown.append(self._storage)
        # A first call in inference mode must not make it unusable for training.
        with torch.inference_mode(False):
            # The old storage goes first, unless somebody uses it.
            self._storage = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
            self._forget()
            self._storage = torch.empty(round_size(size), dtype=torch.uint8, device=self._storage.device)
        self._pooled = self.in_capture

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor; it is valid until the innermost ``with`` block ends."""
        key = (self._used, shape, dtype)
        known = self._taken.get(key)
        if known is not None:
            tensor, self._used = known
            return tensor
        count = math.prod(shape)
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * shape[i]
        size = aligned(count * dtype.itemsize)
        self.reserve(size)
        start = self._used
        self._used = start + size
        if len(self._taken) >= _REMEMBERED:
            self._forget()
        with torch.inference_mode(False):
            base = self._typed.get(dtype)
            if base is None:
                base = self._typed[dtype] = self._storage.view(dtype)
            tensor = base.as_strided(shape, strides, start // dtype.itemsize)
        self._taken[key] = tensor, self._used
        self._known.add(id(tensor))
        return tensor

    def spare(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return uninitialised tensors of ``sizes`` bytes, one after another, of which none is taken."""
        key = (self._used, sizes, dtype)
        tensors = self._spare.get(key)
        if tensors is None:
            with self:
                self.reserve(sum(map(aligned, sizes)))
                tensors = [self.take((size // dtype.itemsize,), dtype) for size in sizes]
            self._spare[key] = tensors
        return tensors

    def view(self, tensor: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(tensor, *arguments)``, views of ``tensor``; remembered where :meth:`take` gave it."""
        if id(tensor) not in self._known:
            return function(tensor, *arguments)
        key = (id(tensor), function, *arguments)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):
                views = self._views[key] = function(tensor, *arguments)
        return views

    def _forget(self) -> None:
        """Drop all tensors that are remembered; those in use stay valid."""
        self._typed, self._taken, self._spare, self._views, self._known = {}, {}, {}, {}, set()


def release_workspaces() -> None:
    """Free the scratch memory of all streams that is not in use and that no CUDA graph writes to.

    Call it where a stream will not be used again, for example after warming up for a graph.
    """
    for spaces in (_by_stream, _by_thread.__dict__):
        for key, space in list(spaces.items()):
            if not space.retain and not space.in_use:
                del spaces[key]


def forget_workspace(stream: torch.cuda.Stream) -> None:
    """Let go of the scratch memory of a stream; graphs that were captured with it keep it, as part of their pool."""
    _by_stream.pop((stream.device, stream.cuda_stream), None)


def _current_stream(device: torch.device) -> int:
    """Return the handle of the current stream; a Python object for it would cost several microseconds a call."""
    if _RAW_STREAM is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _RAW_STREAM(device.index)


# Not public, but used by the code that torch.compile generates.
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_by_stream: dict[tuple[torch.device, int], Workspace] = {}
_by_thread = threading.local()


def workspace(like: Tensor, size: int = 0) -> Workspace:
    """Return the workspace of the device of ``like`` and its current stream (its current thread on a CPU).

    Work of one stream is ordered, so that all layers, forward and backward, may share one.

    Args:
        like: any tensor on the device.
        size: bytes the caller is going to take, so that the workspace grows at most once.
    """
    space = _current_workspace(like)
    space.reserve(size)
    return space


def spare(like: Tensor, *sizes: int) -> Sequence[Tensor]:
    """Return tensors of ``sizes`` bytes and the type of ``like`` from the workspace, for one operator call.

    They are not held: whoever takes something next gets the same memory.
    """
    return _current_workspace(like).spare(sizes, like.dtype)


def _current_workspace(like: Tensor) -> Workspace:
    device, on_gpu = like.device, like.is_cuda
    if on_gpu:
        key, spaces = (device, _current_stream(device)), _by_stream
    else:
        key, spaces = device, _by_thread.__dict__
    space = spaces.get(key)
    if space is None:
        space = spaces[key] = Workspace(device)
    if on_gpu:
        space.in_capture = torch.cuda.is_current_stream_capturing()
        space.retain |= space.in_capture
    return space

"""Exchange of gradients and parameters among GPUs of one host by their copy engines.

NCCL's kernels take multiprocessors from the backward and from Adam, which run beside them; copy engines take none. They
reach the memory of the other GPUs where torch's symmetric memory maps it. What is read there is complete once the rank
it belongs to has signalled so.

Nothing is overwritten that a rank still reads. It signals that a part of its parameters is up to date when it has
summed that part of the gradients, and a rank begins its next backward when it has all parts; it signals that gradients
are complete when it has the parameters of the update before, and a rank updates a part when it has all gradients of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ls_train.params import FlatBuffer

_LIMIT_MS = 30 * 60 * 1000
"""How long the device waits for a signal before its context fails.

Longer than NCCL's watchdog, which ends the process after 10 minutes by default and says what it waited for: each update
sums statistics through NCCL behind its signals. It ends what is stuck where that watchdog is off.
"""

_TRIAL = 1024
"""Elements of the tensor by which ranks find out whether they read one another's memory right."""

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

_alive: weakref.WeakSet[SymmetricTensor] = weakref.WeakSet()


class PeerTensor(Protocol):
    """A tensor of each rank that all ranks can read.

    Attributes:
        copies: each rank's tensor, by rank.
    """

    copies: Sequence[Tensor]

    def signal(self, rank: int, channel: int) -> None:
        """Tell ``rank`` that what was enqueued before is done."""
        ...

    def wait(self, rank: int, channel: int) -> None:
        """Let the device wait for the signal of ``rank``; each is waited for once."""
        ...


class SymmetricTensor:
    """A :class:`PeerTensor` in torch's symmetric memory."""

    def __init__(self, count: int, dtype: torch.dtype, group: Any) -> None:
        """Make a tensor (count,) on the current GPU; called by all ranks of ``group`` in one order."""
        own = _symmetric(count, dtype)
        # torch leaves zeroing the flags to the device: signals that came before that would be lost.
        torch.cuda.synchronize()
        self._handle = _symmetric_memory().rendezvous(own, group.group_name)
        self.copies = [self._handle.get_buffer(rank, (count,), dtype) for rank in range(dist.get_world_size(group))]
        self.copies[dist.get_rank(group)] = own  # whose views keep the memory, as those of the others do not
        self.nbytes = own.nbytes
        _alive.add(self)

    def signal(self, rank: int, channel: int) -> None:
        """Tell ``rank``, see :class:`PeerTensor`."""
        self._handle.put_signal(rank, channel, _LIMIT_MS)

    def wait(self, rank: int, channel: int) -> None:
        """Wait for ``rank``, see :class:`PeerTensor`."""
        self._handle.wait_signal(rank, channel, _LIMIT_MS)


def _symmetric_memory() -> Any:
    # Imported where it is needed: torch builds without CUDA or for other systems lack parts of it.
    return importlib.import_module("torch.distributed._symmetric_memory")


def _symmetric(count: int, dtype: torch.dtype) -> Tensor:
    return _symmetric_memory().empty(count, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))


def symmetric_bytes() -> int:
    """Return the bytes of this process's symmetric tensors, which torch's statistics of its memory leave out."""
    return sum(tensor.nbytes for tensor in _alive)


@functools.cache  # one answer for every optimiser of a run
def peer_obstacle(group: Any) -> str | None:
    """Return what keeps the ranks of ``group`` from reading one another's memory, None where they do.

    All ranks call it and get the same answer, that of the first one that has any.
    """
    if dist.get_backend(group) != "nccl":
        return f"the backend is {dist.get_backend(group)}"
    for find in (_obstacle_between_places, _obstacle_to_allocation, _obstacle_to_reading):
        found = next(filter(None, _of_all_ranks(find(group), group)), None)
        if found is not None:
            return found
    return None


def _of_all_ranks(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _obstacle_between_places(group: Any) -> str | None:
    own = torch.cuda.current_device()
    boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name
    host = socket.gethostname(), boot.read_text() if boot.exists() else ""
    places = _of_all_ranks((host, own), group)
    if any(other != host for other, _ in places):
        return "the ranks are on several hosts"
    devices = [device for _, device in places]
    # Where each rank sees its own GPU alone, all of them have the same number.
    if len(set(devices)) < len(devices) or max(devices) >= torch.cuda.device_count():
        return "a rank does not see the GPUs of the others"
    for device in devices:
        if device != own and not _has_native_atomics(own, device):
            return f"GPU {own} has no atomic access to the memory of GPU {device}"
    return None


def _has_native_atomics(device: int, peer: int) -> bool:
    """Return whether ``device`` reaches ``peer`` with atomic operations, of which signals are made: NVLink does."""
    if not torch.cuda.can_device_access_peer(device, peer):
        return False
    try:
        query = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return False
    found = ctypes.c_int()
    return query(ctypes.byref(found), _NATIVE_ATOMICS, device, peer) == 0 and found.value == 1


def _obstacle_to_allocation(group: Any) -> str | None:
    # Apart from what ranks do together: one that fails there leaves the others waiting.
    try:
        _symmetric(_TRIAL, torch.int32)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        return _reason(error)
    return None


def _obstacle_to_reading(group: Any) -> str | None:
    own = dist.get_rank(group)
    try:
        trial = SymmetricTensor(_TRIAL, torch.int32, group)
        trial.copies[own].fill_(own)
        others = [rank for rank in range(len(trial.copies)) if rank != own]
        for rank in others:
            trial.signal(rank, 0)
        for rank in others:
            trial.wait(rank, 0)
        arrived = [torch.empty_like(trial.copies[own]).copy_(trial.copies[rank]) for rank in others]
        if any(bool((values != rank).any()) for rank, values in zip(others, arrived, strict=True)):
            return f"GPU {torch.cuda.current_device()} reads wrong values from another one"
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    return f"torch's symmetric memory does not work here: {(str(error) or repr(error)).splitlines()[0]}"


class Arrival:
    """Something under way."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the device go on when it has arrived."""
        if self._event is not None:
            self._event.wait()


class PeerExchange:
    """Sums and gathers the ranks' parts of flat buffers, see :class:`ls_train.optim.all_reduce.FlatAllReduce`.

    Every rank calls :meth:`sum` and :meth:`gather` in one order, alternately for each piece of a buffer.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        rank: int,
        ranks: int,
        largest: int,
        make: Callable[[int, torch.dtype], PeerTensor],
    ) -> None:
        """Move ``buffers`` to memory that all ranks can read.

        Args:
            buffers: of all ranks alike; they hold no gradients.
            rank: this one.
            ranks: their number.
            largest: bytes of the largest part that is summed.
            make: makes tensors (count,) of a dtype on all ranks.
        """
        self._rank, self._ranks = rank, ranks
        self._others = [(rank + step) % ranks for step in range(1, ranks)]
        self._tensors: dict[int, tuple[PeerTensor, PeerTensor]] = {}
        for buffer in buffers:
            data, grad = (make(buffer.begins[-1], buffer.data.dtype) for _ in range(2))
            buffer.move(data.copies[rank], grad.copies[rank])
            self._tensors[id(buffer)] = data, grad
        device = buffers[0].data.device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._arrived = torch.empty(largest, dtype=torch.uint8, device=device)

    def sum(self, buffer: FlatBuffer, channel: int, elements: slice) -> Arrival:
        """Add the other ranks' gradients to this rank's part of ``elements``, its share of them by rank.

        Args:
            buffer: one of the buffers, its gradients in ``elements`` complete.
            channel: number of the piece that ``elements`` are.
            elements: a multiple of the number of ranks.
        """
        grad = self._tensors[id(buffer)][1]
        own = self._part(elements, self._rank)
        target = buffer.grad[own]
        arrived = self._arrived[: target.nbytes].view(target.dtype)
        with self._beside():
            for rank in self._others:
                grad.signal(rank, channel)
            for rank in self._others:
                grad.wait(rank, channel)
                arrived.copy_(grad.copies[rank][own])
                target.add_(arrived)
            return self._arrival()

    def gather(self, buffer: FlatBuffer, channel: int, elements: slice) -> Arrival:
        """Bring the other ranks' parts of the parameters in ``elements`` here; arguments as for :meth:`sum`."""
        data = self._tensors[id(buffer)][0]
        with self._beside():
            for rank in self._others:
                data.signal(rank, channel)
            for rank in self._others:
                data.wait(rank, channel)
                part = self._part(elements, rank)
                buffer.data[part].copy_(data.copies[rank][part])
            return self._arrival()

    def _part(self, elements: slice, rank: int) -> slice:
        share = (elements.stop - elements.start) // self._ranks
        begin = elements.start + rank * share
        return slice(begin, begin + share)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _arrival(self) -> Arrival:
        return Arrival(None if self._stream is None else self._stream.record_event())

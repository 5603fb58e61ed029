"""Training batches on their way from the data loader's workers, at little cost to the process that trains.

Of an eager step on small batches the host's time is the run's time, and the threads of the training process that
receive batches take the interpreter's lock away from it. torch sends each tensor as a file descriptor, through a
socket of its own and with a handshake, and pins each: 2.5 ms a batch of translation. Here the numbers of a batch travel
inside the message, are not pinned, as the plugin's step reads them on the host, and are packed before.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fairseq_plugin.packed import INPUTS, HostBatch, pack_on_host

_LARGEST = 1 << 20  # bytes of a tensor that is worth copying into a message and out of it again


class LoadedBatch(dict):
    """A batch as fairseq collated it in a worker of the data loader.

    Attributes:
        packed: the same packed, or None.
    """

    packed: HostBatch | None = None

    def pin_memory(self) -> LoadedBatch:
        """Return the batch as it is: torch's data loader asks for this instead of pinning each tensor."""
        return self


class Collate:
    """fairseq's collate function; what it returns in a worker process arrives as a :class:`LoadedBatch`.

    Args:
        collate: fairseq's.
        packing: padding index and ignored prefix to pack batches with, or None to leave that to the training process.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], Any], packing: tuple[int, int] | None) -> None:
        self.collate = collate
        self.packing = packing

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of ``samples``."""
        batch = self.collate(samples)
        if get_worker_info() is None or type(batch) is not dict or not batch:
            return batch
        _end_with_parent()
        batch = LoadedBatch(batch)
        # The step refuses other batches itself.
        if self.packing is not None and "target" in batch and INPUTS.issuperset(batch.get("net_input", (None,))):
            batch.packed = pack_on_host(batch, *self.packing)
        return _Message(batch)


def send_whole(iterator: Any, packing: tuple[int, int] | None) -> None:
    """Let the workers of fairseq's EpochBatchIterator send :class:`LoadedBatch`; a second call only sets ``packing``.

    Args:
        iterator: over a training set.
        packing: see :class:`Collate`.
    """
    collate = getattr(iterator, "collate_fn", None)
    if collate is not None:
        iterator.collate_fn = Collate(collate.collate if isinstance(collate, Collate) else collate, packing)


def _leave_where_nobody_reads() -> None:
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)


@functools.cache
def _end_with_parent() -> None:
    """Let this worker end where the training process was killed, though what it has to say does not fit the pipe."""
    Finalize(None, _leave_where_nobody_reads, exitpriority=100)  # before queues wait for their last message


class _Pickler(ForkingPickler):
    """torch's pickler for other processes, but small tensors go into the message itself."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value):
            return _tensor, (value.dtype, tuple(value.shape), bytearray(value.reshape(-1).view(torch.uint8).numpy()))
        return NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and tensor.nbytes <= _LARGEST
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


class _Message:
    """A batch on its way, written where it is collated.

    What cannot be written is an error there. torch's queue writes in a thread of its own, which prints the error and
    drops the batch, for which the run then waits forever.
    """

    def __init__(self, batch: LoadedBatch) -> None:
        message = BytesIO()
        _Pickler(message, pickle.HIGHEST_PROTOCOL).dump((dict(batch), batch.packed))
        self._content = message.getvalue()

    def __reduce__(self) -> tuple[Callable[[bytes], LoadedBatch], tuple[bytes]]:
        return _load, (self._content,)


def _load(message: bytes) -> LoadedBatch:
    content, packed = pickle.loads(message)
    batch = LoadedBatch(content)
    batch.packed = packed
    return batch

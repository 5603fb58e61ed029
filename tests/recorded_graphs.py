"""Graphs for a machine without a GPU: the operators of a call are recorded and run again on the same tensors.

As with CUDA graphs nothing of Python runs in a replay: numbers, branches and memory are those of the recorded call.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor.untyped_storage().data_ptr() not in known for tensor in _tensors(outputs)]
        self.calls.append((function, args, kwargs, outputs, fresh))
        return outputs

    def replay(self):
        for function, args, kwargs, outputs, fresh in self.calls:
            again = function(*args, **kwargs)
            for old, new, is_fresh in zip(_tensors(outputs), _tensors(again), fresh, strict=True):
                if is_fresh:
                    old.copy_(new)


class _Passed:
    """A mark on a CPU: a replay is through when it returns, and with it all of its marks are reached."""

    def record(self) -> None:
        pass

    def reached(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class RecordedGraphs:
    """Stands in for :class:`ls_train.graph.CudaGraphs`; a captured call has run, so its first replay does nothing.

    Attributes:
        fail: an error that the next capture ends with, after the call.
        marks: number of marks made.
    """

    def __init__(self):
        self.fail = None
        self.released = self.renewed = self.marks = 0

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        with _Recorder() as recorder:
            outputs = function()
        pending = [True]

        def replay():
            if pending:
                pending.clear()
            else:
                with torch.no_grad():
                    recorder.replay()

        return replay, outputs

    def mark(self) -> _Passed:
        self.marks += 1
        return _Passed()

    def release(self) -> None:
        self.released += 1

    def renew(self) -> None:
        self.renewed += 1

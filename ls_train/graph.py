"""Work that is repeated with the same shapes, captured as CUDA graphs and replayed.

A replay runs the same kernels on the same memory: what changes from call to call must lie in device memory that the
captured function reads, and its results must be used before the next call.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ls_train.memory import forget_workspace, release_workspaces

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

LIMIT = 128
"""Graphs kept by default."""
_FAILURES = 3  # captures that may fail one after another


def level(count: int, bits: int, smallest: int) -> int:
    """Return ``count`` rounded up to a number with ``bits`` significant bits after the first, at least ``smallest``."""
    step = max(1 << max(0, count.bit_length() - 1 - bits), smallest)
    return max(smallest, -(-count // step) * step)


class Mark(Protocol):
    """A place in a captured call that other work of the device can wait for, instead of the end of the call."""

    def record(self) -> None:
        """Put the mark here: to be called once, in the captured function."""
        ...

    def reached(self) -> contextlib.AbstractContextManager[None]:
        """Let what is enqueued inside wait for the mark of the latest replay alone; it runs beside that replay."""
        ...


class Graphs(Protocol):
    """What captures and replays: :class:`CudaGraphs`, or a stand-in on a machine without a GPU."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays ``function``, and what the captured call returned; nothing has run yet."""
        ...

    def mark(self) -> Mark:
        """Return a mark for a function that is being captured."""
        ...

    def release(self) -> None:
        """Give back memory that eager calls left behind."""
        ...

    def renew(self) -> None:
        """Use other memory from now on: what was captured so far is not replayed any more."""
        ...


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # External: a node of the graph, which records the event anew in every replay.
        self._event = torch.cuda.Event(external=True)
        self._stream = stream

    def record(self) -> None:
        self._event.record()

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._event.wait()
            yield


class CudaGraphs:
    """CUDA graphs of one device in one memory pool: they run one after another and may use the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture ``function`` on a stream of its own, see :class:`Graphs`.

        Raises:
            RuntimeError: the device refused something that ``function`` did.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads, the data loader's for example, may go on allocating.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # invalid by what happened before, which says more
                    graph.capture_end()
                # Where that failed, torch takes the old pool for one that is still being captured into.
                self.renew()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, outputs

    def mark(self) -> Mark:
        """Return a mark, see :class:`Graphs`; whatever waits for marks is on one stream."""
        return _CudaMark(self._beside)

    def release(self) -> None:
        """Free scratch memory and cached blocks, which the graphs' pool cannot use."""
        release_workspaces()
        torch.cuda.empty_cache()

    def renew(self) -> None:
        """Take a new pool; the old one goes with the last graph in it, and with it the scratch memory of its graphs."""
        forget_workspace(self._stream)
        self._pool = torch.cuda.graph_pool_handle()


class _Captured(NamedTuple):
    replay: Callable[[], None]
    outputs: Any
    gradients: list[tuple[Tensor, Tensor]]


class CapturedCalls:
    """Functions captured as graphs, by kind and shape; the least recently used ones are dropped.

    The first call of each kind runs eagerly: it loads kernels and makes whatever lives longer than a call. Afterwards a
    shape is captured when it comes first, which costs little more than running it. Once ``limit`` graphs are there a
    new shape runs eagerly the first time.

    Where a parameter or buffer of ``model`` was moved or replaced, all graphs are dropped.

    Attributes:
        captures: number of graphs captured so far.
        calls: number of calls so far.
        replays: number of calls that replayed a graph.
        seconds: time the captures took on the host.
        new_mark: while a function is captured, what makes marks for it; otherwise None.
        has_leftovers: whether work outside the graphs left memory behind, which is given back before the next replay.
    """

    def __init__(self, graphs: Graphs, model: torch.nn.Module | None = None, limit: int = LIMIT) -> None:
        """Prepare for functions that read ``model``; keep ``limit`` graphs."""
        self.captures = self.calls = self.replays = 0
        self.seconds = 0.0
        self._graphs = graphs
        self._limit = limit
        modules = [] if model is None else list(model.modules())
        self._homes = [home for module in modules for home in (module._parameters, module._buffers) if home]
        self._pointers = self._current_pointers()
        self._warm: set[Hashable] = set()
        self._seen: Counter[Hashable] = Counter()
        self._captured: OrderedDict[tuple[Hashable, Shape], _Captured] = OrderedDict()
        self._failures = 0
        self.has_leftovers = False
        self.new_mark: Callable[[], Mark] | None = None

    def __call__(
        self, kind: Hashable, shape: Shape, function: Callable[[], Any], parameters: Iterable[Tensor] = ()
    ) -> Any:
        """Return what ``function`` returns, from a graph where there is one.

        Args:
            kind: of the function.
            shape: calls of one kind and shape launch the same kernels on the same memory.
            function: work on the device; it must not wait for it.
            parameters: those whose ``.grad`` the caller uses: it is as ``function`` leaves it.
        """
        self.calls += 1
        self._check_memory()
        captured = self._captured.get((kind, shape))
        if captured is None and self._may_capture(kind, shape):
            captured = self._capture(kind, shape, function, list(parameters))
        if captured is None:
            self.has_leftovers = True
            return function()
        self._tidy()
        self._captured.move_to_end((kind, shape))
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        captured.replay()
        self.replays += 1
        return captured.outputs

    def has_graph(self, kind: Hashable, shape: Shape) -> bool:
        """Return whether calls of this kind and shape are replayed."""
        return (kind, shape) in self._captured

    def summary(self) -> str:
        """Return numbers of graphs, capture time and share of replayed calls, to be logged."""
        share = self.replays / max(1, self.calls)
        return (
            f"CUDA graphs: {self.captures} captured in {self.seconds:.1f} s, {len(self._captured)} kept, "
            f"{share:.1%} of {self.calls} calls replayed"
        )

    def _may_capture(self, kind: Hashable, shape: Shape) -> bool:
        self._seen[kind, shape] += 1
        if kind not in self._warm:
            self._warm.add(kind)
            return False
        return self._failures < _FAILURES and (len(self._captured) < self._limit or self._seen[kind, shape] > 1)

    def _capture(
        self, kind: Hashable, shape: Shape, function: Callable[[], Any], parameters: Sequence[Tensor]
    ) -> _Captured | None:
        self._tidy()
        before = [parameter.grad for parameter in parameters]
        start = time.perf_counter()
        self.new_mark = self._graphs.mark
        try:
            replay, outputs = self._graphs.capture(function)
        except RuntimeError as error:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            if isinstance(error, torch.OutOfMemoryError):
                self.clear()
                raise
            self._failures += 1
            plan = "no more graphs" if self._failures == _FAILURES else "this call runs eagerly"
            logger.warning(f"a CUDA graph could not be captured, {plan}: {str(error).strip().splitlines()[0]}")
            return None
        finally:
            self.new_mark = None
        self._failures = 0
        self.seconds += time.perf_counter() - start
        self.captures += 1
        if len(self._captured) >= self._limit:
            self._captured.popitem(last=False)
        written = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        captured = self._captured[kind, shape] = _Captured(replay, outputs, written)
        return captured

    def clear(self) -> None:
        """Drop all graphs; each kind runs eagerly once before it is captured again."""
        self._captured.clear()
        self._warm.clear()
        self._seen.clear()
        self._graphs.renew()

    def _tidy(self) -> None:
        if self.has_leftovers:
            self._graphs.release()
            self.has_leftovers = False

    def _check_memory(self) -> None:
        pointers = self._current_pointers()
        if pointers != self._pointers:
            self._pointers = pointers
            self.clear()

    def _current_pointers(self) -> list[int]:
        return [tensor.data_ptr() for home in self._homes for tensor in home.values() if tensor is not None]

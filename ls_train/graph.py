"""Work that is repeated with the same shapes, captured as CUDA graphs and replayed.

A replay runs the same kernels on the same memory: what changes from call to call must lie in device memory that the
captured function reads, and its results must be used before the next call.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def level(count: int, bits: int, smallest: int) -> int:
    """Return ``count`` rounded up to a number with ``bits`` significant bits after the first, at least ``smallest``."""
    step = max(1 << max(0, count.bit_length() - 1 - bits), smallest)
    return max(smallest, -(-count // step) * step)


class _Captured:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, gradients: list[tuple[Tensor, Tensor]]) -> None:
        self.graph = graph
        self.outputs = outputs
        self.gradients = gradients


class CapturedCalls:
    """Functions captured as CUDA graphs by key, the least recently used ones dropped.

    A key is run eagerly until it comes for the second time. All graphs share one memory pool: they run one after
    another, and nothing but the latest outputs and the parameters' gradients outlives a call.

    Attributes:
        captures: number of graphs captured so far.
    """

    def __init__(self, device: torch.device, parameters: Iterable[Tensor], limit: int = 256) -> None:
        """Prepare for functions on ``device`` that may write gradients of ``parameters``; keep ``limit`` graphs."""
        self.captures = 0
        self._parameters = list(parameters)
        self._limit = limit
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: Counter[Hashable] = Counter()
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._failed = False

    def __call__(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns, from a graph where ``key`` has one.

        Args:
            key: equal for calls that launch the same kernels on the same memory, and only for those.
            function: work on the device; it must not wait for it. ``.grad`` of the parameters is as it leaves them.
        """
        captured = self._graphs.get(key)
        if captured is None and not self._failed:
            self._seen[key] += 1
            if self._seen[key] > 1:
                captured = self._capture(key, function)
        if captured is None:
            return function()
        self._graphs.move_to_end(key)
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        captured.graph.replay()
        return captured.outputs

    def _capture(self, key: Hashable, function: Callable[[], Any]) -> _Captured | None:
        before = [parameter.grad for parameter in self._parameters]
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Other threads, the data loader's for example, may go on allocating.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._failed = True
            logger.warning(f"no more CUDA graphs, the work runs eagerly: the capture failed ({error})")
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            return None
        current.wait_stream(self._stream)
        written = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if len(self._graphs) >= self._limit:
            self._graphs.popitem(last=False)
        self._graphs[key] = _Captured(graph, outputs, written)
        self.captures += 1
        return self._graphs[key]

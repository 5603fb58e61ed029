"""One kind of layer at one length in a process that stops between start-up and measurement.

``python -m benchmarks.layer_process JSON`` with the fields of :class:`Work`. Start-up is building and compiling the
layers for every number of tokens. Each result is one line: tokens, implementation, metric and milliseconds a layer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ls_train
from benchmarks.processes import RESULT, wait_for_go
from benchmarks.records import capture, median_ms, start_peak
from benchmarks.shapes import SHAPES, Shape
from benchmarks.torch_transformer import TorchLayer
from ls_train.layers.call import SITES
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.modules import keep_cross_kv_together
from ls_train.rng import draw_seed

EAGER = ("ls_train", "torch_eager")
"""Implementations whose calls the host issues one by one."""
IN_A_ROW = 4
"""Layers whose host time is measured together; the launches of more would fill the device's queue."""


@dataclass(frozen=True)
class Work:
    """What one process measures.

    Attributes:
        kind: ``"encoder"`` or ``"decoder"``.
        arch: whose sizes the layer has.
        length: of every sequence.
        tokens: numbers of rows to measure at, multiples of the length.
        dtype: name of the type of parameters and activations.
        implementations: names to measure.
        repeats: measured calls.
    """

    kind: str
    arch: str
    length: int
    tokens: tuple[int, ...]
    dtype: str
    implementations: tuple[str, ...]
    repeats: int

    def to_json(self) -> str:
        """Return the argument of the process."""
        return json.dumps(asdict(self))


class Calls(NamedTuple):
    """Forward and backward of one layer or a few in a row, again and again.

    Attributes:
        clear: drops the gradients of the call before.
        issue: forward and backward.
    """

    clear: Callable[[], None]
    issue: Callable[[], None]

    def step(self) -> None:
        """Call both."""
        self.clear()
        self.issue()


def _clear(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


class Ours:
    """ls_train's layers on packed rows, gradients written to the flat buffer, one dropout seed for all, as in a model.

    Args:
        kind: see :class:`Work`.
        shape: sizes of a layer.
        dtype: of parameters and activations.
        device: where everything lies.
        count: number of layers.
    """

    def __init__(self, kind: str, shape: Shape, dtype: torch.dtype, device: str, count: int) -> None:
        layer_type = ls_train.LSTransformerEncoderLayer if kind == "encoder" else ls_train.LSTransformerDecoderLayer
        rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), shape.dropout)
        sizes = {"embed_dim": shape.embed_dim, "num_heads": shape.heads, "ffn_dim": shape.ffn_dim}
        self._layers = nn.ModuleList(layer_type(**sizes, **rates) for _ in range(count)).to(device, dtype)
        if kind == "decoder":
            # As LSTransformerDecoder does: the keys and values of all layers are one product.
            keep_cross_kv_together(self._layers)
        self._optimizer = ls_train.FusedAdam(self._layers.parameters(), lr=1e-4)
        self._optimizer.direct_grads = True
        self._kind, self._shape, self._device = kind, shape, device
        self._seed = draw_seed(device)

    def calls(self, tokens: int, length: int, count: int) -> Calls:
        """Return the calls of the first ``count`` layers for ``tokens`` rows in sequences of ``length``."""
        layers, seed = self._layers[:count], self._seed
        packing = ls_train.Packing.from_padding_mask(None, tokens // length, length, torch.device(self._device))
        like = {"device": self._device, "dtype": layers[0].fc1.weight.dtype}
        x, memory, dy = (torch.randn(tokens, self._shape.embed_dim, **like) for _ in range(3))
        inputs = [x.requires_grad_(), memory.requires_grad_()]

        def encode() -> None:
            y = x
            for i, layer in enumerate(layers):
                y = layer.forward_packed(y, packing, seed, SITES * i)
            y.backward(dy)

        def decode() -> None:
            y, kv = x, cross_kv(memory, packing, layers)
            for i, layer in enumerate(layers):
                y, kv = layer.forward_packed(y, packing, kv, packing, i, seed, SITES * i)
            y.backward(dy)

        cleared = [*inputs, *layers.parameters()]
        return Calls(lambda: _clear(cleared), encode if self._kind == "encoder" else decode)


class Theirs:
    """The PyTorch peer's layers; arguments as in :class:`Ours`, and whether they are compiled."""

    def __init__(
        self, kind: str, shape: Shape, dtype: torch.dtype, device: str, count: int, compiled: bool = False
    ) -> None:
        self._layers = nn.ModuleList(TorchLayer(shape, kind == "decoder") for _ in range(count)).to(device, dtype)
        self._forward = [torch.compile(layer, dynamic=False) if compiled else layer for layer in self._layers]
        self._kind, self._shape, self._like = kind, shape, {"device": device, "dtype": dtype}

    def calls(self, tokens: int, length: int, count: int) -> Calls:
        """Return the calls of the first ``count`` layers for ``tokens`` rows in sequences of ``length``."""
        sizes = (tokens // length, length, self._shape.embed_dim)
        x, memory, dy = (torch.randn(sizes, **self._like) for _ in range(3))
        inputs = [memory.requires_grad_()] if self._kind == "decoder" else []
        forward, cleared = self._forward[:count], [x.requires_grad_(), *inputs, *self._layers[:count].parameters()]

        def issue() -> None:
            y = x
            for layer in forward:
                y = layer(y, *inputs)
            y.backward(dy)

        return Calls(lambda: _clear(cleared), issue)


def host_ms(calls: Calls, repeats: int, warmup: int) -> float:
    """Return the median of the host's time to issue ``calls`` to an idle device, in milliseconds."""
    times = []
    for _ in range(warmup + repeats):
        calls.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        calls.issue()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[warmup:])


def main(argv: list[str]) -> None:
    """Measure. argv: the work in JSON."""
    work = Work(**json.loads(argv[0]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = SHAPES[work.arch], getattr(torch, work.dtype)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    arguments = (work.kind, shape, dtype, device)
    layers: dict[str, Ours | Theirs] = {}
    calls: dict[tuple[str, int, int], Calls] = {}
    for name in work.implementations:
        family = name.removesuffix("_graph")
        if family in layers:
            continue
        counts = (1, IN_A_ROW) if family in EAGER else (1,)
        if family == "ls_train":
            layers[family] = Ours(*arguments, counts[-1])
        else:
            layers[family] = Theirs(*arguments, counts[-1], compiled=family == "torch_compile")
        for tokens in work.tokens:
            for count in counts:
                calls[family, tokens, count] = made = layers[family].calls(tokens, work.length, count)
                for _ in range(2):
                    made.step()
    start_peak()
    wait_for_go()
    for tokens in work.tokens:
        for name in work.implementations:
            step = calls[name.removesuffix("_graph"), tokens, 1].step
            call = capture(step) if name.endswith("_graph") else step
            _print(tokens, name, "time", median_ms(call, work.repeats, 5))
            if name in EAGER:
                _print(tokens, name, "host_time", host_ms(calls[name, tokens, IN_A_ROW], work.repeats, 5) / IN_A_ROW)


def _print(tokens: int, name: str, metric: str, value: float) -> None:
    print(RESULT, json.dumps([tokens, name, metric, value]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One kind of layer at one length in a process that stops between start-up and measurement.

``python -m benchmarks.layer_process JSON`` with the fields of :class:`Work`. Start-up is building and compiling the
layers for every number of tokens. Each result is one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import ls_train
from benchmarks.processes import RESULT, wait_for_go
from benchmarks.records import capture, median_ms, start_peak
from benchmarks.shapes import SHAPES, Shape
from benchmarks.torch_transformer import TorchLayer
from ls_train.layers.cross_kv import cross_kv


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


def ours(kind: str, shape: Shape, tokens: int, length: int, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    """Return forward and backward of ls_train's layer on packed rows, gradients written to the flat buffer."""
    layer_type = ls_train.LSTransformerEncoderLayer if kind == "encoder" else ls_train.LSTransformerDecoderLayer
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), shape.dropout)
    layer = layer_type(embed_dim=shape.embed_dim, num_heads=shape.heads, ffn_dim=shape.ffn_dim, **dropouts)
    layer.to(device, dtype)
    optimizer = ls_train.FusedAdam(layer.parameters(), lr=1e-4)
    optimizer.direct_grads = True
    packing = ls_train.Packing.from_padding_mask(None, tokens // length, length, torch.device(device))
    x, memory, dy = (torch.randn(tokens, shape.embed_dim, device=device, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_(), memory.requires_grad_()]

    def step() -> None:
        optimizer.zero_grad()
        for tensor in inputs:
            tensor.grad = None
        if kind == "encoder":
            y = layer.forward_packed(x, packing)
        else:
            y, _ = layer.forward_packed(x, packing, cross_kv(memory, packing, [layer]), packing)
        y.backward(dy)

    return step


def theirs(
    kind: str, shape: Shape, tokens: int, length: int, dtype: torch.dtype, device: str, compiled: bool
) -> Callable[[], Any]:
    """Return forward and backward of the PyTorch peer's layer."""
    layer = TorchLayer(shape, kind == "decoder").to(device, dtype)
    sizes = (tokens // length, length, shape.embed_dim)
    x, memory, dy = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_(), *([memory.requires_grad_()] if kind == "decoder" else [])]
    forward = torch.compile(layer, dynamic=False) if compiled else layer
    parameters = list(layer.parameters())

    def step() -> None:
        for tensor in (*inputs, *parameters):
            tensor.grad = None
        forward(*inputs).backward(dy)

    return step


def main(argv: list[str]) -> None:
    """Measure. argv: the work in JSON."""
    work = Work(**json.loads(argv[0]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = SHAPES[work.arch], getattr(torch, work.dtype)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    steps: dict[tuple[str, int], Callable[[], Any]] = {}
    for tokens in work.tokens:
        for name in work.implementations:
            sizes = (work.kind, shape, tokens, work.length, dtype, device)
            family = name.removesuffix("_graph")
            if (family, tokens) not in steps:
                step = ours(*sizes) if family == "ls_train" else theirs(*sizes, family == "torch_compile")
                for _ in range(2):
                    step()
                steps[family, tokens] = step
    start_peak()
    wait_for_go()
    for tokens in work.tokens:
        for name in work.implementations:
            step = steps[name.removesuffix("_graph"), tokens]
            call = capture(step) if name.endswith("_graph") else step
            print(RESULT, json.dumps([tokens, name, median_ms(call, work.repeats, 5)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One implementation of a training step in a process that stops between start-up and measurement.

``python -m benchmarks.step_process JSON`` with the fields of :class:`Work`. Start-up is building the model, compiling
and the first steps. A process of its own gives every implementation its own peak memory. Each result is one line.
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
from benchmarks.torch_transformer import TorchTransformer
from ls_train.ops import linear_cross_entropy_gradients
from ls_train.packing import TokenOrder

_LABEL_SMOOTHING, _PADDING, _LOSS_SCALE = 0.1, 1, 128.0


@dataclass(frozen=True)
class Work:
    """What one process measures.

    Attributes:
        implementations: names that share one step: eager first, then its CUDA graph.
        dtype: name of the type of parameters and activations.
        repeats: measured steps.
    """

    arch: str
    tokens: int
    length: int
    dtype: str
    implementations: tuple[str, ...]
    repeats: int

    def to_json(self) -> str:
        """Return the argument of the process."""
        return json.dumps(asdict(self))


def batch(shape: Shape, tokens: int, length: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return random source, previous and target tokens, each int64 (tokens // length, length)."""
    return tuple(torch.randint(4, shape.vocab_size, (tokens // length, length), device=device) for _ in range(3))


def ours(shape: Shape, tokens: int, length: int, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    """Return the training step of ls_train: batch packed on the host, gradients in the flat buffer, fp32 masters."""
    config = ls_train.LSTransformer.get_config(
        hidden_size=shape.embed_dim,
        intermediate_size=shape.ffn_dim,
        nhead=shape.heads,
        num_encoder_layer=shape.layers,
        num_decoder_layer=shape.layers,
        vocab_size=shape.vocab_size,
        max_seq_len=max(length, 512),
        attn_prob_dropout_ratio=shape.dropout,
        activation_dropout_ratio=shape.dropout,
        hidden_dropout_ratio=shape.dropout,
        pre_layer_norm=False,
        share_all_embeddings=True,
        padding_idx=_PADDING,
    )
    model = ls_train.LSTransformer(config).to(device, dtype)
    optimizer = ls_train.FusedAdam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    optimizer.direct_grads = True
    source, previous, target = (x.flatten() for x in batch(shape, tokens, length, device))
    packing = ls_train.Packing.from_padding_mask(None, tokens // length, length, torch.device(device))
    source_order, order = (TokenOrder(*tokens.sort(stable=True)) for tokens in (source, previous))
    weight = model.decoder.output_projection.weight
    loss_scale = torch.full((1,), _LOSS_SCALE, device=device)
    scale = loss_scale * source.numel()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        memory = model.encoder.forward_packed(source, packing, order=source_order)
        features = model.decoder.forward_packed(previous, packing, memory, packing, order=order)
        sums, dfeatures, _ = linear_cross_entropy_gradients(
            features, weight, target, loss_scale, _LABEL_SMOOTHING, _PADDING
        )
        features.backward(dfeatures)
        norm, found_inf = optimizer.grad_norm()
        optimizer.step(scale=scale, norm=norm, found_inf=found_inf)
        return sums.loss

    return step


def theirs(
    shape: Shape, tokens: int, length: int, dtype: torch.dtype, device: str, compiled: bool
) -> Callable[[], Any]:
    """Return the training step of the PyTorch peer in pure ``dtype`` with fused AdamW."""
    model = TorchTransformer(shape, max(length, 512)).to(device, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True, capturable=device == "cuda"
    )
    source, previous, target = batch(shape, tokens, length, device)
    forward = torch.compile(model) if compiled else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = forward(source, previous, target)
        (loss / target.numel()).backward()
        optimizer.step()
        return loss

    return step


def make_step(work: Work) -> Callable[[], Any]:
    """Return the step that the implementations of ``work`` share, after two calls."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    name = work.implementations[0]
    arguments = (SHAPES[work.arch], work.tokens, work.length, getattr(torch, work.dtype), device)
    step = ours(*arguments) if name.startswith("ls_train") else theirs(*arguments, "compile" in name)
    for _ in range(2):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    start_peak()
    return step


def main(argv: list[str]) -> None:
    """Measure. argv: the work in JSON."""
    work = Work(**json.loads(argv[0]))
    step = make_step(work)
    wait_for_go()
    for name in work.implementations:
        start_peak()
        call = capture(step) if name.endswith("_graph") else step
        time = median_ms(call, work.repeats, 5)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        print(RESULT, json.dumps([name, time, peak]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

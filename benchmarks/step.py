"""One training step (forward, backward, clip-free Adam update) without padding: ls_train against PyTorch and the floor.

``python -m benchmarks.step [--quick] [--arch NAME] [--output FILE]``. Every implementation of a case is measured in the
same run; ratios are peer time over ls_train time (eager ls_train for eager peers, its graph for graph peers).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ls_train
from benchmarks.floor import copy_bandwidth, step_floor
from benchmarks.records import RESULTS, capture, median_ms, write_records
from benchmarks.shapes import SHAPES, Shape
from benchmarks.torch_transformer import TorchTransformer
from ls_train.ops import linear_cross_entropy

_CASES = [(512, 32), (1024, 32), (4096, 32), (8192, 32), (15000, 30), (8192, 128), (8192, 512)]
_QUICK = [(4096, 32), (8192, 32), (15000, 30)]
_GRAPHS = ("ls_train_graph", "torch_compile_graph")
IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "torch_eager", "torch_compile", "torch_compile_graph")


def batch(shape: Shape, tokens: int, length: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return random source, previous and target tokens, each int64 (tokens // length, length)."""
    return tuple(torch.randint(4, shape.vocab_size, (tokens // length, length), device=device) for _ in range(3))


def ours(shape: Shape, tokens: int, length: int, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    """Return the training step of ls_train: packed rows, gradients in the flat buffer, fp32 masters."""
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
        padding_idx=1,
    )
    model = ls_train.LSTransformer(config).to(device, dtype)
    optimizer = ls_train.FusedAdam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    optimizer.direct_grads = True
    source, previous, target = (x.flatten() for x in batch(shape, tokens, length, device))
    packing = ls_train.Packing.from_padding_mask(None, tokens // length, length, torch.device(device))
    weight = model.decoder.output_projection.weight
    scale = torch.full((1,), float(source.numel()), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        memory = model.encoder.forward_packed(source, packing)
        features = model.decoder.forward_packed(previous, packing, memory, packing)
        loss = linear_cross_entropy(features, weight, target, 0.1, 1).loss
        loss.backward()
        norm, found_inf = optimizer.grad_norm()
        optimizer.step(scale=scale, norm=norm, found_inf=found_inf)
        return loss

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


def measure(name: str, shape: Shape, tokens: int, length: int, dtype: torch.dtype, quick: bool) -> tuple[float, float]:
    """Return (milliseconds, peak GiB) of one implementation's step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if device == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if name.startswith("ls_train"):
        step = ours(shape, tokens, length, dtype, device)
    else:
        step = theirs(shape, tokens, length, dtype, device, "compile" in name)
    if name in _GRAPHS:
        step = capture(step)
    time = median_ms(step, 10 if quick else 20, 5)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return time, peak


def run_case(
    arch: str, tokens: int, length: int, implementations: list[str], dtype: torch.dtype, bandwidth: float, quick: bool
) -> list[dict[str, Any]]:
    """Measure one case and return its records."""
    shape = SHAPES[arch]
    tokens = tokens // length * length
    floor = step_floor(shape, tokens, length, dtype, bandwidth)
    times, peaks = {"floor": floor["total"]}, {}
    for name in implementations:
        times[name], peaks[name] = measure(name, shape, tokens, length, dtype, quick)
    records = []
    case = {"arch": arch, "tokens": tokens, "length": length}
    for name, value in times.items():
        ratios = {}
        if name.startswith("ls_train"):
            graph = name in _GRAPHS
            peers = [peer for peer in times if not peer.startswith("ls_train") and (peer in _GRAPHS) <= graph]
            ratios = {peer: times[peer] / value for peer in peers}
        record = {"bench": "step", "case": case, "implementation": name}
        records.append({**record, "metric": "time", "value": value, "unit": "ms", "ratios": ratios})
        if name in peaks:
            ratios = {peer: peaks[peer] / peaks[name] for peer in ratios if peaks.get(peer)} if peaks[name] else {}
            records.append({**record, "metric": "peak_memory", "value": peaks[name], "unit": "GiB", "ratios": ratios})
    row = " | ".join(f"{name} {times[name]:.2f} ms {peaks.get(name, 0):.1f} GiB" for name in times)
    print(f"{arch} {tokens} x {length}: {row} (GEMMs {floor['gemms']:.2f})", flush=True)
    return records


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the cases of the table in the README only")
    parser.add_argument("--arch", action="append", choices=sorted(SHAPES), help="default: transformer_big_6e6d")
    parser.add_argument("--case", action="append", help="TOKENSxLENGTH, in place of the default cases")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS / "step.json")
    arguments = parser.parse_args(argv)
    cases = _QUICK if arguments.quick else _CASES
    if arguments.case:
        cases = [tuple(map(int, case.split("x"))) for case in arguments.case]
    bandwidth = copy_bandwidth(2**31 if torch.cuda.is_available() else 2**20)
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    records = []
    for arch in arguments.arch or ["transformer_big_6e6d"]:
        for tokens, length in cases:
            names = arguments.implementation or list(IMPLEMENTATIONS)
            dtype = getattr(torch, arguments.dtype)
            records += run_case(arch, tokens, length, names, dtype, bandwidth, arguments.quick)
            write_records(records, arguments.output)


if __name__ == "__main__":
    main()

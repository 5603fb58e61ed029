"""Small cases of every kernel, to be run under NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python -m tests.kernels.sanitize [op ...] [--dtype float16]

Without torch's caching allocator every tensor is an allocation of its own, so that memcheck sees an access beyond its
end. ``--tool racecheck`` looks at shared memory and needs no such setting.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

import ls_train.ops
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing
from ls_train.params import FlatParameters
from tests.kernels import bench_problems as problems
from tests.kernels.leaf_contract import operator, shifted_call

STEMS = sorted(path.stem for path in Path(ls_train.ops.__file__).parent.glob("*.py") if not path.stem.startswith("_"))
# Sizes of the benchmark's problems that take other kernels than the contract's 13 x 24: whole and broken 16-byte packs,
# rows of several warps, rows too wide for registers.
SIZES: dict[str, Sequence[tuple[int, int]]] = {
    "layer_norm": ((37, 1024), (5, 1023), (3, 9000), (3, 9001)),
    "bias_dropout_add": ((37, 1024), (5, 1023)),
    "bias_dropout_add_layer_norm": ((37, 1024), (5, 1023), (3, 9000)),
    "bias_gradient": ((37, 1024), (5, 1023)),
    "bias_activation_dropout": ((37, 1024), (5, 1023)),
    "bias_gelu_dropout": ((37, 1024), (5, 1023)),
    "dropout": ((37, 1024), (5, 1023)),
    "scale_cast": ((37, 1024), (5, 1023), (67, 257)),
    "softmax_dropout": ((32, 64), (32, 33), (32, 257), (32, 1024), (32, 2100)),
    "embedding": ((67, 256), (67, 129), (1200, 256), (1200, 129), (12000, 16)),  # the last: runs of several passes
    "cross_entropy": ((5, 5000), (5, 5003), (3, 40000)),
    "grad_norm": ((100_003, 0), (1 << 20, 0)),
    "adam": ((100_003, 0), (1 << 18, 0)),
}
_LENGTHS = {
    "short": ((3, 30, 1, 17), (5, 30, 8, 1)),
    "medium": ((70, 33), (96, 5)),
    "long": ((300, 33), (300, 140)),
}
_HEAD_SIZES = (5, 32, 40, 64, 128, 256)
_LAYER = "layer"
"""Case of whole layers, whose forward and backward are one compiled operator each and cut their own scratch."""

Case = tuple[str, Callable[[], object]]


def cases(stem: str, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield (name, call) of small cases of the operators of ``ls_train.ops.<stem>``, ``SIZES`` of a benchmark too."""
    contract = (
        getattr(importlib.import_module(f"tests.kernels.test_{stem}"), "TestLeaf", None) if stem in STEMS else None
    )
    for index, case in enumerate(contract().calls(device, dtype) if contract else ()):
        for name, arguments in (contract().fresh(case), shifted_call(contract().fresh(case))):
            yield f"{name} {index}", functools.partial(operator(name), **arguments)
    buffers = problems.Buffers(dtype, torch.device(device))
    # The sizes choose kernels; without them one of each problem shows that it can be called.
    for size in SIZES.get(stem, ())[: None if device == "cuda" else 1]:
        for part, call in getattr(problems, stem)(buffers, *size).ours.items():
            yield f"{stem} {part} {size[0]} x {size[1]}", call
    if stem == "attention":
        yield from _attention(device, dtype)
    if stem == _LAYER:
        yield from _layers(device, dtype)
    if stem == "linear_cross_entropy":
        x, weight = torch.randn(37, 16).to(device, dtype), torch.randn(129, 16).to(device, dtype)
        target = torch.randint(129, (37,)).to(device)
        yield stem, lambda: _backward(ls_train.ops.linear_cross_entropy, x, weight, target=target)


def _attention(device: str, dtype: torch.dtype) -> Iterator[Case]:
    seed = torch.tensor([3]).to(device)
    for kind, (lengths_q, lengths_k) in _LENGTHS.items():
        for causal in (False, True):
            keys = lengths_q if causal else lengths_k
            cu_q, cu_k = (
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device) for lengths in (lengths_q, keys)
            )
            for width in _HEAD_SIZES:
                q, k, v = (torch.randn(sum(n), 2, width).to(device, dtype) for n in (lengths_q, keys, keys))
                settings = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max(lengths_q), "max_k": max(keys), "causal": causal}
                call = functools.partial(
                    _backward, ls_train.ops.attention, q, k, v, **settings, p=0.3, seed=seed, offset=2
                )
                yield f"attention {kind} {'causal' if causal else 'cross'} heads of {width}", call


def _layers(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a forward and backward of an encoder and a decoder layer, with rows that are not used."""
    target, source = (_partly_used(lengths, 7, device) for lengths in _LENGTHS["short"])
    seed = torch.tensor([3]).to(device)
    for pre_norm in (False, True):
        for activation in ("relu", "gelu"):
            settings = {"embed_dim": 48, "num_heads": 2, "ffn_dim": 72, "activation": activation}
            encoder, decoder = (
                kind(**settings, normalize_before=pre_norm).to(device, dtype)
                for kind in (LSTransformerEncoderLayer, LSTransformerDecoderLayer)
            )
            # The compiled operators want q, k and v beside each other.
            flat = [FlatParameters(layer.named_parameters()) for layer in (encoder, decoder)]
            x, memory = (
                torch.randn(len(side.positions), 48).to(device, dtype).requires_grad_() for side in (target, source)
            )

            def encode(layer=encoder, memory=memory, flat=flat) -> None:
                layer.forward_packed(memory, source, seed).sum().backward()

            def decode(layer=decoder, x=x, memory=memory, flat=flat) -> None:
                kv = cross_kv(memory, source, [layer])
                layer.forward_packed(x, target, kv, source, 0, seed)[0].sum().backward()

            where = f"{'pre' if pre_norm else 'post'}-norm {activation}"
            yield f"encoder layer {where}", encode
            yield f"decoder layer {where}", decode


def _partly_used(lengths: Sequence[int], unused: int, device: str) -> Packing:
    """Return the packing of sequences with so many ``lengths`` and ``unused`` further rows."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    positions = torch.zeros(sum(lengths) + unused, dtype=torch.int64).to(device)
    return Packing(ends, max(lengths), positions, None, len(lengths), max(lengths))


def _backward(function: Callable[..., object], *inputs: torch.Tensor, **settings: object) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves, **settings)
    y = result if isinstance(result, torch.Tensor) else result[0]
    torch.autograd.grad(y, leaves, torch.ones_like(y))


def all_stems() -> list[str]:
    """Return the operators' modules, the further problems of ``SIZES`` and the case of whole layers."""
    return [*STEMS, *sorted(SIZES.keys() - set(STEMS)), _LAYER]


def run(stems: Sequence[str], device: str, dtypes: Sequence[torch.dtype]) -> int:
    """Run the cases one after another, each to its end, with its name before it; return their number."""
    count = 0
    for dtype in dtypes:
        for stem in stems:
            for name, call in cases(stem, device, dtype):
                print(f"{str(dtype).removeprefix('torch.')} {name}", flush=True)
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases from the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("op", nargs="*", help=f"operators, all by default: {', '.join(all_stems())}")
    parser.add_argument("--dtype", action="append", choices=("float32", "float16", "bfloat16"))
    options = parser.parse_args(arguments)
    unknown = [op for op in options.op if op not in all_stems()]
    if unknown:
        parser.error(f"unknown operator {unknown[0]!r}; use some of {', '.join(all_stems())}")
    if not torch.cuda.is_available():
        sys.exit("tests.kernels.sanitize: no CUDA device is present; the sanitizer has nothing to check without one")
    names = options.dtype or ("float32", "float16", "bfloat16")
    count = run(options.op or all_stems(), "cuda", [getattr(torch, name) for name in names])
    print(f"{count} cases ran")


if __name__ == "__main__":
    main()

"""Cross-attention keys and values of all decoder layers in one projection of the encoder's output.

``kv`` (Ns, L * 2C) holds for layer l its keys in columns 2lC to (2l + 1)C - 1 and its values in the next C columns.
Every decoder layer takes ``kv`` and hands it on, so that in the backward one gradient buffer travels from the last
layer to the first, each writing its slice, and one GEMM each gives the gradients of the encoder's output and of all
weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ls_train.layers import modules
from ls_train.layers.column_sums import ColumnSums
from ls_train.layers.gradients import (
    GradientWriter,
    Held,
    given,
    once_differentiable,
    save_parameters,
    saved_parameters,
)
from ls_train.layers.linear import project, project_gradient
from ls_train.layers.residual import bias_gradient
from ls_train.memory import workspace
from ls_train.ops._arguments import statistics_dtype
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.packing import Packing

_MARK = "_kv_gradient_chain"
_use_count = getattr(Tensor, "_use_count", lambda tensor: 0)  # not public


class _Chain:
    """Mark on a gradient buffer of this module.

    Attributes:
        written: first columns of the slices that hold something, None if any may.
        version: version of the tensor when the last layer handed it on; autograd may add to it on the way.
    """

    __slots__ = ("version", "written")

    def __init__(self, written: set[int] | None, version: int) -> None:
        self.written = written
        self.version = version


class _Probe(torch.autograd.Function):
    """Hands a fresh gradient to the function before it and notes how often the one that it gets is used."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, uses: list[int]) -> Tensor:
        ctx.uses = uses
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.uses.append(_use_count(gradient))
        fresh = torch.zeros_like(gradient)
        setattr(fresh, _MARK, None)
        return fresh, None


@functools.cache
def _uses_on_the_way() -> int:
    """Return the use count of a gradient that one backward handed to the next: what it is depends on torch's version.

    Asked for in a backward only: the first one of a process starts threads, and a process may fork before.
    """
    uses: list[int] = []
    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.zeros(1, requires_grad=True)
        _Probe.apply(_Probe.apply(x, uses), uses).backward()
    return uses[-1]


class CrossKVFunction(torch.autograd.Function):
    """kv (Ns, L * 2C) from the encoder's output (Ns, Ce) and L times (k weight, k bias, v weight, v bias)."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, memory: Tensor, *arguments: Tensor | Held) -> Tensor:
        """Return kv for ``memory`` (Ns, Ce); ``rows`` int32 (1,): number of used rows."""
        parameters, _ = given(arguments)
        weights, biases = parameters[::2], parameters[1::2]
        kv = memory.new_empty((memory.shape[0], sum(weight.shape[0] for weight in weights)))
        project(kv, memory, weights, biases)
        ctx.rows = rows
        save_parameters(ctx, arguments, memory)
        return kv

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dkv: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``memory`` and of the parameters that have no slot in a flat buffer."""
        (memory,), parameters = saved_parameters(ctx, 1)
        names = range(len(parameters))
        dkv = dkv.contiguous()
        with workspace(memory) as scratch:
            sums = ColumnSums(scratch.take((bias_dropout_add_workspace(*dkv.shape),), statistics_dtype(dkv.dtype)))
            writer = GradientWriter.of(ctx, dict(enumerate(names)), parameters, scratch)
            bias_gradient(names[1::2], dkv, writer, sums, ctx.rows)
            sums.finish()
            writer.linear(names[::2], dkv, memory)
        dmemory = None
        if ctx.needs_input_grad[1]:
            dmemory = torch.empty_like(memory)
            project_gradient(dmemory, dkv, parameters[::2])
        return None, dmemory, *writer.finish()


def gradient_slice(dkv: Tensor | None, kv: Tensor, begin: int, width: int) -> tuple[Tensor, Tensor, bool]:
    """Return the buffer for the gradient of ``kv``, where to write a slice of it, and whether that is part of it.

    The target is the slice itself while the buffer holds nothing but what layers of this chain wrote into other
    slices. Otherwise (keys and values were used elsewhere too) it is a separate tensor, added by :func:`finish_slice`.
    A buffer that somebody else holds is copied before: autograd, which was asked for this gradient or hands it to a
    second function, or the caller of a backward.

    Args:
        dkv: gradient that later layers handed on, or None.
        kv: the keys and values, for the shape.
        begin: first column of the layer's slice.
        width: number of its columns.
    """
    if dkv is None:
        buffer = torch.zeros_like(kv)
        setattr(buffer, _MARK, _Chain(set(), buffer._version))
        return buffer, buffer.narrow(1, begin, width), True
    chain = getattr(dkv, _MARK, None)
    if chain is None or chain.version != dkv._version or _use_count(dkv) > _uses_on_the_way():
        # Not ours, or somebody added to it or holds it: it may be in use elsewhere.
        dkv = dkv.clone(memory_format=torch.contiguous_format)
        chain = _Chain(None, dkv._version)
        setattr(dkv, _MARK, chain)
    if chain.written is not None and begin not in chain.written:
        return dkv, dkv.narrow(1, begin, width), True
    return dkv, dkv.new_empty(dkv.shape[0], width), False


def finish_slice(buffer: Tensor, target: Tensor, is_part: bool, begin: int) -> None:
    """Note in ``buffer`` that ``target``, both of :func:`gradient_slice`, was written."""
    chain = getattr(buffer, _MARK)
    if is_part:
        chain.written.add(begin)
    else:
        buffer.narrow(1, begin, target.shape[1]).add_(target)
    chain.version = buffer._version


@modules.check_kinds
def cross_kv(memory: Tensor, packing: Packing, layers: Sequence[nn.Module]) -> Tensor:
    """Return the cross-attention keys and values (Ns, L * 2C) of all ``layers``.

    Args:
        memory: (Ns, Ce), the encoder's packed output.
        packing: where its sequences lie.
        layers: L decoder layers with cross attention. Of a stack that is not an ``LSTransformerDecoder``, tell
            :func:`ls_train.layers.modules.keep_cross_kv_together` before an optimiser is built: otherwise every layer
            takes products of its own, and copies of gradients with ``direct_grads``.

    Raises:
        TypeError: ``memory`` and the parameters differ in dtype.
        ValueError: they differ in size or device.
    """
    modules.check_rows("cross_kv", "memory", memory, layers[0].encoder_attn.k_proj.in_features, packing)
    attentions = [attention for layer in layers for attention in modules.children(layer, "encoder_attn")]
    projections = [p for attention in attentions for p in modules.children(attention, "k_proj", "v_proj")]
    (memory,), _, arguments = modules.prepare("cross_kv", (memory,), modules.parameters_of(projections))
    return modules.apply(CrossKVFunction, packing.rows, memory.contiguous(), *arguments)

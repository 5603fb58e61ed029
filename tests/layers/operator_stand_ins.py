"""The operators of whole layers without a compiled library: the layers' Python code, run from the operators' arguments.

With them the path that a GPU takes, up to the call of the operator, is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from ls_train.layers import decoder_layer, encoder_layer
from ls_train.layers.call import FIELDS, Call, Pass, backward_pass
from ls_train.layers.compiled import parameter_groups
from ls_train.layers.decoder_layer import DecoderParameters, decoder_block
from ls_train.layers.encoder_layer import EncoderParameters, encoder_block
from ls_train.layers.gradients import GradientWriter
from ls_train.memory import Workspace


class Gradients:
    """What a layer's backward writes: one tensor a group of parameters."""

    _scratch = None
    linear = GradientWriter.linear

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], accumulate: bool) -> None:
        self._tensors = dict(zip(parameter_groups(names), tensors, strict=True))
        self._accumulate = accumulate

    def open(self, *groups: Sequence[str], always: bool = False) -> tuple[list[Tensor], bool]:
        return [self._tensors[group] for group in groups], self._accumulate


def layer_fwd(
    y: Tensor, block: Tensor, scratch: Tensor, x: Tensor, kv: Tensor | None, parameters: Sequence[Tensor], *others: Any
) -> None:
    run = _run(x, kv, block, parameters, others)
    if kv is None:
        encoder_layer._forward(y, x, run)
    else:
        decoder_layer._forward(y, x, kv, run)


def layer_bwd(
    dx: Tensor,
    dkv: Tensor | None,
    scratch: Tensor,
    gradients: Sequence[Tensor],
    dy: Tensor,
    block: Tensor,
    x: Tensor,
    kv: Tensor | None,
    parameters: Sequence[Tensor],
    *others: Any,
) -> None:
    *others, sums, accumulate = others
    call, named, saved, space, *_ = _run(x, kv, block, parameters, others)
    run = backward_pass(call, named, saved, space, Gradients(named._fields, gradients, accumulate), x, sums)
    if kv is None:
        encoder_layer._backward(dx, dy, x, run)
    else:
        decoder_layer._backward(dx, dkv, dy, x, kv, run)
    run.column_sums.finish()


def _run(x: Tensor, kv: Tensor | None, block: Tensor, parameters: Sequence[Tensor], others: Sequence[Any]) -> Pass:
    call = Call(*others[:-1])
    kind, layout_of = (EncoderParameters, encoder_block) if kv is None else (DecoderParameters, decoder_block)
    weight, bias, *rest = parameters
    together = [part for pair in zip(weight.chunk(3), bias.chunk(3), strict=True) for part in pair]
    named = kind(*together, *rest)
    layout = layout_of(*x.shape, named.fc1_weight.shape[0], call.heads, call.normalize_before, x.dtype)
    assert others[-1] == layout.begins(FIELDS)
    return Pass(call, named, layout.views(block), Workspace(x.device))


def stand_in(patch: pytest.MonkeyPatch) -> list[str]:
    """Let layers call these instead of operators; return the list that their names are appended to."""
    names: list[str] = []
    operators = {"layer_fwd": layer_fwd, "layer_bwd": layer_bwd}

    def compiled(name: str, like: Tensor) -> Any:
        names.append(name)
        return operators[name]

    patch.setattr("ls_train.layers.compiled.compiled", compiled)
    return names

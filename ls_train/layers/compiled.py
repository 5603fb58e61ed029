"""A layer's forward and backward as one operator each, so that the host keeps ahead of the GPU on short batches.

They launch what the Python code of the layers launches, in the same order into the same places: that code is their
definition, serves where there is no compiled library, and the rare calls that the operators do not take: q, k and v
that do not lie together, parameters without gradient, gradients of which only some were written before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ls_train._library import compiled, define
from ls_train.grad_slots import GradSlots
from ls_train.layers.call import Call, Sizes
from ls_train.layers.gradients import GradientWriter, Held, joint_slots
from ls_train.memory import spare
from ls_train.params import joined

_SCALARS = (
    "int heads, int max_length, int memory_max_length, int layer, int offset, bool normalize_before, bool causal,"
    " float eps, float dropout, float attention_dropout, float activation_dropout, str activation, int[] fields"
)
_INPUTS = "Tensor x, Tensor? kv, Tensor[] parameters, Tensor cu, Tensor rows, Tensor? seed, Tensor? memory_cu"

define(
    "layer_fwd",
    f"(Tensor(a!) y, Tensor(b!) block, Tensor(c!) scratch, {_INPUTS}, {_SCALARS}) -> ()",
    compiled_only=True,
)
define(
    "layer_bwd",
    "(Tensor(a!) dx, Tensor(b!)? dkv, Tensor(c!) scratch, Tensor(d!)[] gradients, Tensor dy, Tensor block,"
    f" {_INPUTS}, {_SCALARS}, int sums, bool accumulate) -> ()",
    compiled_only=True,
)

_JOINED = 6  # weights and biases of q, k and v, the first parameters of a layer
_OPERANDS = "parameters of an operator"
_POINTER = Tensor.data_ptr
_QKV_WEIGHT, _QKV_BIAS = ("q_weight", "k_weight", "v_weight"), ("q_bias", "k_bias", "v_bias")


def parameter_groups(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return parameter ``names`` of a layer, those of q, k and v joined, as the operators take them."""
    return _QKV_WEIGHT, _QKV_BIAS, *((name,) for name in names if name not in (*_QKV_WEIGHT, *_QKV_BIAS))


def layer_forward(
    y: Tensor,
    block: Tensor | None,
    x: Tensor,
    kv: Tensor | None,
    parameters: Sequence[Tensor],
    held: Held | None,
    sizes: Sizes,
    call: Call,
) -> bool:
    """Run a layer's forward if the operator takes the call, and return whether it did.

    Args:
        y: (N, C), written.
        block: the saved block, written; None where nothing is saved.
        x: (N, C).
        kv: (Ns, L * 2C) cross-attention keys and values, or None.
        parameters: of the layer, those of q, k and v first.
        held: what stands for them, if they are held.
        sizes: of the call.
        call: the call.
    """
    run = compiled("layer_fwd", x)
    if run is None:
        return False
    tensors = _inputs(parameters, held, kv)
    if tensors is None:
        return False
    if block is None:
        block, space = spare(x, sizes.layout.size, sizes.forward)
    else:
        (space,) = spare(x, sizes.forward)
    run(y, block, space, x, kv, tensors, *call, sizes.begins)
    return True


def layer_backward(
    dx: Tensor,
    dkv: Tensor | None,
    dy: Tensor,
    x: Tensor,
    kv: Tensor | None,
    block: Tensor,
    parameters: Sequence[Tensor],
    groups: Sequence[Sequence[str]],
    writer: GradientWriter,
    sizes: Sizes,
    call: Call,
) -> bool:
    """Run a layer's backward if the operator takes the call, and return whether it did.

    Args:
        dx: (N, C), written.
        dkv: (Ns, 2C), the layer's part of the gradient of ``kv``, written; or None.
        dy: (N, C).
        groups: of :func:`parameter_groups`.
        writer: where the gradients of the parameters go.

    The other arguments are those of :func:`layer_forward`.
    """
    run = compiled("layer_bwd", x)
    if run is None or not writer.complete:
        return False
    tensors = _inputs(parameters, writer.held, kv)
    if tensors is None:
        return False
    gradients, accumulate = writer.open(*groups)
    (space,) = spare(x, sizes.backward)
    run(dx, dkv, space, gradients, dy, block, x, kv, tensors, *call, sizes.begins, sizes.sums, accumulate)
    return True


def held_backward(
    dx: Tensor,
    dkv: Tensor | None,
    dy: Tensor,
    x: Tensor,
    kv: Tensor | None,
    block: Tensor,
    held: Held,
    groups: Sequence[Sequence[str]],
    index: Mapping[str, int],
    sizes: Sizes,
    call: Call,
) -> bool:
    """Do what :func:`layer_backward` does for held parameters, the rule, in a fraction of the host time.

    Args:
        held: what stands for the parameters.
        index: place of each parameter, by name.

    The other arguments are those of :func:`layer_backward`.
    """
    run = compiled("layer_bwd", x)
    written = None if run is None else held.state()
    if written is None:
        return False
    joint, tensors = joint_slots(held.slots, groups, index), _inputs(held.tensors, held, kv)
    if joint is None or tensors is None:
        return False
    (space,) = spare(x, sizes.backward)
    run(dx, dkv, space, joint.tensors, dy, block, x, kv, tensors, *call, sizes.begins, sizes.sums, written)
    GradSlots.commit(joint.slots, written)
    return True


def _inputs(parameters: Sequence[Tensor], held: Held | None, kv: Tensor | None) -> list[Tensor] | None:
    """Return ``parameters`` as the operators take them, or None where they do not take them, or not ``kv``."""
    if kv is not None and not kv.is_contiguous():
        return None
    if held is None:
        return _join(parameters)
    remembered = held.slots.remembered
    pointers = list(map(_POINTER, parameters[:_JOINED]))
    known = remembered.get(_OPERANDS)
    if known is None or known[0] != pointers:
        known = remembered[_OPERANDS] = pointers, _join(parameters)
    return known[1]


def _join(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    weight, bias = joined(parameters[0:_JOINED:2]), joined(parameters[1:_JOINED:2])
    return None if weight is None or bias is None else [weight, bias, *parameters[_JOINED:]]

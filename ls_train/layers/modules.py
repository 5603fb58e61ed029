"""Parameter containers with fairseq's names and initialisation, and what all layer modules do around a call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ls_train import rng
from ls_train.flat_order import keep_together
from ls_train.layers.config import LayerConfig
from ls_train.layers.gradients import Held, alike, hold
from ls_train.ops._arguments import check_kinds as check_kinds  # for the layers
from ls_train.packing import Packing

# Name of a field of LayerConfig in torch-style constructors
_ARGUMENTS = {
    "hidden_size": "embed_dim",
    "intermediate_size": "ffn_dim",
    "nhead": "num_heads",
    "attn_prob_dropout_ratio": "attention_dropout",
    "activation_dropout_ratio": "activation_dropout",
    "hidden_dropout_ratio": "dropout",
    "activation_fn": "activation",
    "layer_norm_eps": "eps",
}


_OWN_PARAMETERS, _WEIGHT_AND_BIAS = attrgetter("_parameters"), itemgetter("weight", "bias")
_REQUIRES_GRAD = attrgetter("requires_grad")
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # not public


class Attention(nn.Module):
    """Parameters ``k_proj``, ``v_proj``, ``q_proj``, ``out_proj`` of one multi-head attention.

    Initialisation: Xavier uniform, gain 1/sqrt(2) for q, k and v where all sizes are equal, output bias zero
    (fairseq's ``MultiheadAttention.reset_parameters``).

    Args:
        embed_dim: C.
        memory_dim: size of what keys and values are made from; None is C.
    """

    def __init__(self, embed_dim: int, memory_dim: int | None = None) -> None:
        super().__init__()
        memory_dim = embed_dim if memory_dim is None else memory_dim
        self.k_proj = nn.Linear(memory_dim, embed_dim)
        self.v_proj = nn.Linear(memory_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        gain = 1 / math.sqrt(2) if memory_dim == embed_dim else 1.0
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)


def keep_qkv_together(attention: Attention) -> None:
    """Ask for q, k and v weights (and biases) to lie together in flat buffers: one GEMM instead of three."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    keep_together([projection.weight for projection in projections])
    keep_together([projection.bias for projection in projections])


def keep_cross_kv_together(layers: Iterable[nn.Module]) -> None:
    """Ask for all decoder layers' cross k and v weights (and biases) to lie together in flat buffers."""
    projections = [p for layer in layers for p in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)]
    if projections:
        keep_together([projection.weight for projection in projections])
        keep_together([projection.bias for projection in projections])


def fill(parameters: Sequence[Tensor], values: Sequence[Tensor | None] | None, name: str) -> None:
    """Copy ``values`` (None: leave the initialisation) into ``parameters``.

    Raises:
        ValueError: the number of values or a shape does not fit.
    """
    if values is None:
        return
    if len(values) != len(parameters):
        raise ValueError(f"{name} must have {len(parameters)} entries, got {len(values)}")
    for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        if value is None:
            continue
        if value.shape != parameter.shape:
            raise ValueError(f"{name}[{i}] must have shape {tuple(parameter.shape)}, got {tuple(value.shape)}")
        with torch.no_grad():
            parameter.copy_(value)


def autocast_type(like: Tensor) -> torch.dtype | None:
    """Return the type that autocast asks for where ``like`` lies, or None where it is off."""
    if not _any_autocast():
        return None
    kind = like.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_inputs(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return floating-point ``tensors`` in autocast's type where autocast is on, else as they are."""
    dtype = autocast_type(tensors[0])
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]


def prepare(
    name: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Sequence[Tensor], bool, Sequence[Tensor] | tuple[Held]]:
    """Return what an autograd function takes: inputs, whether a backward may follow, and what stands for parameters.

    Args:
        name: of the layer, for messages.
        inputs: what may need a gradient besides parameters.
        parameters: in the function's order.

    Returns:
        ``inputs``, in autocast's type where autocast is on; whether one of ``inputs`` and ``parameters`` needs a
        gradient; ``parameters`` in that type or one :class:`Held`.

    Raises:
        TypeError: dtypes differ.
        ValueError: devices differ.
    """
    dtype = autocast_type(inputs[0])
    if dtype is not None:
        inputs, parameters = ([tensor.to(dtype) for tensor in tensors] for tensors in (inputs, parameters))
    if not torch.is_grad_enabled():
        save, arguments = False, parameters
    elif any(map(_REQUIRES_GRAD, inputs)):
        save, arguments = True, hold(parameters)
    else:
        save, arguments = any(map(_REQUIRES_GRAD, parameters)), parameters
    check_types(name, inputs, alike(arguments))
    return inputs, save, arguments


def check_types(name: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Raise an error where activations and parameters of one call differ in type or device.

    Of parameters that are held (:func:`ls_train.layers.gradients.hold`), which are equal in both, one is enough.

    Raises:
        TypeError: dtypes differ.
        ValueError: devices differ.
    """
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in (*tensors[1:], *parameters):
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: input is {dtype} but a parameter or second input is {tensor.dtype}; convert the module "
                "(.half(), .bfloat16(), .float()), the input, or use torch.autocast"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name}: input is on {device} but a parameter or second input is on {tensor.device}; move the "
                "module or the input with .to(device)"
            )


def dropout_seed(seed: Tensor | None, probabilities: Sequence[float], like: Tensor) -> Tensor | None:
    """Return ``seed``, a fresh one where it is None and some dropout is on, or None without dropout.

    Raises:
        TypeError: the seed is not int64.
        ValueError: its shape is not (1,) or it is on another device than ``like``.
    """
    if not any(probabilities):
        return None
    if seed is None:
        return rng.draw_seed(like.device)
    if seed.dtype != torch.int64:
        raise TypeError(f"seed has dtype {seed.dtype}; pass one from ls_train.rng.draw_seed(device), which is int64")
    if seed.shape != (1,) or seed.device != like.device:
        raise ValueError(
            f"seed has shape {tuple(seed.shape)} on {seed.device}; it needs shape (1,) on {like.device}, see "
            "ls_train.rng.draw_seed(device)"
        )
    return seed


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``, which ``torch.compile`` calls as it is instead of tracing into it."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function.apply)(*arguments)
    if _in_transform is None or _in_transform():
        return function.apply(*arguments)
    # What torch.autograd.Function wraps around it serves torch.func alone, and takes a twentieth of a call's host time.
    return super(torch.autograd.Function, function).apply(*arguments)


_in_transform = getattr(torch._C, "_are_functorch_transforms_active", None)  # not public


def layer_config(
    embed_dim: int | None,
    num_heads: int | None,
    ffn_dim: int | None,
    dropout: float,
    attention_dropout: float,
    activation_dropout: float,
    activation: str,
    normalize_before: bool,
    eps: float,
) -> LayerConfig:
    """Return the configuration that torch-style constructor arguments describe.

    Raises:
        ValueError: a size is missing or an argument has a bad value.
    """
    if embed_dim is None or num_heads is None:
        raise ValueError("give a config from get_config(...), or embed_dim= and num_heads=")
    config = LayerConfig(
        hidden_size=embed_dim,
        intermediate_size=4 * embed_dim if ffn_dim is None else ffn_dim,
        nhead=num_heads,
        attn_prob_dropout_ratio=attention_dropout,
        activation_dropout_ratio=activation_dropout,
        hidden_dropout_ratio=dropout,
        pre_layer_norm=normalize_before,
        activation_fn=activation,
        layer_norm_eps=eps,
    )
    try:
        config.check()
    except ValueError as error:
        message = str(error)
        for field, argument in _ARGUMENTS.items():
            message = message.replace(field, argument)
        raise ValueError(message) from None
    return config


def check_batch(name: str, x: Tensor, embed_dim: int) -> None:
    """Raise a ValueError unless ``x`` has shape (B, T, ``embed_dim``)."""
    if x.dim() != 3 or x.shape[2] != embed_dim:
        raise ValueError(f"{name} must have shape (batch, length, {embed_dim}), got {tuple(x.shape)}")


def check_rows(layer: str, name: str, x: Tensor, embed_dim: int, packing: Packing) -> None:
    """Raise a ValueError unless ``x`` has shape (N, ``embed_dim``) with the N rows of ``packing``."""
    rows = packing.positions.shape[0]
    if x.shape != (rows, embed_dim):
        raise ValueError(
            f"{layer}: packed {name} must have shape (rows, {embed_dim}) with the {rows} rows of the packing, got "
            f"{tuple(x.shape)}"
        )


def parameters_of(layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return weight and bias of each module, one after another."""
    try:  # much faster than attributes of modules
        return tuple(chain.from_iterable(map(_WEIGHT_AND_BIAS, map(_OWN_PARAMETERS, layers))))
    except KeyError:
        return tuple(parameter for module in layers for parameter in (module.weight, module.bias))  # parametrised


def children(module: nn.Module, *names: str) -> list[nn.Module]:
    """Return the submodules ``names`` of ``module``."""
    own = module._modules  # much faster than attributes of modules
    try:
        return list(map(own.__getitem__, names))
    except KeyError:
        return [getattr(module, name) for name in names]  # wrapped

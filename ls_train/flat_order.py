"""Order of parameters in a flat buffer: what is multiplied together lies together."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 64  # elements: every group of parameters that is multiplied together starts at a multiple of 128 bytes

_SELF_ATTENTION = re.compile(r"^(.*?)self_attn\.([qkv])_proj\.(weight|bias)$")
_CROSS_ATTENTION = re.compile(r"^(.*?)(\d+)\.encoder_attn\.([kv])_proj\.(weight|bias)$")


def keep_together(tensors: Iterable[Tensor]) -> None:
    """Declare that parameters are to lie directly one after another, in this order, once they are flattened.

    Called by a layer for (q, k, v) weights and biases, and by a decoder for all layers' cross k0, v0, k1, v1, ...
    A parameter belongs to one such group; a later call replaces an earlier one. ``Module.half`` and ``Module.to`` keep
    the declaration, ``copy.deepcopy`` drops it: a module may declare again in ``__setstate__``.
    """
    key = uuid.uuid4().hex
    for index, tensor in enumerate(tensors):
        tensor.flat_group = (key, index)


def group_of(param: Tensor, name: str | None) -> tuple:
    """Return (key, index): parameters of one key lie together, ordered by index."""
    hint = getattr(param, "flat_group", None)
    if hint is not None:
        return hint
    if name is not None and (match := _SELF_ATTENTION.match(name)):
        prefix, projection, kind = match.groups()
        return (prefix, "self_attn", kind), "qkv".index(projection)
    if name is not None and (match := _CROSS_ATTENTION.match(name)):
        prefix, layer, projection, kind = match.groups()
        return (prefix, "encoder_attn", kind), 2 * int(layer) + "kv".index(projection)
    return id(param), 0


def arrange(members: list[tuple[Tensor, tuple]], pad: bool) -> tuple[list[Tensor], list[int]]:
    """Return the parameters in buffer order and the length of each one's slot."""
    groups: dict[object, list[tuple[int, Tensor]]] = {}
    for param, (key, index) in members:
        groups.setdefault(key, []).append((index, param))
    params: list[Tensor] = []
    lengths: list[int] = []
    for group in groups.values():
        ordered = [param for _, param in sorted(group, key=lambda entry: entry[0])]
        params += ordered
        lengths += [param.numel() for param in ordered]
        if pad and len(members) > 1:
            lengths[-1] += -sum(lengths[-len(ordered) :]) % ALIGNMENT
    return params, lengths


def check_flat(param: Tensor, name: str | None) -> None:
    """Raise a ValueError where ``param`` cannot lie in a flat buffer."""
    if param.layout == torch.strided and param.is_floating_point() and param.is_leaf:
        return
    label = f"parameter {name}" if name else "a parameter"
    raise ValueError(
        f"{label} of shape {tuple(param.shape)}, dtype {param.dtype}, layout {param.layout} cannot be flattened: only "
        "dense floating-point leaf tensors can; leave it to another optimiser"
    )

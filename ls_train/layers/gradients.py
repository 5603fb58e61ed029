"""Where a layer's backward writes the gradients of its parameters.

Either into slots of a flat gradient buffer (:func:`ls_train.params.grad_slot`), or into fresh tensors that autograd
receives. Parameters that are multiplied together are opened together, so that one GEMM serves them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ls_train.params import GradSlot, grad_slot, joined


class _Opened(NamedTuple):
    members: list[int]
    tensor: Tensor
    direct: bool


class GradientWriter:
    """Gradients of one backward call.

    Args:
        names: name of each parameter, unique.
        parameters: the parameters in the same order, as saved for the backward (hooks may have replaced them).
        leaves: the same parameters as the module holds them, which decides about slots; None for none.
        needed: whether autograd wants each gradient.
    """

    def __init__(
        self,
        names: Sequence[Hashable],
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._parameters = parameters
        self._leaves = leaves
        self._needed = needed
        self._opened: list[_Opened] = []
        self._slots: dict[int, GradSlot] = {}
        self._written: set[int] = set()
        self._gradients: list[Tensor | None] = [None] * len(parameters)

    def open(self, *groups: Sequence[Hashable], always: bool = False) -> tuple[list[Tensor | None], bool]:
        """Return the tensor to write for each group of parameters and whether to add to what the tensors hold.

        Args:
            groups: names of parameters whose gradients are written as one tensor, joined in the first dimension.
            always: also give a tensor (then thrown away) where no gradient is needed, instead of None.
        """
        opened = [self._open(group, always) for group in groups]
        targets = [entry for entry in opened if entry is not None]
        accumulate = bool(targets) and all(entry.direct and self._holds(entry) for entry in targets)
        tensors: list[Tensor | None] = []
        for entry in opened:
            if entry is None:
                tensors.append(None)
                continue
            if entry.direct and self._holds(entry) and not accumulate:
                entry = _Opened(entry.members, torch.empty_like(entry.tensor), False)
            self._opened.append(entry)
            tensors.append(entry.tensor)
        for entry in targets:
            self._written.update(id(self._slots[i]) for i in entry.members if entry.direct)
        return tensors, accumulate

    def linear(self, weights: Sequence[Hashable], dy: Tensor, x: Tensor) -> None:
        """Write ``dy^T x``, the gradient of joined ``weights`` (M, K), from ``dy`` (N, M) and ``x`` (N, K)."""
        (target,), accumulate = self.open(weights)
        if target is not None:
            torch.addmm(target, dy.t(), x, beta=1 if accumulate else 0, out=target)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Mark the slots as written and return what autograd gets: a fresh gradient or None for each parameter."""
        for members, tensor, direct in self._opened:
            start = 0
            for i in members:
                rows = self._parameters[i].shape[0]
                slot = self._slots.get(i)
                if slot is None:
                    if self._needed[i]:
                        self._gradients[i] = tensor if len(members) == 1 else tensor[start : start + rows]
                elif direct:
                    slot.commit()
                else:
                    part = tensor[start : start + rows]
                    slot.tensor.add_(part) if slot.written else slot.tensor.copy_(part)
                    slot.commit()
                start += rows
        return tuple(self._gradients)

    def _open(self, group: Sequence[Hashable], always: bool) -> _Opened | None:
        members = [self._index[name] for name in group]
        needed = [i for i in members if self._needed[i]]
        if not needed and not always:
            return None
        leaves = self._leaves
        slots = {i: slot for i in needed if leaves[i] is not None and (slot := grad_slot(leaves[i])) is not None}
        self._slots.update(slots)
        if len(slots) == len(members) and len({self._slot_holds(slot) for slot in slots.values()}) == 1:
            tensor = joined([slots[i].tensor for i in members])
            if tensor is not None:
                return _Opened(members, tensor, True)
        first = self._parameters[members[0]]
        rows = sum(self._parameters[i].shape[0] for i in members)
        return _Opened(members, first.new_empty((rows, *first.shape[1:])), False)

    def _slot_holds(self, slot: GradSlot) -> bool:
        return slot.written or id(slot) in self._written

    def _holds(self, entry: _Opened) -> bool:
        return self._slot_holds(self._slots[entry.members[0]])

"""Places of gradients in a flat gradient buffer, one by one and for a layer together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")


class GradSlot:
    """Place of one parameter's gradient in the flat gradient buffer.

    Attributes:
        param: the parameter.
        tensor: view of the flat gradient buffer with the parameter's shape.
    """

    __slots__ = ("_listeners", "param", "tensor")

    def __init__(self, param: Tensor, tensor: Tensor, listeners: Sequence[Callable[[GradSlot], None]]) -> None:
        self.param = param
        self.tensor = tensor
        self._listeners = listeners

    @property
    def written(self) -> bool:
        """Whether the slot holds a gradient: the writer then adds to it, otherwise it overwrites.

        It follows ``param.grad``, so every way of clearing gradients, ``param.grad = None`` included, empties the slot.
        """
        return self.param.grad is self.tensor

    def commit(self) -> None:
        """Make the slot the parameter's ``.grad``, after writing; a gradient autograd left there is added to it."""
        grad = self.param.grad
        if grad is not self.tensor:
            if grad is not None:
                self.tensor.add_(grad)
            self.param.grad = self.tensor
        for listener in self._listeners:
            listener(self)


class GradSlots:
    """Slots of the parameters of one layer, in the layer's order.

    Attributes:
        slots: one for each parameter, no two equal.
        params: their parameters.
        generation: for whoever hands them out, to tell when they are no longer valid.
        remembered: for whoever uses them: what it made of the slots and their parameters.
    """

    __slots__ = ("_pointers", "_tensors", "generation", "params", "remembered", "slots")

    def __init__(self, slots: Sequence[GradSlot], pointers: Sequence[int], generation: int) -> None:
        """Make it of ``slots``, whose parameters' buffer put them at the addresses ``pointers``."""
        self.slots = tuple(slots)
        self.params = tuple(slot.param for slot in slots)
        self.generation = generation
        self.remembered: dict[Any, Any] = {}
        self._tensors = [slot.tensor for slot in slots]
        self._pointers = list(pointers)

    @staticmethod
    def commit(slots: Sequence[GradSlot], written: bool) -> None:
        """Commit ``slots`` of one buffer, in one go: :meth:`state` was ``written`` before they were written."""
        if not written:
            for slot in slots:
                slot.param.grad = slot.tensor
        if slots[0]._listeners:
            for slot in slots:
                for listener in slot._listeners:
                    listener(slot)

    def state(self) -> bool | None:
        """Return whether all slots are written, or all empty.

        None where they differ, autograd left a gradient or a parameter was frozen since the forward.
        """
        if not all(map(_REQUIRES_GRAD, self.params)):
            return None
        grads = list(map(_GRAD, self.params))
        if grads[0] is None:
            return False if grads.count(None) == len(grads) else None
        return True if all(map(operator.is_, grads, self._tensors)) else None

    def in_place(self) -> bool:
        """Return whether all parameters lie where their buffer put them, so that none was converted since."""
        return list(map(Tensor.data_ptr, self.params)) == self._pointers

"""Where a layer's backward writes the gradients of its parameters.

Either into slots of a flat gradient buffer (:func:`ls_train.params.grad_slot`), or into fresh tensors that autograd
receives. Parameters that are multiplied together are opened together, so that one GEMM serves them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ls_train.grad_slots import GradSlot, GradSlots
from ls_train.memory import Workspace
from ls_train.ops._product import product
from ls_train.params import are_current, grad_slot, grad_slots, joined

_VERSION = operator.attrgetter("_version")


class Held:
    """Parameters of one call that autograd does not get to see, because their gradients all go into slots.

    Autograd takes host time for each input of a function, and again for the gradient that never comes.
    """

    __slots__ = ("_versions", "slots", "tensors")

    def __init__(self, slots: GradSlots) -> None:
        self.slots = slots
        self.tensors = slots.params
        self._versions = list(map(_VERSION, slots.params))

    def state(self) -> bool | None:
        """Return :meth:`GradSlots.state` where gradients are still to go to the slots, else None."""
        return self.slots.state() if are_current(self.slots) else None

    def check(self) -> None:
        """Raise a RuntimeError if a parameter was changed since the forward, as autograd would."""
        if list(map(_VERSION, self.tensors)) != self._versions:
            i = next(i for i, version in enumerate(self._versions) if self.tensors[i]._version != version)
            raise RuntimeError(
                f"a parameter of shape {tuple(self.tensors[i].shape)}, needed for gradient computation, has been "
                "modified by an inplace operation between forward and backward; run the backward first"
            )


def hold(parameters: Sequence[Tensor]) -> Sequence[Tensor] | tuple[Held]:
    """Return the arguments by which an autograd function takes ``parameters``: themselves, or one :class:`Held`.

    They are held where all gradients go into slots and nothing hooks into them. Another input of the function must need
    a gradient, so that the backward is called without them.
    """
    if torch.compiler.is_compiling():
        return parameters
    slots = grad_slots(parameters)
    if slots is None:
        return parameters
    for parameter in parameters:
        if not parameter.requires_grad or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return parameters
    return (Held(slots),)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward`` of an autograd function for gradients that have no gradients themselves.

    torch's own decorator switches gradients off even where they are, which takes longer than the rest of it.
    """
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def called(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return guarded(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return called


def given(arguments: Sequence[Tensor] | tuple[Held]) -> tuple[Sequence[Tensor], Held | None]:
    """Return the parameters that ``arguments`` of :func:`hold` stand for, and what stood for them if they are held."""
    held = arguments[0]
    return (held.tensors, held) if isinstance(held, Held) else (arguments, None)


def alike(arguments: Sequence[Tensor] | tuple[Held]) -> Sequence[Tensor]:
    """Return parameters among ``arguments`` of :func:`hold` with every dtype and device: held ones have but one."""
    return arguments[0].tensors[:1] if isinstance(arguments[0], Held) else arguments


def save_parameters(ctx: FunctionCtx, arguments: Sequence[Tensor] | tuple[Held], *tensors: Tensor) -> None:
    """Save ``tensors`` and the parameters of ``arguments`` for :func:`saved_parameters`."""
    if isinstance(arguments[0], Held):
        ctx.held = arguments[0]
        ctx.save_for_backward(*tensors)
    else:
        ctx.held = None
        ctx.leaves = [parameter if parameter.is_leaf else None for parameter in arguments]
        ctx.save_for_backward(*tensors, *arguments)


def saved_parameters(ctx: FunctionCtx, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the ``count`` tensors and the parameters that :func:`save_parameters` saved."""
    saved = ctx.saved_tensors
    if ctx.held is None:
        return saved[:count], saved[count:]
    ctx.held.check()
    return saved, ctx.held.tensors


def _repeats(leaves: Sequence[Tensor | None]) -> bool:
    known = [id(leaf) for leaf in leaves if leaf is not None]
    return len(set(known)) < len(known)


class _Opened(NamedTuple):
    members: Sequence[int]
    tensor: Tensor
    direct: bool


class Joint(NamedTuple):
    """Slots of all parameters of a layer.

    Attributes:
        tensors: one for each group, its slots joined.
        slots: of all groups.
    """

    tensors: list[Tensor]
    slots: list[GradSlot]


def joint_slots(slots: GradSlots, groups: Sequence[Sequence[Hashable]], index: Mapping[Hashable, int]) -> Joint | None:
    """Return ``slots`` joined by group, remembered, or None where those of a group do not lie together.

    Args:
        slots: of a layer's parameters.
        groups: names of the parameters.
        index: place of each parameter in ``slots``, by name.
    """
    if groups not in slots.remembered:
        members = [[slots.slots[index[name]] for name in group] for group in groups]
        tensors = [group[0].tensor if len(group) == 1 else joined([slot.tensor for slot in group]) for group in members]
        together = all(tensor is not None for tensor in tensors)
        joint = Joint(tensors, [slot for group in members for slot in group]) if together else None
        slots.remembered[groups] = joint
    return slots.remembered[groups]


class GradientWriter:
    """Gradients of one backward call.

    Where all parameters have slots in one state (the rule), what :meth:`open` returns is remembered with the slots.
    A parameter must then always come in the same group.

    Args:
        index: place of each parameter, by name.
        parameters: the parameters as saved for the backward (hooks may have replaced them).
        leaves: the same parameters as the module holds them, which decides about slots; None for none.
        needed: whether autograd wants each gradient.
        scratch: where the caller's temporaries come from.
        held: what stood for the parameters, if they are held; then ``leaves`` are ``parameters``.

    Attributes:
        held: the argument.
        complete: whether autograd wants the gradients of all parameters, none of which comes twice.
    """

    def __init__(
        self,
        index: Mapping[Hashable, int],
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor | None],
        needed: Sequence[bool],
        scratch: Workspace | None = None,
        held: Held | None = None,
    ) -> None:
        self._scratch = scratch
        if held is not None:
            slots, self._written = held.slots, held.state()
        else:
            slots = grad_slots(leaves) if all(needed) else None
            self._written = None if slots is None else slots.state()
        self._direct: GradSlots | None = None if self._written is None else slots
        self.complete = slots is not None or (all(needed) and not _repeats(leaves))
        self._begun: dict[int, Joint] = {}
        self._index = index
        self._parameters = parameters
        self._leaves = leaves
        self._needed = needed
        self.held = held
        self._opened: list[_Opened] = []
        self._slots: dict[int, GradSlot] = {}
        self._handed_out: set[int] = set()
        self._gradients: list[Tensor | None] = [None] * len(parameters)

    @classmethod
    def of(
        cls,
        ctx: FunctionCtx,
        index: Mapping[Hashable, int],
        parameters: Sequence[Tensor],
        scratch: Workspace | None = None,
    ) -> GradientWriter:
        """Return the writer of a backward whose last arguments were ``parameters``, saved by :func:`save_parameters`.

        The other arguments are those of the constructor.
        """
        if ctx.held is None:
            needed = ctx.needs_input_grad[-len(parameters) :]
            return cls(index, parameters, ctx.leaves, needed, scratch)
        return cls(index, parameters, parameters, (True,) * len(parameters), scratch, ctx.held)

    def open(self, *groups: Sequence[Hashable], always: bool = False) -> tuple[list[Tensor | None], bool]:
        """Return the tensor to write for each group of parameters and whether to add to what the tensors hold.

        Args:
            groups: names of parameters whose gradients are written as one tensor, joined in the first dimension.
            always: also give a tensor (then thrown away) where no gradient is needed, instead of None.
        """
        if self._direct is not None:
            joint = joint_slots(self._direct, groups, self._index)
            if joint is not None:
                accumulate = self._written or id(joint) in self._begun
                self._begun[id(joint)] = joint
                return joint.tensors, accumulate
        entries = [self._open([self._index[name] for name in group], always) for group in groups]
        holding = [entry is not None and entry.direct and self._holds(entry.members[0]) for entry in entries]
        accumulate = any(holding) and all(entry is None or holds for entry, holds in zip(entries, holding))
        tensors: list[Tensor | None] = []
        for entry, holds in zip(entries, holding):
            if entry is None:
                tensors.append(None)
                continue
            if entry.direct:
                self._handed_out.update(id(self._slots[i]) for i in entry.members)
            if holds and not accumulate:
                entry = _Opened(entry.members, torch.empty_like(entry.tensor), False)
            self._opened.append(entry)
            tensors.append(entry.tensor)
        return tensors, accumulate

    def linear(self, weights: Sequence[Hashable], dy: Tensor, x: Tensor) -> None:
        """Write ``dy^T x``, the gradient of joined ``weights`` (M, K), from ``dy`` (N, M) and ``x`` (N, K)."""
        (target,), accumulate = self.open(weights)
        if target is not None:
            dy_t = dy.t() if self._scratch is None else self._scratch.view(dy, torch.t)
            product(target, dy_t, x, accumulate=accumulate)

    def finish(self) -> list[Tensor | None]:
        """Mark the slots as written and return what autograd gets: a fresh gradient or None for each argument."""
        for joint in self._begun.values():
            GradSlots.commit(joint.slots, self._written)
        for members, tensor, direct in self._opened:
            start = 0
            for i in members:
                rows = self._parameters[i].shape[0]
                slot = self._slots.get(i)
                if slot is not None and direct:
                    slot.commit()
                elif slot is not None:
                    part = tensor[start : start + rows]
                    slot.tensor.add_(part) if slot.written else slot.tensor.copy_(part)
                    slot.commit()
                elif self._needed[i]:
                    self._gradients[i] = tensor if len(members) == 1 else tensor[start : start + rows]
                start += rows
        if self.held is None:
            return self._gradients
        if self._opened:
            # A slot may have gone since the forward.
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                if gradient is not None and parameter.requires_grad:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return [None]

    def _open(self, members: Sequence[int], always: bool) -> _Opened | None:
        missing = False
        for i in members:
            leaf = self._leaves[i] if self._needed[i] else None
            slot = None if leaf is None else grad_slot(leaf)
            if slot is None:
                missing = True
            else:
                self._slots[i] = slot
        if not missing:
            slots = [self._slots[i] for i in members]
            if len(slots) == 1:
                return _Opened(members, slots[0].tensor, True)
            first = self._holds(members[0])
            if all(self._holds(i) == first for i in members):
                tensor = joined([slot.tensor for slot in slots])
                if tensor is not None:
                    return _Opened(members, tensor, True)
        elif not always and not any(self._needed[i] for i in members):
            return None
        first = self._parameters[members[0]]
        if len(members) == 1:
            return _Opened(members, torch.empty_like(first), False)
        rows = sum(self._parameters[i].shape[0] for i in members)
        return _Opened(members, first.new_empty((rows, *first.shape[1:])), False)

    def _holds(self, member: int) -> bool:
        slot = self._slots[member]
        return slot.written or id(slot) in self._handed_out

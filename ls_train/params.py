"""Flat parameter and gradient buffers that ordinary ``nn.Parameter`` objects are windows of.

Layers create ordinary parameters. Where the optimiser is built, :class:`FlatParameters` moves them into one buffer per
(dtype, device, trainable or frozen): the optimiser then runs once over the buffer, and matrices that are multiplied
together lie together, so that q, k and v are one GEMM (:func:`joined`).

- Each parameter keeps a storage of its own that covers exactly its elements (an alias of the buffer's memory made with
  DLPack). ``state_dict``, ``torch.save`` and pickle therefore store a parameter and not the buffer around it, and
  ``copy.deepcopy`` gives independent parameters.
- Order: layers declare what belongs together with ``keep_together``. Deepcopy drops such a declaration; parameters
  that are given with their names are recognised by fairseq's names as well (:mod:`ls_train.flat_order`).
- :meth:`FlatBuffer.intact` notices when something (``.half()``, ``param.data = ...``) took a parameter out again.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from ls_train.flat_order import arrange, check_flat, group_of
from ls_train.grad_slots import GradSlot, GradSlots

_UNKNOWN = None, None
_REMEMBERED = 4096  # views and groups of slots that one buffer remembers

# id(parameter) -> weak reference to the FlatBuffer that owns it and keeps it, and so the id, alive
_owners: dict[int, weakref.ref[FlatBuffer]] = {}

_generation = 0  # how often a buffer was built or moved so far


def grad_slot(param: Tensor) -> GradSlot | None:
    """Return where to write the gradient of ``param``, or None: then return a fresh gradient to autograd.

    There is a slot only while a :class:`FlatParameters` with ``direct_grads`` owns exactly this tensor object, in the
    dtype and on the device that it had when it was flattened, and while it needs a gradient: autograd drops that of a
    parameter that was frozen since the forward.
    """
    buffer = _owner(param)
    if buffer is None or not buffer.direct_grads or not param.requires_grad:
        return None
    return buffer.slot(param) if buffer.fits(param) else None


def grad_slots(params: Sequence[Tensor | None]) -> GradSlots | None:
    """Return the slots of ``params`` together, or None where one has no slot, comes twice or is another buffer's."""
    buffer = _owner(params[0])
    return buffer.slots(params) if buffer is not None and buffer.direct_grads else None


def are_current(slots: GradSlots) -> bool:
    """Return whether gradients are still to go to ``slots``, which :func:`grad_slots` returned before."""
    first = slots.params[0]
    buffer = _owner(first)
    if buffer is None or not buffer.direct_grads or slots.generation != _generation:
        return False
    return buffer.slot(first) is slots.slots[0]


def transposed(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the transpose of :func:`joined`, remembered for parameters of a flat buffer."""
    buffer = _owner(tensors[0])
    if buffer is not None:
        views = buffer.views(tensors)
        if views is not None:
            return views[1]
    view = tensors[0] if len(tensors) == 1 else joined(tensors)
    return None if view is None else view.t()


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one view ``(sum of rows, ...)`` of tensors that lie directly one after another, else None.

    Works for parameters of one flat buffer, for gradient slots and for views of one storage. The view carries no
    autograd history.
    """
    first = tensors[0]
    buffer = _owner(first)
    if buffer is not None:
        views = buffer.views(tensors)
        return None if views is None else views[0]
    if any(t.dtype != first.dtype or t.shape[1:] != first.shape[1:] for t in tensors):
        return None
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != offset:
            return None
        if not tensor.is_contiguous():
            return None
        offset += tensor.numel()
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


class FlatBuffer:
    """Parameters of one dtype and device in one contiguous tensor.

    Parameter (slot) s owns ``data[begins[s] : begins[s] + params[s].numel()]``. Up to ``begins[s + 1]`` follows
    padding, which is zero and stays zero.

    Attributes:
        params: the parameters in buffer order.
        begins: first element of each slot, and the length of the buffer as last entry.
        data: (n,) parameters.
        segments: int64 (S + 1,) ``begins`` on the device.
        direct_grads: whether :func:`grad_slot` hands out the slots.
        listeners: called with each slot that was written.
    """

    def __init__(self, params: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Move ``params`` into a new buffer, the slot of parameter s being ``lengths[s]`` elements long.

        A single parameter that is contiguous already and needs no padding stays where it is.
        """
        self.params = tuple(params)
        self.direct_grads = False
        self._keeps_grad = False  # a gradient of autograd's never takes the place of ``grad``
        self.listeners: list[Callable[[GradSlot], None]] = []
        self.begins = [0]
        for length in lengths:
            self.begins.append(self.begins[-1] + length)
        first = self.params[0]
        self.segments = torch.tensor(self.begins).to(first.device)
        if len(self.params) == 1 and first.is_contiguous() and lengths[0] == first.numel():
            self.data = first.detach().view(-1)
        else:
            self._place(torch.zeros(self.begins[-1], dtype=first.dtype, device=first.device))
        self._index = {id(param): slot for slot, param in enumerate(self.params)}
        self._start_empty()
        ids = list(self._index)
        reference = weakref.ref(self, lambda gone: _forget(ids, gone))
        _owners.update(dict.fromkeys(ids, reference))

    def move(self, data: Tensor, grad: Tensor) -> None:
        """Move the parameters to other memory on their device; whoever holds views of the old one has to let go of it.

        Args:
            data: (n,), overwritten.
            grad: (n,), overwritten: gradients lie there from now on, and what there are now are dropped.
        """
        self._keeps_grad = True
        self._place(data.zero_())
        for param in self.params:
            param.grad = None
        self._start_empty()
        self._allocate_grads(grad.zero_())

    @property
    def grad(self) -> Tensor:
        """Gradients (n,), laid out like ``data``; allocated at first use."""
        self._allocate_grads()
        return self._grad

    def slot(self, param: Tensor) -> GradSlot:
        """Return the gradient slot of ``param``, which this buffer must own."""
        self._allocate_grads()
        return self._slots[self._index[id(param)]]

    def slots(self, params: Sequence[Tensor | None]) -> GradSlots | None:
        """Return the slots of ``params``, or None where one is not this buffer's, comes twice or was converted."""
        key = tuple(map(id, params))
        generation, group = self._groups.get(key, _UNKNOWN)
        if generation != _generation:
            self._allocate_grads()
            group = None
            if len(set(key)) == len(key) and all(_owner(param) is self for param in params):
                members = [self._index[i] for i in key]
                slots, pointers = ([values[i] for i in members] for values in (self._slots, self._pointers))
                group = GradSlots(slots, pointers, _generation)
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()
            self._groups[key] = _generation, group
        return group if group is not None and (group.in_place() or all(map(self.fits, params))) else None

    def fits(self, param: Tensor) -> bool:
        """Return whether ``param`` has the buffer's dtype and device, so that its slot can take its gradient."""
        return param.dtype is self.data.dtype and param.device == self.data.device

    def intact(self) -> bool:
        """Return whether every parameter still lies where this buffer put it."""
        return [param.data_ptr() for param in self.params] == self._pointers

    def window(self, flat: Tensor, slot: int) -> Tensor:
        """Return the part of ``flat`` (n,) that is ``slot``'s, in the parameter's shape and as a storage of its own."""
        return self._window(flat, self.begins[slot], self.params[slot])

    def views(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the view of parameters ``tensors`` if they are neighbours in this buffer, else None.

        With it comes its transpose; what is not a matrix stands in for its own.
        """
        key = tuple(map(id, tensors))
        pointers = [tensor.data_ptr() for tensor in tensors]
        known = self._views.get(key)
        if known is not None and known[0] == pointers:
            return known[1:]
        view = self._joined(tensors)
        if view is None:
            return None
        if len(self._views) >= _REMEMBERED:
            self._views.clear()
        with torch.inference_mode(False), torch.no_grad():
            self._views[key] = pointers, view, view.t() if view.dim() == 2 else view
        return self._views[key][1:]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor | None:
        shape = tensors[0].shape
        slot = self._index[id(tensors[0])]
        begin = end = self.begins[slot]
        for tensor in tensors:
            if slot == len(self.params) or self.params[slot] is not tensor or self.begins[slot] != end:
                return None
            if tensor.data_ptr() != self._pointers[slot]:
                return None
            if tensor.shape[1:] != shape[1:] or tensor.dtype != self.data.dtype:
                return None
            end += tensor.numel()
            slot += 1
        with torch.inference_mode(False), torch.no_grad():
            if len(tensors) == 1:
                return self.data[begin:end].view(shape)
            return self.data[begin:end].view(sum(t.shape[0] for t in tensors), *shape[1:])

    def collect_grads(self) -> list[bool]:
        """Bring ordinary ``.grad`` tensors into ``grad`` and return for each slot whether it has a gradient.

        ``param.grad`` becomes the slot, so that what is done to ``grad`` afterwards is seen there.

        Raises:
            TypeError: a gradient is sparse.
        """
        grads = [param.grad for param in self.params]
        if self._slots and all(map(operator.is_, grads, self._slot_tensors)):
            return [True] * len(grads)
        if all(grad is None for grad in grads):
            return [False] * len(grads)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} has layout {grad.layout}; only dense "
                    "gradients are supported, build the embedding with sparse=False"
                )
        adopts = len(grads) == 1 and not self._keeps_grad
        if adopts and grads[0].is_contiguous() and grads[0].numel() == self.data.numel():
            if self._grad is None or grads[0] is not self._slots[0].tensor:
                self._grad = grads[0].detach().view(-1)
                self._slots = [GradSlot(self.params[0], grads[0], self.listeners)]
                self._slot_tensors = [grads[0]]
                self._groups.clear()
            return [True]
        self._allocate_grads()
        stray = [s for s, g in zip(self._slots, grads, strict=True) if g is not None and g is not s.tensor]
        if stray:
            torch._foreach_copy_([slot.tensor for slot in stray], [slot.param.grad.detach() for slot in stray])
            for slot in stray:
                slot.param.grad = slot.tensor
        return [grad is not None for grad in grads]

    def _place(self, data: Tensor) -> None:
        """Move the parameters into ``data``, which is zero."""
        self.data = data
        for begin, param in zip(self.begins, self.params, strict=False):
            window = self._window(data, begin, param)
            window.copy_(param.detach())
            param.data = window

    def _start_empty(self) -> None:
        """Begin without gradients and with nothing remembered about where the parameters lie."""
        self._pointers = [param.data_ptr() for param in self.params]
        self._grad: Tensor | None = None
        self._slots: list[GradSlot] = []
        self._slot_tensors: list[Tensor] = []
        # Ownership of a parameter changes only in the constructor, so that other buffers' groups are valid until then.
        self._groups: dict[tuple[int, ...], tuple[int, GradSlots | None]] = {}
        self._views: dict[tuple[int, ...], tuple[list[int], Tensor, Tensor]] = {}
        global _generation
        _generation += 1

    def _allocate_grads(self, grad: Tensor | None = None) -> None:
        if self._grad is None:
            self._grad = torch.zeros_like(self.data) if grad is None else grad
            self._slots = [
                GradSlot(param, self._grad[begin : begin + param.numel()].view(param.shape), self.listeners)
                for begin, param in zip(self.begins, self.params, strict=False)
            ]
            self._slot_tensors = [slot.tensor for slot in self._slots]

    @staticmethod
    def _window(flat: Tensor, begin: int, param: Tensor) -> Tensor:
        view = flat[begin : begin + param.numel()].view(param.shape)
        return from_dlpack(to_dlpack(view))


class FlatParameters:
    """Parameters of any number of dtypes and devices in flat buffers.

    Attributes:
        buffers: one :class:`FlatBuffer` per (dtype, device, trainable or frozen), in order of first appearance.
    """

    def __init__(self, params: Iterable[Tensor | tuple[str, Tensor]], flatten: bool = True) -> None:
        """Flatten ``params``, to be called after ``.half()``, ``.to()`` and tying.

        Args:
            params: parameters or (name, parameter) pairs; one that comes more than once (tied) gets one slot.
            flatten: False gives every parameter a buffer of its own and leaves it where it is.

        Raises:
            ValueError: a parameter is not a dense floating-point leaf tensor.
        """
        kinds: dict[tuple, list[tuple[Tensor, tuple]]] = {}
        seen: set[int] = set()
        for entry in params:
            name, param = entry if isinstance(entry, tuple) else (None, entry)
            if id(param) in seen:
                continue
            seen.add(id(param))
            check_flat(param, name)
            kind = (param.dtype, param.device, param.requires_grad) if flatten else id(param)
            kinds.setdefault(kind, []).append((param, group_of(param, name)))
        self.buffers = [FlatBuffer(*arrange(members, flatten)) for members in kinds.values()]
        self._direct_grads = False

    @property
    def direct_grads(self) -> bool:
        """Whether layers write gradients straight into the flat buffer and return none to autograd.

        Gradient hooks, DDP and ``torch.autograd.grad`` do not see such gradients: only who owns the whole training
        step may switch this on.
        """
        return self._direct_grads

    @direct_grads.setter
    def direct_grads(self, on: bool) -> None:
        self._direct_grads = on
        for buffer in self.buffers:
            buffer.direct_grads = on

    def intact(self) -> bool:
        """Return whether every parameter still lies where it was put."""
        return all(buffer.intact() for buffer in self.buffers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients: drop them, or set them to zero."""
        for buffer in self.buffers:
            for param in buffer.params:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach().zero_()


def _owner(tensor: Tensor) -> FlatBuffer | None:
    reference = _owners.get(id(tensor))
    return reference() if reference is not None else None


def _forget(ids: Sequence[int], gone: weakref.ref[FlatBuffer]) -> None:
    for i in ids:
        if _owners.get(i) is gone:
            del _owners[i]

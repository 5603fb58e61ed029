"""Adam's state over one flat parameter buffer, and the two operator calls of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ls_train.compact_master import join_master, rounds_to, split_master
from ls_train.ops.grad_norm import grad_norm_workspace
from ls_train.optim.options import is_capturing, upload
from ls_train.params import FlatBuffer

_CHOICES = 64  # of active slots that are remembered besides those that graphs read


@dataclass(frozen=True)
class AdamForm:
    """The variants of the update rule, the same for all parameters of an optimiser.

    Attributes:
        decoupled_weight_decay: ``p -= lr * weight_decay * p`` (AdamW, fairseq) instead of adding the decay to the
            gradient (Adam).
        bias_correction: divide the moments by ``1 - beta ** step``.
        eps_after_correction: add eps to the corrected ``sqrt(v / (1 - beta2 ** step))`` (torch) instead of to
            ``sqrt(v)`` (fairseq, Apex).
    """

    decoupled_weight_decay: bool = True
    bias_correction: bool = True
    eps_after_correction: bool = True


@dataclass(frozen=True)
class _Part:
    """A run of elements of a buffer; segments: int64 (S + 1,) where the slots begin in it; norm, found_inf: of it."""

    elements: slice
    segments: Tensor
    norm: Tensor
    found_inf: Tensor


class Moments:
    """Moments, float32 master parameters and step counts of the parameters of one :class:`FlatBuffer`.

    All of it is on the parameters' device. Parameters without a gradient keep their moments and their step count.

    Attributes:
        buffer: the parameters.
        groups: index of the parameter group of each slot.
        started: whether each slot has ever been updated.
        norm: float32 (1,) L2 norm of the gradients, written by :meth:`measure_grads`.
        found_inf: float32 (1,) 1 where a gradient is not finite, else 0, written by :meth:`measure_grads`.
    """

    def __init__(self, buffer: FlatBuffer, groups: list[int], compact_master: bool = False) -> None:
        """Make the state of ``buffer``, whose slots belong to parameter ``groups``; moments and steps are 0.

        A compact master is 16 bits a parameter (:mod:`ls_train.compact_master`) where parameters have 16.
        """
        data = buffer.data
        device = data.device
        wide = torch.float64 if data.dtype == torch.float64 else torch.float32
        slots = len(buffer.params)
        self.buffer = buffer
        self.groups = groups
        self.started = [False] * slots
        self.exp_avg = torch.zeros_like(data, dtype=wide)
        self.exp_avg_sq = torch.zeros_like(data, dtype=wide)
        narrow = data.dtype in (torch.float16, torch.bfloat16)
        self.master = data.to(wide) if narrow and not compact_master else None
        self.remainder = torch.zeros_like(data, dtype=torch.int16) if narrow and compact_master else None
        self.steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self.norm = torch.zeros(1, dtype=torch.float32, device=device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self._segment_group = upload(torch.empty(slots, dtype=torch.int32, device=device), groups)
        self._update = torch.zeros(2, dtype=torch.int64, device=device)
        self._grad_scale = torch.ones(1, dtype=torch.float32, device=device)
        self._workspace = torch.empty(grad_norm_workspace(), dtype=torch.float32, device=device)
        self._active = [True] * slots
        self._active_tensor: Tensor | None = None
        self._active_tensors: dict[tuple[bool, ...], Tensor] = {}
        self._captured: dict[tuple[bool, ...], Tensor] = {}
        self._versions = self._versions_now()
        self._parts: list[_Part] | None = None
        self._measured: Tensor | None = None  # norms and flags of the parts, (2, parts)

    def restrict(self, parts: Sequence[slice]) -> None:
        """Measure and update ``parts`` of the buffer only, which another rank does with the rest."""
        begins = self.buffer.segments
        self._measured = self.norm.new_zeros(2, len(parts))
        self._parts = [
            _Part(part, (begins - part.start).clamp(0, part.stop - part.start), norm, found_inf)
            for part, norm, found_inf in zip(parts, *(row.split(1) for row in self._measured), strict=True)
        ]

    def set_active(self, active: list[bool]) -> None:
        """Choose the slots that take part in what follows; the device learns of a choice when it comes first.

        Raises:
            RuntimeError: it comes first while a graph is being captured.
        """
        if active != self._active:
            self._active_tensor = None if all(active) else self._on_device(tuple(active))
            self._active = active
        if self._active_tensor is not None and is_capturing():
            self._captured[tuple(active)] = self._active_tensor

    def _on_device(self, active: tuple[bool, ...]) -> Tensor:
        known = self._captured.get(active, self._active_tensors.get(active))
        if known is None:
            if is_capturing():
                raise RuntimeError("other parameters have a gradient than in any step before; do one without a graph")
            known = upload(torch.empty(len(active), dtype=torch.uint8, device=self.steps.device), active)
            if len(self._active_tensors) >= _CHOICES:
                self._active_tensors.clear()
            self._active_tensors[active] = known
        return known

    @property
    def updates(self) -> Tensor:
        """Number of updates done, int64 (1,) on the device; an update that overflowed does not count."""
        return self._update[:1]

    def expect(self, done: int, certain: bool) -> None:
        """Say which update column ``lr`` of the options is for: number ``done``, later ones take ``next_lr``.

        Args:
            done: number of updates done.
            certain: False where the latest one may have been skipped, which only the device knows.
        """
        if certain:
            upload(self._update, [done, done])
        else:
            upload(self._update[1:], [done])

    def measure_grads(self, arrivals: Iterable[int] | None = None) -> None:
        """Write ``norm`` and ``found_inf`` of the active slots' gradients, of this rank's parts where it has such.

        Args:
            arrivals: numbers of these parts, each yielded when it may be read; None where all may be.
        """
        grad, work, active = self.buffer.grad, self._workspace, self._active_tensor
        if self._parts is None:
            torch.ops.ls_train.grad_norm(self.norm, self.found_inf, work, grad, self.buffer.segments, active)
            return
        for number in range(len(self._parts)) if arrivals is None else arrivals:
            part = self._parts[number]
            torch.ops.ls_train.grad_norm(part.norm, part.found_inf, work, grad[part.elements], part.segments, active)
        # In the order of the parts, not of their arrival.
        torch.linalg.vector_norm(self._measured[0], dim=0, keepdim=True, out=self.norm)
        torch.amax(self._measured[1], dim=0, keepdim=True, out=self.found_inf)

    def update(
        self,
        hyper: Tensor,
        form: AdamForm,
        multiplier: Tensor | None,
        max_norm: float,
        norm: Tensor | None,
        found_inf: Tensor | None,
        updated: Callable[[int], None] = lambda part: None,
    ) -> None:
        """Do one update of the active slots; on the device nothing changes where ``found_inf`` is not 0.

        ``updated`` is called with the number of each of this rank's parts once its update is enqueued.
        """
        self._adopt_foreign_writes()
        buffer, active = self.buffer, self._active_tensor
        torch.ops.ls_train.adam_prepare(
            self.steps, self._update, self._grad_scale, active, norm, found_inf, multiplier, max_norm
        )
        parts = [(slice(None), buffer.segments)]
        if self._parts is not None:
            parts = [(part.elements, part.segments) for part in self._parts]
        flats = (buffer.data, self.master, self.remainder, self.exp_avg, self.exp_avg_sq, buffer.grad)
        for number, (elements, segments) in enumerate(parts):
            torch.ops.ls_train.adam(
                *(None if flat is None else flat[elements] for flat in flats),
                segments,
                self._segment_group,
                self.steps,
                active,
                hyper,
                self._update,
                self._grad_scale,
                found_inf,
                form.decoupled_weight_decay,
                form.bias_correction,
                form.eps_after_correction,
            )
            updated(number)
        # The operator wrote through the buffer: tell autograd, so that a backward with stale weights is an error.
        written = buffer.params
        if active is not None:
            written = [param for param, on in zip(buffer.params, self._active, strict=True) if on]
        torch.autograd.graph.increment_version(written)
        self._versions = self._versions_now()

    def not_started(self, active: list[bool]) -> list[int]:
        """Return the ``active`` slots that were never updated."""
        if all(self.started):
            return []
        return [slot for slot, (on, known) in enumerate(zip(active, self.started, strict=True)) if on and not known]

    def start(self, slot: int) -> dict[str, Any]:
        """Return the live state of ``slot``: views that every update changes."""
        self.started[slot] = True
        state = {"step": self.steps[slot]}
        for name in ("exp_avg", "exp_avg_sq", "master", "remainder"):
            flat = getattr(self, name)
            if flat is not None:
                state[name] = self.buffer.window(flat, slot)
        return state

    def restore(self, slot: int, state: dict[str, Any]) -> dict[str, Any]:
        """Copy ``state`` of one parameter, from any device and of any type, into the buffers; return the live state.

        A saved master counts only where it still rounds to the parameter: whoever changed the parameter since wins.
        """
        live = self.start(slot)
        live["step"].fill_(int(state["step"]))
        live["exp_avg"].copy_(state["exp_avg"])
        live["exp_avg_sq"].copy_(state["exp_avg_sq"])
        if "master" in state:
            if self.master is not None:
                self._merge_master(slot, state["master"])
            elif self.remainder is not None:
                self._merge_compact(slot, state["master"])
        return live

    def host_steps(self) -> list[tuple[int, int]]:
        """Return the id of each parameter that was ever updated, and its step count; one device read."""
        slots = zip(self.buffer.params, self.started, self.steps.tolist(), strict=True)
        return [(id(param), step) for param, started, step in slots if started]

    def flats(self) -> list[Tensor]:
        """Return the state's tensors that are laid out as the parameters are, (n,) each."""
        return [flat for flat in (self.exp_avg, self.exp_avg_sq, self.master, self.remainder) if flat is not None]

    def wide_parameters(self) -> Tensor:
        """Return the parameters (n,) in the widest form there is: masters where parameters have 16 bits."""
        if self.remainder is not None:
            return join_master(self.buffer.data, self.remainder)
        return self.buffer.data if self.master is None else self.master

    def _adopt_foreign_writes(self) -> None:
        """Take over 16-bit parameters that were written in place since the last update, by loading for example."""
        if self.master is None:
            return
        versions = self._versions_now()
        if versions == self._versions:
            return
        for slot, (version, known) in enumerate(zip(versions, self._versions, strict=True)):
            if version != known:
                self._merge_master(slot, self.buffer.window(self.master, slot).clone())

    def _versions_now(self) -> list[int]:
        return [param._version for param in self.buffer.params]

    def _merge_master(self, slot: int, master: Tensor) -> None:
        window = self.buffer.window(self.master, slot)
        window.copy_(self._merged(slot, master))

    def _merge_compact(self, slot: int, master: Tensor) -> None:
        flat = (self.buffer.data, self.remainder)
        for target, part in zip(flat, split_master(self._merged(slot, master), self.buffer.data.dtype), strict=True):
            self.buffer.window(target, slot).copy_(part)

    def _merged(self, slot: int, master: Tensor) -> Tensor:
        """Return ``master`` where it rounds to the parameter of ``slot``, elsewhere the parameter itself."""
        param = self.buffer.params[slot].detach()
        master = master.to(param.device, torch.float32).view_as(param)
        return torch.where(rounds_to(master, param), master, param.float())


def saved_state(param: Tensor, live: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the ``live`` state of ``param`` as it is saved: the step a number, the master float32 in either form."""
    state = {**live, "step": step}
    remainder = state.pop("remainder", None)
    if remainder is not None:
        state["master"] = join_master(param.detach(), remainder)
    return state


def check_state(key: Any, state: dict[str, Any], param: Tensor, group_step: Any) -> dict[str, Any]:
    """Return the loaded ``state`` of ``param`` with its step; ``group_step`` stands in where only the group counts.

    Raises:
        ValueError: a part is missing or has another shape than the parameter.
    """
    state = {"step": group_step, **state}
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if state.get(name) is None:
            raise ValueError(f"the state of parameter {key} has no {name}; it is not the state of an Adam optimiser")
    for name in ("exp_avg", "exp_avg_sq"):
        if state[name].shape != param.shape:
            raise ValueError(
                f"{name} of parameter {key} has shape {tuple(state[name].shape)} but the parameter has shape "
                f"{tuple(param.shape)}; load a state saved for the same parameters, flat or not flat"
            )
    return state


def wide_parameters(buffer: FlatBuffer, moments: Moments | None) -> dict[int, Tensor]:
    """Return each parameter of ``buffer`` by its id, in the widest form there is."""
    flat = buffer.data if moments is None else moments.wide_parameters()
    return {
        id(param): flat[begin : begin + param.numel()].view(param.shape)
        for begin, param in zip(buffer.begins, buffer.params, strict=False)
    }


def measured(live: Sequence[Moments], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return norm and overflow flag, float32 (1,), of the gradients of all of ``live``, which have measured theirs."""
    if len(live) == 1:
        return live[0].norm, live[0].found_inf
    if not live:
        return torch.zeros(1, device=device), torch.zeros(1, device=device)
    device = live[0].norm.device
    norms = torch.cat([moments.norm.to(device) for moments in live])
    flags = torch.cat([moments.found_inf.to(device) for moments in live])
    return torch.linalg.vector_norm(norms).view(1), flags.amax().view(1)

"""Adam and AdamW over flat buffers: one launch prepares and one updates all parameters of a dtype."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ls_train.optim.moments import AdamForm, Moments, check_state, measured, saved_state, wide_parameters
from ls_train.optim.options import NOT_SUPPORTED, DeviceOptions, check_group, inverse, on_device
from ls_train.optim.shared_update import SharedUpdate
from ls_train.params import FlatBuffer, FlatParameters

logger = logging.getLogger(__name__)


class FusedAdam(SharedUpdate, torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019) for parameters of any dtype and device.

    Building it moves the parameters into flat buffers (:class:`ls_train.params.FlatParameters`), so build it after
    ``.half()``, ``.to()`` and tying. 16-bit parameters get a float32 master copy in the state. Step counts, gradient
    norm, clip factor, loss scale and overflow flag stay on the device; a step waits for nothing and can be captured in
    a CUDA graph (learning rates that change between replays: :meth:`upload_hyper`, or a tensor as ``lr``).

    A parameter whose gradient is None is not touched and keeps its own step count. Where something takes a parameter
    out of its buffer (``.half()``, ``param.data = ...``), updates go on tensor by tensor and one line is logged.

    State dicts are exchanged with ``torch.optim.Adam``, ``torch.optim.AdamW`` and fairseq's Adam in both directions.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves scale and overflow flag to step()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        eps_after_correction: bool = True,
        flatten: bool = True,
        compact_master: bool = False,
    ) -> None:
        """Build over ``params``: parameters, (name, parameter) pairs or group dicts with their own options.

        Args:
            params: what ``torch.optim.AdamW`` takes; names help to lay out parameters of copied modules.
            lr: learning rate, may be a tensor.
            betas: decay rates of the two moments.
            eps: added to the denominator.
            weight_decay: decay rate.
            decoupled_weight_decay: AdamW's decay (default) or Adam's, see :class:`AdamForm`.
            bias_correction: see :class:`AdamForm`.
            eps_after_correction: torch's form (default) or fairseq's, see :class:`AdamForm`.
            flatten: False leaves every parameter where it is and updates tensor by tensor.
            compact_master: keep the master of 16-bit parameters in 16 bits more instead of in 32 of its own
                (:mod:`ls_train.compact_master`): 2 bytes a parameter less to store, 4 less to read and write. Exact
                with bfloat16, whose ties then round away from zero; float16 weights below 2^-16 keep a resolution of
                2^-39. A parameter that something else writes keeps its remainder, less than half its last place.

        Raises:
            ValueError: an option is out of range, or a parameter is not a dense floating-point leaf tensor.
        """
        self.form = AdamForm(decoupled_weight_decay, bias_correction, eps_after_correction)
        self._flatten = flatten
        self._compact_master = compact_master
        self._reset()
        self._built = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._build(self.param_groups)

    # Interface of torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after construction its parameters get flat buffers of their own."""
        if self._built:
            self._check_alone()
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])
        if self._built:
            self._build(self.param_groups[-1:])

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: float | Tensor = 1.0,
        max_norm: float = 0.0,
        norm: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: recomputes the loss.
            scale: gradients are divided by it.
            max_norm: clip gradients to this L2 norm (after the division), 0 for no clipping.
            norm: float32 (1,) norm of the gradients before the division, from :meth:`grad_norm`; measured if needed.
            found_inf: float32 (1,); where it is not 0 the update changes nothing, on the device.

        Returns:
            What ``closure`` returned.

        Raises:
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        amp_scale, amp_found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if amp_scale is not None:
            scale = amp_scale * scale
        if amp_found_inf is not None:
            found_inf = amp_found_inf
        if max_norm > 0 and norm is None:
            self._check_measured(norm)
            norm, _ = self.grad_norm()
        self._earlier_lr = self._done = None
        self._update(self._collect(), scale, None, max_norm, norm, found_inf)
        return loss

    @torch.no_grad()
    def measured_step(
        self,
        multiplier: Tensor | None = None,
        max_norm: float = 0.0,
        of_all_ranks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Measure the gradients and update all parameters that have one, unless an element is not finite.

        Args:
            multiplier: float32 (1,) on the device, gradients are multiplied by it; None for 1.
            max_norm: clip the multiplied gradients to this L2 norm, 0 for no clipping.
            of_all_ranks: norm and flag of all gradients where each rank updates a part (:meth:`share`).

        Returns:
            Norm of the gradients before the multiplication and the overflow flag, see :meth:`grad_norm`.
        """
        self._check_measured(of_all_ranks)
        live = self._collect()
        norm, found_inf = self._measure(live) if of_all_ranks is None else of_all_ranks
        self._update(live, 1.0, multiplier, max_norm, norm, found_inf)
        if self._done is not None:
            self._done += 1
        return norm, found_inf

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout, step counts as numbers; one device read.

        Raises:
            RuntimeError: each rank has updated a part, and the parts were not brought together.
        """
        self._check_complete()
        result = super().state_dict()
        steps = self._host_steps()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for key, state in result["state"].items():
            result["state"][key] = saved_state(params[key], state, steps[id(params[key])])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, ``torch.optim.Adam``, ``torch.optim.AdamW`` or fairseq's Adam.

        The update form (decoupled decay, bias correction, place of eps) stays that of this optimiser.

        Raises:
            ValueError: groups or shapes do not match, or the state was made with amsgrad or maximize.
        """
        saved_groups = state_dict["param_groups"]
        for group in saved_groups:
            for option in NOT_SUPPORTED:
                if group.get(option):
                    raise ValueError(f"the state was saved with {option}=True, which FusedAdam does not offer")
        super().load_state_dict({**state_dict, "state": {}})
        self._moments.clear()
        self._done = None
        self._forget_parts()
        group_steps: dict[int, Any] = {}
        for group in self.param_groups:
            step = group.pop("step", None)  # Apex counts steps per group
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group_steps.update((id(param), step) for param in group["params"])
        targets = dict(
            zip(
                chain.from_iterable(group["params"] for group in saved_groups),
                chain.from_iterable(group["params"] for group in self.param_groups),
                strict=True,
            )
        )
        restored = {}
        for key, state in state_dict["state"].items():
            param = targets.get(key)
            if param is not None:
                restored[param] = check_state(key, state, param, group_steps[id(param)])
        self._restore(restored)

    def __getstate__(self) -> dict[str, Any]:
        self._check_complete()
        steps = self._host_steps()
        state = {param: saved_state(param, values, steps[id(param)]) for param, values in self.state.items()}
        own = {"form": self.form, "_flatten": self._flatten, "_compact_master": self._compact_master}
        return {**super().__getstate__(), "state": state, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "form" in state:  # a copy or an unpickled optimiser; load_state_dict comes without
            self._reset()
            self._built = False
            self._build(self.param_groups)
            self._restore(state["state"])

    # What goes beyond it

    @property
    def direct_grads(self) -> bool:
        """Whether layers write gradients straight into the flat buffers, see :class:`FlatParameters`."""
        return self._direct_grads

    @direct_grads.setter
    def direct_grads(self, on: bool) -> None:
        self._direct_grads = on
        for buffer in self._buffers:
            buffer.direct_grads = on

    @property
    def buffers(self) -> tuple[FlatBuffer, ...]:
        """The flat buffers of all parameters; their ``grad`` holds this step's gradients after :meth:`grad_norm`."""
        return tuple(self._buffers)

    @torch.no_grad()
    def grad_norm(self) -> tuple[Tensor, Tensor]:
        """Return the gradients' L2 norm and whether one is not finite (1 or 0), float32 (1,) on the device."""
        return self._measure(self._collect())

    @torch.no_grad()
    def multiply_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or one-element tensor."""
        for moments in self._collect():
            grad = moments.buffer.grad
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)

    def clip_grads(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients, whose L2 norm is ``norm``, in place so that it is at most ``max_norm``."""
        self.multiply_grads((float(max_norm) / (norm + 1e-6)).clamp_(max=1))

    def expect(self, done: int, earlier_lr: Sequence[float] | None = None) -> None:
        """Say how many updates are done, before an update by :meth:`measured_step`.

        The device counts updates itself, without those that overflowed, so that the host need not wait for the flag of
        the latest one. It then gives the learning rates for both cases, and the kernels choose.

        Args:
            done: number of updates done.
            earlier_lr: None where that number is certain. Otherwise the latest update may have been skipped, which
                makes ``done`` the number of the coming one, with these rates for the groups instead of their ``lr``.
        """
        self._earlier_lr = earlier_lr
        if earlier_lr is not None or done != self._done:
            for buffer in self._buffers:
                self._moments_of(buffer).expect(done, certain=earlier_lr is None)
        self._done = done

    @property
    def updates(self) -> Tensor:
        """Number of updates done, int64 (1,) on the device, counted from :meth:`expect` on."""
        return self._moments_of(self._buffers[0]).updates

    def upload_hyper(self) -> None:
        """Bring the groups' options to the device where they changed; call it between replays of a captured step."""
        self._upload_options()
        for moments in self._moments.values():
            moments._adopt_foreign_writes()  # a replay cannot notice that something wrote a parameter

    # Inside

    def _upload_options(self) -> None:
        self._options.upload(self.param_groups, {buffer.data.device for buffer in self._buffers}, self._earlier_lr)

    def _reset(self) -> None:
        self._buffers: list[FlatBuffer] = []
        self._moments: dict[int, Moments] = {}  # by id of the buffer, made when its first gradient comes
        self._group_of: dict[int, int] = {}
        self._options = DeviceOptions()
        self._earlier_lr: Sequence[float] | None = None
        self._done: int | None = None  # number of updates, as far as the host knows, once expect() was called
        self._direct_grads = False
        self._split_logged = False
        self._reset_sharing()

    def _build(self, groups: list[dict[str, Any]]) -> None:
        """Flatten the parameters of ``groups``, which are the last ones of ``param_groups``."""
        named = []
        for index, group in enumerate(groups, len(self.param_groups) - len(groups)):
            names = group.get("param_names", [None] * len(group["params"]))
            for name, param in zip(names, group["params"], strict=True):
                named.append(param if name is None else (name, param))
                self._group_of[id(param)] = index
        self._add_buffers(FlatParameters(named, self._flatten).buffers)
        self._built = True

    def _add_buffers(self, buffers: list[FlatBuffer]) -> None:
        for buffer in buffers:
            buffer.direct_grads = self._direct_grads
        self._buffers += buffers
        self._options.forget()
        self._done = None

    def _collect(self) -> list[Moments]:
        """Bring this step's gradients into the flat buffers and return the state of the buffers that have any."""
        if not all(buffer.intact() for buffer in self._buffers):
            self._split()
        live = []
        for buffer in self._buffers:
            active = buffer.collect_grads()
            if not any(active):
                continue
            moments = self._moments_of(buffer)
            moments.set_active(active)
            for slot in moments.not_started(active):
                self.state[buffer.params[slot]] = moments.start(slot)
            live.append(moments)
        return live

    def _measure(self, live: list[Moments]) -> tuple[Tensor, Tensor]:
        for moments in live:
            moments.measure_grads(self._arrivals(moments.buffer))
        return measured(live, self._buffers[0].data.device)

    def _update(
        self,
        live: list[Moments],
        scale: float | Tensor,
        multiplier: Tensor | None,
        max_norm: float,
        norm: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        self._upload_options()
        for moments in live:
            device = moments.steps.device
            moments.update(
                self._options[device],
                self.form,
                inverse(scale, device) if multiplier is None else on_device(multiplier, device),
                max_norm,
                on_device(norm, device),
                on_device(found_inf, device),
                functools.partial(self._gather_part, moments.buffer),
            )
        self._gather_parts()

    def _moments_of(self, buffer: FlatBuffer) -> Moments:
        if id(buffer) not in self._moments:
            groups = [self._group_of[id(param)] for param in buffer.params]
            moments = self._moments[id(buffer)] = Moments(buffer, groups, self._compact_master)
            self._restrict(moments)
        return self._moments[id(buffer)]

    def _split(self) -> None:
        """Go on tensor by tensor with the parameters of every buffer that something took a parameter out of."""
        self._check_alone()
        broken = [buffer for buffer in self._buffers if not buffer.intact()]
        if not self._split_logged:
            self._split_logged = True
            logger.warning(
                "FusedAdam: parameters were moved after the optimiser was built (by .half(), .to() or an assignment to "
                "param.data); it now updates them tensor by tensor. Build the optimiser last to keep one update for all"
            )
        steps = self._host_steps()
        for buffer in broken:
            self._buffers.remove(buffer)
            masters = wide_parameters(buffer, self._moments.pop(id(buffer), None))
            self._add_buffers(FlatParameters(buffer.params, flatten=False).buffers)
            kept = {param: dict(self.state[param]) for param in buffer.params if param in self.state}
            for param, state in kept.items():
                self.state[param] = {}
                state.update(step=steps[id(param)], master=masters[id(param)])
            self._restore(kept)

    def _restore(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Make ``states`` the state of their parameters, and that of all others empty."""
        slots = {id(p): (buffer, slot) for buffer in self._buffers for slot, p in enumerate(buffer.params)}
        for param, state in states.items():
            buffer, slot = slots[id(param)]
            self.state[param] = self._moments_of(buffer).restore(slot, state)

    def _host_steps(self) -> dict[int, int]:
        """Return the step count of each started parameter by its id."""
        return {key: step for moments in self._moments.values() for key, step in moments.host_steps()}

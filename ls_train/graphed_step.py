"""A whole training step as CUDA graphs, for plain PyTorch training loops."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ls_train.graph import LIMIT, CapturedCalls, CudaGraphs, Graphs

logger = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GraphedStep:
    """Forward, backward and update of a model, captured for each shape of its inputs and replayed.

    ::

        optimizer = ls_train.FusedAdam(model.parameters(), lr=1e-4)
        step = ls_train.GraphedStep(model, criterion, optimizer, max_norm=1.0)
        for inputs, target in batches:
            loss = step(inputs, target)

    Each call does ``loss = criterion(model(*inputs), target)``, ``loss.backward()`` and an update. With
    :class:`ls_train.FusedAdam` the update is part of the graph, learning rates may change between calls, and an update
    whose gradients are not finite is skipped on the device. Any other optimiser's ``step()`` follows the graph.

    Inputs may be tensors, and tuples, lists, dictionaries and dataclasses (:class:`ls_train.Packing`) of tensors and
    other hashable values. Tensors are copied into memory that stays the same; everything else, all shapes, and which
    modules train and parameters require gradients, must be equal for a graph to be replayed, so round lengths up to a
    few levels. Neither model nor criterion may read the device: pack
    on the host. The first call of each shape runs without a graph. Where none can be captured (CPU tensors, hooks,
    anomaly detection, something that waits for the device) the same code runs as it is, and a logged line says why.

    Attributes:
        calls: the graphs, with numbers of captures, replays and calls; None where there are none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float = 0.0,
        loss_scale: Any = None,
        limit: int = LIMIT,
        graphs: Graphs | None = None,
    ) -> None:
        """Prepare a step; build it last, after ``.to()``, ``.half()`` and the optimiser.

        Args:
            model: called with the inputs.
            criterion: called with what ``model`` returned and the target; returns the loss, or a tuple that begins
                with it.
            optimizer: of the model's parameters.
            max_norm: clip gradients to this L2 norm, 0 for no clipping; needs FusedAdam.
            loss_scale: :class:`ls_train.optim.DynamicLossScale` or None; needs FusedAdam.
            limit: graphs kept; each shape has its own.
            graphs: what captures; None for CUDA graphs on the parameters' device.

        Raises:
            ValueError: the model has no parameter that is trained, or ``max_norm`` or ``loss_scale`` is given with an
                optimiser that does not take it.
        """
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._trained:
            raise ValueError(f"model {type(model).__name__} has no parameter that requires a gradient")
        self._is_fused = hasattr(optimizer, "measured_step")
        if not self._is_fused and (max_norm > 0 or loss_scale is not None):
            raise ValueError(
                f"max_norm = {max_norm} and loss_scale need ls_train.FusedAdam, got {type(optimizer).__name__}; "
                "leave them out or change the optimiser"
            )
        self._model, self._criterion, self._optimizer = model, criterion, optimizer
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._max_norm, self._loss_scale, self._limit = max_norm, loss_scale, limit
        self._static: dict[Hashable, tuple[list[Tensor], Any]] = {}
        device = self._trained[0].device
        reasons = _obstacles(model, self._trained)
        if graphs is None and device.type != "cuda":
            reasons.append(f"parameters on the device {device}")
        self.calls: CapturedCalls | None = None
        if reasons:
            logger.warning(f"GraphedStep: steps run without CUDA graphs because of {', '.join(reasons)}")
        else:
            self.calls = CapturedCalls(CudaGraphs(device) if graphs is None else graphs, model, limit)
            # Loading makes new state, which no graph knows.
            optimizer.register_load_state_dict_post_hook(lambda _: self.calls.clear())

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        """Do one step; return the loss, detached, valid until the next call.

        Args:
            inputs: arguments of the model: a tuple of several, or the only one.
            target: second argument of the criterion.

        Raises:
            TypeError: something in the inputs is neither one of the containers nor hashable, or hides tensors.
        """
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        if self.calls is None:
            loss = self._run(inputs, target)
        else:
            tensors: list[Tensor] = []
            key = (*self._modes(), _flatten((inputs, target), tensors))
            memory, arguments = self._memory(key, (inputs, target), tensors)
            for static, tensor in zip(memory, tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
            if self._is_fused:
                self._optimizer.upload_hyper()
            gradients = () if self._is_fused else self._trained
            loss = self.calls(key, (), lambda: self._run(*arguments), gradients)
        if not self._is_fused:
            self._optimizer.step()
        return loss

    def _run(self, inputs: tuple[Any, ...], target: Any) -> Tensor:
        """Run what is captured: forward, backward and, with FusedAdam, the update."""
        for parameter in self._trained:
            parameter.grad = None
        optimizer, scale = self._optimizer, self._loss_scale
        if self._is_fused:
            optimizer.direct_grads = True
        try:
            loss = self._criterion(self._model(*inputs), target)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward(None if scale is None else scale.scale.to(loss.dtype).view(loss.shape))
        finally:
            if self._is_fused:
                optimizer.direct_grads = False
        if self._is_fused:
            _, found_inf = optimizer.measured_step(None if scale is None else scale.inverse(), self._max_norm)
            if scale is not None:
                scale.update(found_inf)
        return loss.detach()

    def _modes(self) -> Hashable:
        """Return which modules train, and which parameters require a gradient."""
        trains = tuple(module.training for module in self._modules)
        return trains, tuple(parameter.requires_grad for parameter in self._parameters)

    def _memory(self, key: Hashable, arguments: Any, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        known = self._static.get(key)
        if known is None:
            if len(self._static) >= 2 * self._limit:
                self._static = {used: memory for used, memory in self._static.items() if self.calls.has_graph(used, ())}
            device = self._trained[0].device
            memory = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
            known = self._static[key] = memory, _rebuild(arguments, iter(memory))
        return known


def _obstacles(model: torch.nn.Module, parameters: list[Tensor]) -> list[str]:
    found = {
        "anomaly detection": torch.is_anomaly_enabled(),
        "hooks on modules": any(getattr(module, hooks, None) for module in model.modules() for hooks in _HOOKS),
        "hooks on parameters": any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters),
        "parameters on several devices": len({parameter.device for parameter in parameters}) > 1,
    }
    return [reason for reason, given in found.items() if given]


def _fields(value: Any) -> list[str] | None:
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return [field.name for field in dataclasses.fields(value)] if is_data else None


def _flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors in ``value`` to ``tensors``; return the rest, shapes and types."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return type(value), *(_flatten(item, tensors) for item in value)
    if isinstance(value, dict):
        return type(value), *((name, _flatten(item, tensors)) for name, item in value.items())
    names = _fields(value)
    if names is not None:
        return type(value), *(_flatten(getattr(value, name), tensors) for name in names)
    hides = any(isinstance(member, Tensor) for member in getattr(value, "__dict__", {}).values())
    if hides or not isinstance(value, Hashable):
        reason = "holds tensors, which a graph would not see change" if hides else "is not hashable"
        raise TypeError(
            f"GraphedStep: an input of type {type(value).__name__} {reason}; give tensors, and tuples, lists, "
            "dictionaries and dataclasses of tensors and hashable values"
        )
    return type(value), value


def _rebuild(value: Any, memory: Any) -> Any:
    """Return ``value`` with its tensors replaced by the next ones of ``memory``."""
    if isinstance(value, Tensor):
        return next(memory)
    if isinstance(value, tuple | list):
        items = [_rebuild(item, memory) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        for name, item in value.items():
            rebuilt[name] = _rebuild(item, memory)
        return rebuilt
    names = _fields(value)
    return value if names is None else type(value)(**{name: _rebuild(getattr(value, name), memory) for name in names})

"""The options of parameter groups, checked on the host and kept in device memory, where an update reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

NOT_SUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Options of torch's Adam that must be off."""


def check_group(group: dict[str, Any]) -> None:
    """Refuse a parameter group with an option that is not offered or out of range.

    Raises:
        ValueError: naming the option.
    """
    for option in NOT_SUPPORTED:
        if group.get(option):
            raise ValueError(f"{option}=True is not supported by FusedAdam; leave it out")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not isinstance(value, Tensor) and not (isinstance(value, int | float) and value >= 0.0):
            raise ValueError(f"{name} = {value!r} must be a number and must not be negative")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, got shape {tuple(group['lr'].shape)}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas = {betas!r} must be two numbers in [0, 1)")


def upload(target: Tensor, values: Sequence[Any]) -> Tensor:
    """Write host ``values`` into ``target`` without waiting for its device; return ``target``."""
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    return target.copy_(host, non_blocking=True)


def is_capturing() -> bool:
    """Return whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def inverse(scale: float | Tensor, device: torch.device) -> Tensor | None:
    """Return float32 (1,) 1 / scale, or None for scale 1."""
    if isinstance(scale, Tensor):
        return scale.to(device, torch.float32).reshape(1).reciprocal()
    return None if scale == 1.0 else torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)


def on_device(value: Tensor | None, device: torch.device) -> Tensor | None:
    """Return ``value`` as float32 (1,) on ``device``."""
    return None if value is None else value.to(device, torch.float32).reshape(1)


class DeviceOptions:
    """Rows of :data:`ls_train.ops.adam.HYPER_COLUMNS`, one a parameter group, on every device with parameters.

    The memory stays the same while groups and devices do, so that a captured step may read it.
    """

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._tensors: dict[torch.device, Tensor] = {}

    def __getitem__(self, device: torch.device) -> Tensor:
        """Return the rows on ``device``: float64 (G, 6)."""
        return self._tensors[device]

    def forget(self) -> None:
        """Upload everything next time: the devices may have changed."""
        self._rows = []

    def upload(
        self, groups: Sequence[dict[str, Any]], devices: Iterable[torch.device], earlier_lr: Sequence[float] | None
    ) -> None:
        """Bring the options of ``groups`` to the ``devices`` where they changed.

        Args:
            groups: of the optimiser.
            devices: of its parameters.
            earlier_lr: for each group the rate of the earlier of two possible updates; None: the same as ``lr``.

        Raises:
            RuntimeError: an option changed and a graph is being captured.
        """
        rows, tensors = [], []
        for index, group in enumerate(groups):
            lr = group["lr"]
            earlier = lr if earlier_lr is None else earlier_lr[index]
            if isinstance(lr, Tensor):
                tensors.append((index, lr))
                earlier = lr = -1.0  # no number that a group can have, so that a later change to a number is noticed
            rows.append([*group["betas"], group["eps"], group["weight_decay"], earlier, lr])
        if rows != self._rows:
            if is_capturing():
                raise RuntimeError("options of a parameter group changed; call upload_hyper() before capturing a step")
            self._rows = rows
            self._tensors = {device: upload(self._memory(device, rows), rows) for device in devices}
        for index, lr in tensors:
            for tensor in self._tensors.values():
                tensor[index, 4:].copy_(lr.reshape(1), non_blocking=True)

    def _memory(self, device: torch.device, rows: list[list[float]]) -> Tensor:
        old = self._tensors.get(device)
        fits = old is not None and old.shape == (len(rows), len(rows[0]))
        return old if fits else torch.empty(len(rows), len(rows[0]), dtype=torch.float64, device=device)

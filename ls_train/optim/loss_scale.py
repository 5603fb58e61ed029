"""Dynamic loss scale that lives on the device: growing, shrinking and counting wait for nothing.

The rule is fairseq's ``DynamicLossScaler``, see :mod:`ls_train.ops.loss_scale_update`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ls_train.ops.loss_scale_update import COUNTERS


class DynamicLossScale:
    """fairseq's dynamic loss scale as device tensors.

    Attributes:
        scale: float32 (1,), multiply the loss by it.
        exhausted: float32 (1,), 1 once an overflow would have brought the scale to the minimum.
    """

    def __init__(
        self,
        device: torch.device | str,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.0,
        threshold: float | None = None,
        min_loss_scale: float = 1e-4,
    ) -> None:
        """Start with ``init_scale``.

        Raises:
            ValueError: a scale is not positive, the factor is not above 1, or the window is not at least 1.
        """
        if init_scale <= 0 or scale_factor <= 1 or scale_window < 1:
            raise ValueError(
                f"init_scale = {init_scale} must be positive, scale_factor = {scale_factor} above 1 and scale_window = "
                f"{scale_window} at least 1"
            )
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.tolerance = tolerance
        self.threshold = threshold
        self.min_loss_scale = min_loss_scale
        self.scale = torch.full((1,), init_scale, dtype=torch.float32, device=device)
        self.exhausted = torch.zeros(1, dtype=torch.float32, device=device)
        self._counters = torch.tensor([0, -1, -1, 0], dtype=torch.int64, device=device)
        self._zero, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Count one update, which overflowed where ``found_inf`` (float32 (1,), on the device) is not 0; one launch."""
        torch.ops.ls_train.loss_scale_update(
            self.scale,
            self._counters,
            self.exhausted,
            found_inf,
            self.scale_factor,
            self.scale_window,
            self.tolerance,
            0.0 if self.threshold is None else self.threshold,
            self.min_loss_scale,
        )

    def inverse(self, value: float = 1.0) -> Tensor:
        """Return ``value / scale``, float32 (1,); one launch."""
        return torch.addcdiv(self._zero, self._one, self.scale, value=value)

    def check(self) -> None:
        """Raise if the scale has reached its minimum; reads the device.

        Raises:
            FloatingPointError: the minimum was reached, with fairseq's message.
        """
        if bool(self.exhausted):
            raise FloatingPointError(
                f"Minimum loss scale reached ({self.min_loss_scale}). Your loss is probably exploding. "
                "Try lowering the learning rate, using gradient clipping or increasing the batch size."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale as ``loss_scale``, as fairseq saves it, and the counters; reads the device."""
        return {"loss_scale": float(self.scale), **dict(zip(COUNTERS, self._counters.tolist(), strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale, and the counters where ``state`` has them (fairseq's has none)."""
        self.scale.fill_(state["loss_scale"])
        if all(name in state for name in COUNTERS):
            self._counters.copy_(torch.tensor([state[name] for name in COUNTERS]))
        self.exhausted.zero_()

"""Dynamic loss scale that lives on the device: growing, shrinking and counting wait for nothing.

The rule is fairseq's ``DynamicLossScaler``: multiply the scale by ``scale_factor`` after ``scale_window`` updates
without overflow; divide it when the share of overflows since the last change reaches ``tolerance``, not below
``threshold``; give up when it would reach ``min_loss_scale``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COUNTERS = ("iteration", "last_overflow", "last_rescale", "overflows")


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

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Count one update, which overflowed where ``found_inf`` (float32 (1,), on the device) is not 0."""
        overflow = found_inf > 0
        iteration, last_overflow, last_rescale, overflows = self._counters.split(1)
        overflows_now = overflows + 1
        too_many = overflows_now / (iteration - last_rescale) >= self.tolerance
        shrunk = self.scale / self.scale_factor
        if self.threshold is not None:
            shrunk = shrunk.clamp(min=self.threshold)
        shrunk = torch.where(too_many, shrunk, self.scale)
        exhausted = overflow & (shrunk <= self.min_loss_scale)
        grow = ~overflow & ((iteration - last_overflow) % self.scale_window == 0)
        shrink = overflow & too_many
        after_overflow = torch.where(exhausted, self.scale, shrunk)
        after_success = torch.where(grow, self.scale * self.scale_factor, self.scale)
        counters = torch.cat(
            [
                iteration + 1,
                torch.where(overflow, iteration, last_overflow),
                torch.where(shrink | grow, iteration, last_rescale),
                torch.where(shrink, 0, torch.where(overflow, overflows_now, overflows)),
            ]
        )
        self.scale.copy_(torch.where(overflow, after_overflow, after_success))
        self.exhausted.copy_(torch.maximum(self.exhausted, exhausted.to(torch.float32)))
        self._counters.copy_(counters)

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
        return {"loss_scale": float(self.scale), **dict(zip(_COUNTERS, self._counters.tolist(), strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale, and the counters where ``state`` has them (fairseq's has none)."""
        self.scale.fill_(state["loss_scale"])
        if all(name in state for name in _COUNTERS):
            self._counters.copy_(torch.tensor([state[name] for name in _COUNTERS]))
        self.exhausted.zero_()

"""Label-smoothed cross entropy as a layer, from logits or from features and an output projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ls_train.layers import modules
from ls_train.layers.config import CrossEntropyConfig, from_preset
from ls_train.ops.cross_entropy import cross_entropy
from ls_train.ops.linear_cross_entropy import linear_cross_entropy


class LSCrossEntropyLayer(nn.Module):
    """Sum over the targets of the label-smoothed cross entropy, as fairseq defines it.

    Args:
        config: from :meth:`get_config`; None takes the defaults and the keywords below.
        epsilon: label smoothing, without ``config``.
        padding_idx: target id whose positions are ignored, without ``config``.

    Raises:
        ValueError: a field has a bad value.
    """

    def __init__(self, config: CrossEntropyConfig | None = None, *, epsilon: float = 0.1, padding_idx: int = 1) -> None:
        super().__init__()
        config = CrossEntropyConfig(epsilon=epsilon, padding_idx=padding_idx) if config is None else config
        config.check()
        self.epsilon = config.epsilon
        self.padding_idx = config.padding_idx

    @staticmethod
    def get_config(**values: Any) -> CrossEntropyConfig:
        """Return a configuration from field values.

        Raises:
            ValueError: a field is unknown or has a bad value.
        """
        return from_preset(CrossEntropyConfig, None, values)

    @modules.check_kinds
    def forward(self, inputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (loss, nll), both summed over the targets that are not padding; nll is not differentiable.

        Args:
            inputs: logits (..., V); with ``weight``, features (..., C).
            targets: int64 (...).
            weight: (V, C), output projection; logits are then never held whole.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: shapes do not fit.
        """
        if targets.shape != inputs.shape[:-1]:
            raise ValueError(f"targets must have shape {tuple(inputs.shape[:-1])}, got {tuple(targets.shape)}")
        rows, targets = inputs.reshape(-1, inputs.shape[-1]), targets.reshape(-1)
        if weight is None:
            result = cross_entropy(rows, targets, self.epsilon, self.padding_idx)
            return result.loss.sum(), result.nll.sum()
        rows, weight = modules.autocast_inputs((rows, weight))
        result = linear_cross_entropy(rows.contiguous(), weight, targets, self.epsilon, self.padding_idx)
        return result.loss, result.nll

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"epsilon={self.epsilon}, padding_idx={self.padding_idx}"

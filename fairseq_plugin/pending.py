"""An update that the device is still working on: what its log needs, on the way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What came of an update.

    Attributes:
        norm: L2 norm of the gradient after unscaling, before clipping.
        overflow: whether the update was skipped on the device because a gradient was not finite.
        logging_outputs: one dictionary a micro-batch, numbers only, as the criterion's ``reduce_metrics`` takes them;
            with several ranks one for all of them.
    """

    norm: float
    overflow: bool
    logging_outputs: list[dict[str, float]]

    @property
    def sample_size(self) -> float:
        """What the gradient was divided by."""
        return float(sum(output["sample_size"] for output in self.logging_outputs))


class PendingUpdate:
    """Statistics of an update, copied to the host behind it without waiting.

    Attributes:
        samples: the batches of the update.
    """

    def __init__(
        self, samples: Sequence[Any], names: Sequence[str], counts: Sequence[dict[str, float]], values: Tensor
    ) -> None:
        """Start the copy.

        Args:
            samples: the batches of the update.
            names: of the sums that each micro-batch logs.
            counts: for each micro-batch what the host knows.
            values: float32 (3 + M * len(names),) on the device, not needed afterwards: norm of the gradients as they
                were, 1 where the update was skipped, factor of the gradients, then the sums of each micro-batch.
        """
        self.samples = samples
        self._names = names
        self._counts = counts
        self._event = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.clone()

    def wait(self) -> Outcome:
        """Return the outcome, once the device is through with the update."""
        if self._event is not None:
            self._event.synchronize()
        norm, found_inf, multiplier, *scalars = self._values.tolist()
        values = iter(scalars)
        outputs = [{**{name: next(values) for name in self._names}, **counts} for counts in self._counts]
        return Outcome(norm * multiplier, found_inf > 0, outputs)

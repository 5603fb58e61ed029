"""What the device does in an update under the plugin's trainer, in one place so that it can be captured as a graph.

With one micro-batch on one rank the whole update is one graph: forward, backward, norm, Adam, loss scale and the
statistics. All numbers that change from step to step lie in device memory: those of the batch travel with it
(:class:`fairseq_plugin.packed.Plan`), learning rates and the count of updates belong to the optimiser. Otherwise each
micro-batch is a graph, and the sum over the ranks and the update follow outside. Ranks may then be in different shapes:
the pieces of the gradient leave in one order, during a backward that runs eagerly and behind marks in a replayed one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_plugin.data_parallel import Ranks
from fairseq_plugin.packed import PackedBatch, Plan, StaticBatches, pack_batch, packed_features
from fairseq_plugin.pending import PendingUpdate
from ls_train.graph import CapturedCalls
from ls_train.optim import DynamicLossScale, FusedAdam
from ls_train.optim.all_reduce import Marks

logger = logging.getLogger(__name__)

_SEED_STRIDE = 1 << 32  # between the dropout seeds of an update's micro-batches
_FIRST_SUMMARY = 250  # calls, after which most shapes have come; then again after eight times as many


class DeviceStep:
    """Enqueues updates.

    Args:
        model: a fused model, not wrapped.
        criterion: a fused criterion.
        optimizer: of the model's parameters.
        scale: loss scale, or None.
        seed: of the run.
        clip_norm: see :meth:`ls_train.FusedAdam.measured_step`.
        ranks: the other ranks, or None.
        graphs: captures and replays the steps; None to run them as they are.
        max_tokens: of a batch, None where it is not known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Any,
        optimizer: FusedAdam,
        scale: DynamicLossScale | None,
        seed: int,
        clip_norm: float,
        ranks: Ranks | None = None,
        graphs: CapturedCalls | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.graphs = graphs
        self._model, self._criterion, self._optimizer = model, criterion, optimizer
        self._scale, self._seed, self._clip_norm, self._ranks = scale, seed, clip_norm, ranks
        self._parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.params]
        self._device = optimizer.buffers[0].data.device
        self._next_summary = _FIRST_SUMMARY
        self._names: list[str] = []
        sides = [model.decoder, *([model.encoder] if hasattr(model, "encoder") else [])]
        limits = [side.max_positions() for side in sides]
        prefix = criterion.loss_options.prefix
        self._batches = StaticBatches(self._device, criterion.padding_idx, prefix, limits, max_tokens)

    def run(self, samples: Sequence[Any], is_dummy: bool, seconds: Callable[[], float]) -> PendingUpdate:
        """Hand an update to the device.

        Args:
            samples: its batches.
            is_dummy: whether the last one only stands in for an empty one.
            seconds: returns the time this rank has trained, which several ranks sum up.
        """
        plans = self._plans(samples, is_dummy)
        optimizer = self._optimizer
        optimizer.direct_grads = True
        try:
            if self.graphs is not None and self._ranks is None and len(samples) == 1:
                return self._whole(samples, plans[0])
            return self._in_parts(samples, plans, is_dummy, seconds)
        finally:
            optimizer.direct_grads = False
            if self._ranks is not None:
                self._ranks.gradients.stop()

    def clear_gradients(self) -> None:
        """Set all ``.grad`` to None."""
        for parameter in self._parameters:
            parameter.grad = None

    def recover(self) -> None:
        """Drop what may be left of a step for which there was not enough memory."""
        self.clear_gradients()
        if self.graphs is not None:
            self.graphs.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _plans(self, samples: Sequence[Any], is_dummy: bool) -> list[Plan]:
        sizes = [self._criterion.host_counts(sample, 0)["sample_size"] for sample in samples]
        inverse = 1.0 if is_dummy else 1.0 / (sum(sizes) or 1.0)
        # Gradients are averaged over the ranks, as DistributedDataParallel does: no sum overflows that they did not.
        weight = 1.0 if self._ranks is None else 1.0 / self._ranks.size
        last = len(samples) - 1
        return [
            Plan(self._seed + index * _SEED_STRIDE, inverse, 0.0 if is_dummy and index == last else weight)
            for index in range(len(samples))
        ]

    def _whole(self, samples: Sequence[Any], plan: Plan) -> PendingUpdate:
        (sample,) = samples
        shape, batch, counted = self._batches.load(sample, plan)
        # What a replay reads must have arrived before.
        self._optimizer.upload_hyper()
        values = self.graphs("update", shape, lambda: self._update_of(batch))
        self._log_summary()
        return PendingUpdate(samples, self._names, [self._criterion.host_counts(sample, counted)], values)

    def _update_of(self, batch: PackedBatch) -> Tensor:
        self.clear_gradients()
        sums = self._forward_backward(batch)
        return self._update(batch.inverse, sums)

    def _in_parts(
        self, samples: Sequence[Any], plans: Sequence[Plan], is_dummy: bool, seconds: Callable[[], float]
    ) -> PendingUpdate:
        ranks, criterion = self._ranks, self._criterion
        self.clear_gradients()
        sums, counts = [], []
        for index, (sample, plan) in enumerate(zip(samples, plans, strict=True)):
            is_last = index == len(samples) - 1
            part, inverse, counted, marks = self._micro_batch(index > 0, is_last, sample, plan)
            sums.append(part)
            counts.append(criterion.host_counts(sample, counted))
        self._log_summary()
        if ranks is None:
            return PendingUpdate(samples, self._names, counts, self._update(inverse, *sums))
        is_sharded = ranks.gradients.is_sharded
        ranks.gradients.finish(marks, wait=not is_sharded)
        measure = self._optimizer.grad_norm if is_sharded else None
        total, measured = ranks.sum_statistics(self._names, sums, counts, seconds(), is_dummy, measure)
        inverse = ranks.size / total["sample_size"].view(1).clamp(min=1.0)
        values = self._update(inverse, torch.stack(list(total.values())), measured=measured)
        return PendingUpdate(samples, list(total), [{}], values)

    def _micro_batch(
        self, accumulates: bool, is_last: bool, sample: Any, plan: Plan
    ) -> tuple[Tensor, Tensor, int, Marks]:
        """Run forward and backward.

        Returns:
            The sums to log, the factor of the gradients, the targets that count, and where pieces of the gradient are
            ready.
        """
        criterion = self._criterion
        if self.graphs is None:
            prefix = criterion.loss_options.prefix
            batch, counted = pack_batch(sample, criterion.padding_idx, self._device, prefix, plan)
            sums, marks = self._listened(batch, is_last)
            return sums, batch.inverse, counted, marks
        kind = "next micro-batch" if accumulates else "first micro-batch"
        shape, batch, counted = self._batches.load(sample, plan)
        # A graph has its marks whether or not the micro-batch is the last one this time.
        sums, marks = self.graphs(kind, shape, lambda: self._listened(batch, is_last), self._parameters)
        # The next micro-batch writes to the same memory.
        return sums.clone(), batch.inverse, counted, marks

    def _listened(self, batch: PackedBatch, is_last: bool) -> tuple[Tensor, Marks]:
        """Run forward and backward while the sum over the ranks listens; return the sums to log, and its marks."""
        if self._ranks is None:
            return self._forward_backward(batch), {}
        gradients = self._ranks.gradients
        gradients.start(is_last, None if self.graphs is None else self.graphs.new_mark)
        sums = self._forward_backward(batch)
        return sums, gradients.end()

    def _forward_backward(self, batch: PackedBatch) -> Tensor:
        """Return the sums that are logged, float32 (len(names),)."""
        model = self._model
        features = packed_features(model, batch, self._optimizer.updates + batch.seed)
        rows = batch.packing.rows if batch.is_padded else None
        gradient = batch.weight if self._scale is None else batch.weight * self._scale.scale
        weight = model.decoder.output_projection.weight
        sums = self._criterion.packed_backward(features, weight, batch.target, gradient, rows)
        self._names = list(sums)
        return torch.stack([value.to(torch.float32) for value in sums.values()])

    def _update(self, inverse: Tensor, *sums: Tensor, measured: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Update the parameters; return what :class:`PendingUpdate` takes."""
        scale = self._scale
        factor = inverse if scale is None else inverse / scale.scale
        norm, found_inf = self._optimizer.measured_step(factor, self._clip_norm, measured)
        if scale is not None:
            scale.update(found_inf)
        return torch.cat([norm, found_inf, factor, *sums])

    def _log_summary(self) -> None:
        if self.graphs is not None and self.graphs.calls >= self._next_summary:
            self._next_summary = 8 * self.graphs.calls
            logger.info(self.graphs.summary())

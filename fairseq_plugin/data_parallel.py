"""Several ranks under the plugin's training step: one gradient buffer and one vector of statistics are summed.

With ``--ls-shard-update`` each rank sums and updates its own part of the parameters where they can be divided, and
they are gathered again.

No wrapper around the model: layers write into the flat buffer, which autograd's hooks (DistributedDataParallel) would
not see. Every rank takes part in every collective, also with a dummy batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ls_train.optim import FusedAdam
from ls_train.optim.all_reduce import FlatAllReduce
from ls_train.optim.options import upload
from ls_train.optim.peer_exchange import SymmetricTensor, peer_obstacle

logger = logging.getLogger(__name__)

TRAIN_TIME = "train_time"
"""Name under which the ranks' training times are summed with the statistics."""

_GATHER_BLOCKS = 64
"""NCCL's blocks, each of which takes a multiprocessor, where only Adam runs beside them."""


class Ranks:
    """The data-parallel group of a run.

    Args:
        size: number of ranks.
        group: torch's process group.
        optimizer: whose gradients are summed; its parameters become those of the first rank.
        sharded: each rank updates its own part of the parameters, where they can be divided.
    """

    def __init__(self, size: int, group: Any, optimizer: FusedAdam, sharded: bool) -> None:
        self.size = size
        self.group = group
        obstacle = peer_obstacle(group) if sharded else None
        gathers = _gather_group(group) if obstacle is not None else None
        self.gradients = FlatAllReduce(optimizer.buffers, group, sharded=sharded, gather_group=gathers)
        if sharded and not self.gradients.is_sharded:
            logger.info(f"--ls-shard-update: without effect, the parameters do not divide among {size} ranks")
        elif sharded and obstacle is None:
            self.gradients.connect(functools.partial(SymmetricTensor, group=group))
            logger.info(f"--ls-shard-update: {size} ranks exchange gradients and parameters by their copy engines")
        elif sharded:
            how = f"by {dist.get_backend(group)} and not by copy engines"
            logger.info(f"--ls-shard-update: {size} ranks exchange gradients and parameters {how}: {obstacle}")
        for buffer in optimizer.buffers:
            dist.broadcast(buffer.data, dist.get_global_rank(group, 0), group=group)
        if self.gradients.is_sharded:
            optimizer.share(self.gradients)

    def sum_statistics(
        self,
        names: Sequence[str],
        sums: Sequence[Tensor],
        counts: Sequence[dict[str, float]],
        seconds: float,
        ignore: bool,
        measure: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
        """Return the statistics of all ranks and micro-batches, float32 scalars on the device, and what was measured.

        Args:
            names: of the sums.
            sums: for each micro-batch what it logs, float32 (len(names),) on the device.
            counts: for each micro-batch what the host knows.
            seconds: training time of this rank, summed as ``TRAIN_TIME``.
            ignore: this rank had a dummy batch: only its time counts, as in fairseq.
            measure: returns norm and overflow flag of this rank's parts of the gradients, None where it has all of
                them; returned are those of all ranks. It is called last, as it waits for the gradients.
        """
        known = {name: 0.0 if ignore else float(sum(part[name] for part in counts)) for name in counts[0]}
        local = sums[0] if len(sums) == 1 else torch.stack(list(sums)).sum(0)
        host = upload(local.new_empty(len(known) + 1), [*known.values(), seconds])
        total = torch.cat([torch.zeros_like(local) if ignore else local, host])
        measured = None
        if measure is not None:
            norm, found_inf = measure()
            total = torch.cat([total, norm * norm, found_inf])
        dist.all_reduce(total, group=self.group)
        if measure is not None:
            total, squares, found_inf = total.split([len(total) - 2, 1, 1])
            measured = squares.sqrt(), found_inf
        return dict(zip([*names, *known, TRAIN_TIME], total.unbind(), strict=True)), measured


@functools.cache  # one for every optimiser of a run
def _gather_group(group: Any) -> Any:
    """Return a group of the same ranks for gathers beside Adam: more blocks, which come before those of Adam's."""
    if dist.get_backend(group) != "nccl":
        return group
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.min_ctas = options.config.max_ctas = _GATHER_BLOCKS
    return dist.new_group(dist.get_process_group_ranks(group), backend="nccl", pg_options=options)

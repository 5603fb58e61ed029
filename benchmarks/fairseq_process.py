"""One fairseq run in a process that stops between start-up and the first update until it is told to go on.

``python -m benchmarks.fairseq_process IMPLEMENTATION BATCHES WARM_UP FLAGS...`` with the flags of fairseq-train. The
first epoch is ``WARM_UP`` updates and then ``BATCHES`` batches, see :func:`warmed_order`. Start-up is importing,
reading the data, building the model and moving it to its device. At the end the peak memory is printed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import _utils as data_loading

from benchmarks.processes import wait_for_go

# At the end each worker of the data loader is waited for this long, in vain: fairseq's buffering thread still holds it.
# With torch's 5 s a run of 4 workers takes 20 s to end. Ranks import this module too.
data_loading.MP_STATUS_CHECK_INTERVAL = 0.2

PEAK = "peak memory of this run, bytes:"
IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "fairseq_no_cudnn_attention", "fairseq_apex", "fairseq")


def is_ours(implementation: str) -> bool:
    """Return whether ``implementation`` trains with ls_train."""
    return implementation.startswith("ls_train")


def graph_flag(implementation: str) -> str:
    """Return the flag that turns CUDA graphs on or off in a run with ls_train."""
    return f"--ls-cuda-graph {'on' if implementation == 'ls_train_graph' else 'off'}"


def available() -> tuple[str, ...]:
    """Return the implementations that can run here: fairseq with Apex only where Apex is installed."""
    has_apex = importlib.util.find_spec("apex") is not None
    return tuple(name for name in IMPLEMENTATIONS if name != "fairseq_apex" or has_apex)


def train(
    implementation: str,
    flags: Sequence[str],
    before_first_epoch: Callable[[Any], None] | None = None,
    window: tuple[int, int] | None = None,
) -> None:
    """Train in this process with the command line ``flags``.

    Args:
        implementation: one of :data:`IMPLEMENTATIONS`.
        flags: of fairseq-train.
        before_first_epoch: called with the trainer when everything is built and before the first update.
        window: batches and updates of warm-up that :func:`warmed_order` makes the first epoch of.
    """
    if implementation != "fairseq_apex":
        # fairseq takes whatever of Apex it can import.
        sys.modules.update({"apex": None, "amp_C": None})  # type: ignore[dict-item]
    if implementation in ("fairseq_no_cudnn_attention", "fairseq_apex"):
        torch.backends.cuda.enable_cudnn_sdp(False)
    if is_ours(implementation):
        importlib.import_module("fairseq_plugin")
    program = importlib.import_module("fairseq_cli.train")
    if before_first_epoch is not None:
        _call_before_epochs(program, lambda trainer, iterator: before_first_epoch(trainer))
    if window is not None:
        _call_before_epochs(program, lambda trainer, iterator: _order(iterator, *window))
    if is_ours(implementation):
        importlib.import_module("fairseq_plugin.cli").train(flags)
    else:
        _keep_bf16_from_meaning_tpu()
        sys.argv = ["fairseq-train", *flags]
        program.cli_main()


def main(argv: Sequence[str]) -> None:
    """Train when told to. argv: the implementation, batches and updates of warm-up, and the flags."""
    implementation, batches, warm_up, *flags = argv
    shared = 0  # bytes that ranks read of one another, which torch's allocator does not count

    def begin(trainer: Any) -> None:
        nonlocal shared
        if is_ours(implementation):
            shared = importlib.import_module("ls_train.optim.peer_exchange").symmetric_bytes()
        wait_for_go()

    train(implementation, flags, begin, (int(batches), int(warm_up)))
    print(PEAK, torch.cuda.max_memory_allocated() + shared if torch.cuda.is_available() else 0, flush=True)


def warmed_order(shards: Sequence[Sequence[Any]], rank: int, batches: int, warm_up: int) -> list[Any]:
    """Return the batches that a rank runs: ``warm_up`` updates on the window's batches, then its share of the window.

    The window is the first ``batches`` batches of the epoch, the same for every number of ranks. For the warm-up they
    are not dealt out: rank r begins with batch r and goes through the others, over and over, so that ``batches``
    updates show all of the window's shapes to each rank.

    Args:
        shards: the batches of every rank.
        rank: whose batches are returned.
        batches: a multiple of the number of ranks.
        warm_up: updates.

    Raises:
        ValueError: the epoch is shorter than the window.
    """
    shares = [shard[: batches // len(shards)] for shard in shards]
    window = [batch for update in zip(*shares) for batch in update if len(batch)]
    if len(window) < batches or batches % len(shards):
        raise ValueError(
            f"--measured {batches}: an epoch has {sum(1 for shard in shards for batch in shard if len(batch))} batches "
            f"for {len(shards)} ranks; measure a multiple of the ranks that is not more, or write more --sentences"
        )
    rotated = itertools.islice(itertools.cycle(window), rank, rank + warm_up)
    return [*rotated, *shares[rank]]


def _order(iterator: Any, batches: int, warm_up: int) -> None:
    """Let fairseq's epoch iterator deal out batches by :func:`warmed_order`."""
    order, ranks, own = iterator.ordered_batches, iterator.num_shards, iterator.shard_id

    @functools.wraps(order)
    def ordered_batches(*arguments: Any, **options: Any) -> list[Any]:
        shards = []
        for iterator.shard_id in range(ranks):
            shards.append(order(*arguments, **options))
        iterator.shard_id = own
        return warmed_order(shards, own, batches, warm_up)

    iterator.ordered_batches = ordered_batches


def _call_before_epochs(program: Any, function: Callable[[Any, Any], None]) -> None:
    """Make ``fairseq_cli.train`` call ``function`` with its trainer and data iterator before the first epoch."""
    train_epoch = program.train

    def call_and_train(cfg: Any, trainer: Any, task: Any, iterator: Any) -> Any:
        program.train = train_epoch
        function(trainer, iterator)
        return train_epoch(cfg, trainer, task, iterator)

    program.train = call_and_train


def _keep_bf16_from_meaning_tpu() -> None:
    """Let plain fairseq train with ``--bf16`` on a GPU, which its command line takes for a TPU's."""
    options = importlib.import_module("fairseq.options")
    parse = options.parse_args_and_arch

    def parse_without_tpu(*arguments: Any, **named: Any) -> Any:
        parsed = parse(*arguments, **named)
        for namespace in parsed if isinstance(parsed, tuple) else (parsed,):
            if getattr(namespace, "bf16", False):
                namespace.tpu = False
        return parsed

    options.parse_args_and_arch = parse_without_tpu


if __name__ == "__main__":
    main(sys.argv[1:])

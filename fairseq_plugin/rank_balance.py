"""``--ls-balance-ranks``: the batches of an update are about equally large, so that no rank waits for another.

fairseq draws the batches of an update at random, and the slowest rank sets the pace: simulated with lengths as in
WMT14, two ranks lose 6 % of the time at ``--max-tokens 4096`` and 9 % at 15000, eight ranks 10 % and 17 %. Here
fairseq's order is changed within windows of some updates: the batches of a window are sorted by size, neighbours make
an update, and the updates of the window are shuffled. Half a percent is lost then. Every batch comes once an epoch as
before. The order depends on ``--seed``, the epoch and the number of batches in an update, so that two ranks train as
one does with twice the ``--update-freq``, and a resumed run goes on as it would have.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data.iterators import EpochBatchIterator

from fairseq_plugin.errors import UserError
from fairseq_plugin.packed import Buckets
from fairseq_plugin.token_budget import sentence_sizes

OPTION = "--ls-balance-ranks"
WINDOW = 128
"""Updates whose batches are exchanged: a quarter of them leaves half a percent more of waiting at large batches."""

_ATTENTION = 1280
"""Longest sequence at which attention takes as long as everything else, of short sequences, in Transformer-big."""


def sizes_of(dataset: Any, batches: Sequence[Sequence[int]], max_tokens: int | None) -> np.ndarray:
    """Return how much work each batch is, relative to others, float64 (batches,).

    A target row, which meets decoder and output projection, costs half as much again as a source row; the longer the
    sequences, the more attention adds to a row. Rows and lengths are rounded up as graphs do it; the real number of
    tokens decides between batches of one shape.
    """
    buckets = Buckets(max_tokens)
    sizes = sentence_sizes(dataset, OPTION)
    works = []
    for batch in batches:
        sentences = sizes[np.asarray(batch, dtype=np.int64)]
        rows = sentences.sum(0)
        source, target = (int(rows[0]), int(rows[1])) if len(rows) > 1 else (0, int(rows[0]))
        shape = buckets.shape(target, source, int(sentences.max(initial=0)), len(sentences))
        works.append(_work(*shape[:2]) * (1 + shape[2] / _ATTENTION) + _work(target, source) / 1e9)
    return np.array(works, dtype=np.float64)


def _work(target: int, source: int) -> int:
    return 3 * target + 2 * source


def balanced(works: np.ndarray, group: int, seed: tuple[int, int]) -> np.ndarray:
    """Return an order of batches, int64 (batches,), in which every ``group`` neighbours are about equally much work.

    Args:
        works: of each batch, in the order to be changed.
        group: batches of an update; those of an incomplete one at the end stay there.
        seed: of the order of updates within a window and of batches within an update.
    """
    order = np.arange(len(works))
    if group == 1:
        return order
    rng = np.random.default_rng(seed)
    whole = len(works) // group * group
    for start in range(0, whole, WINDOW * group):
        window = order[start : min(start + WINDOW * group, whole)]
        updates = window[np.argsort(works[window], kind="stable")].reshape(-1, group)
        window[:] = rng.permuted(rng.permutation(updates), axis=1).reshape(-1)
    return order


def balance(iterator: Any, max_tokens: int | None, update_freq: Sequence[int]) -> None:
    """Let fairseq's EpochBatchIterator deal out balanced updates; a second call changes nothing.

    Args:
        iterator: over a dataset that has the tokens of each sentence in ``sizes``.
        max_tokens: of a batch, None where it is not known.
        update_freq: fairseq's ``--update-freq``, by epoch.

    Raises:
        UserError: the run asks for another order.
    """
    own = getattr(type(iterator), "_get_iterator_for_epoch", None)
    if own is not EpochBatchIterator._get_iterator_for_epoch or getattr(iterator.dataset, "supports_prefetch", False):
        raise UserError(f"{OPTION}: this task orders the batches of each rank itself; drop the flag")
    if iterator.grouped_shuffling:
        raise UserError(f"{OPTION}: --grouped-shuffling groups batches by their length; drop one of the two")
    order = functools.partial(type(iterator).ordered_batches, iterator)

    def ordered_batches(epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        ranks, rank = iterator.num_shards, iterator.shard_id
        if not shuffle:  # a curriculum
            return order(epoch, fix_batches_to_gpus, shuffle)
        iterator.num_shards, iterator.shard_id = 1, 0
        try:
            batches = order(epoch, fix_batches_to_gpus, shuffle)
        finally:
            iterator.num_shards, iterator.shard_id = ranks, rank
        group = ranks * update_freq[min(epoch, len(update_freq)) - 1]
        works = sizes_of(iterator.dataset, batches, max_tokens)
        dealt = [batches[index] for index in balanced(works, group, (iterator.seed, epoch))]
        share = dealt[rank::ranks]
        return share if len(share) * ranks >= len(dealt) else [*share, []]

    iterator.ordered_batches = ordered_batches

"""``--ls-token-budget``: training batches filled with real tokens, sentences of all lengths in each.

fairseq sorts by length and counts padded sizes, because padding costs its models time. Packed rows have none: here a
batch takes sentences, drawn at random, until the source or the target tokens reach ``--max-tokens``. All batches then
have about as many rows a side and as long a longest sentence, so that few shapes, and with ``--ls-cuda-graph`` few
graphs, serve nearly all steps. Which sentences share a batch depends on ``--seed`` and the epoch in which fairseq makes
the batches; its iterator keeps them, shuffles them by seed and epoch, and deals them out to ranks, as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fairseq_plugin.errors import UserError

OPTION = "--ls-token-budget"


def fill(sizes: np.ndarray, max_tokens: int, max_sentences: int | None = None, multiple: int = 1) -> list[slice]:
    """Return batches of neighbouring sentences, as full as they can be.

    Args:
        sizes: int (sentences, sides), tokens of each sentence.
        max_tokens: that a batch may have on each side.
        max_sentences: that a batch may have; None for any number.
        multiple: batches have a multiple of this number of sentences, or fewer sentences than it.

    Raises:
        UserError: a sentence alone has more than ``max_tokens``.
    """
    count = len(sizes)
    if count and sizes.max() > max_tokens:
        raise UserError(
            f"{OPTION}: a sentence has {sizes.max()} tokens; raise --max-tokens {max_tokens} to that or more"
        )
    sums = [np.concatenate([[0], np.cumsum(side)]) for side in sizes.T]
    batches, start = [], 0
    while start < count:
        end = min(int(np.searchsorted(side, side[start] + max_tokens, side="right")) - 1 for side in sums)
        length = min(end - start, max_sentences or count)
        if length > multiple:
            length -= length % multiple
        batches.append(slice(start, start + length))
        start += length
    return batches


@contextlib.contextmanager
def filled_by_tokens(task: Any, keeps_order: bool) -> Iterator[None]:
    """Fill the batches of the iterators that ``task`` makes meanwhile by real tokens.

    Args:
        task: fairseq's; its datasets have the tokens of each sentence in ``sizes``.
        keeps_order: whether sentences stay in fairseq's order, the shortest first, as a curriculum needs it.
    """
    make = task.get_batch_iterator

    @functools.wraps(make)
    def get_batch_iterator(dataset: Any, *args: Any, seed: int = 1, epoch: int = 1, **kwargs: Any) -> Any:
        order = None if keeps_order else seed
        iterator = _filled(
            lambda dataset, epoch: make(dataset, *args, seed=seed, epoch=epoch, **kwargs), order, dataset, epoch
        )
        sampler = getattr(iterator, "batch_sampler", None)
        # Some tasks make the batches of each epoch when it begins; the iterator may be an earlier one.
        if callable(sampler) and getattr(sampler, "func", None) is not _filled:
            iterator.batch_sampler = functools.partial(_filled, sampler, order)
        return iterator

    task.get_batch_iterator = get_batch_iterator
    try:
        yield
    finally:
        del task.get_batch_iterator


def _filled(make: Callable[[Any, int], Any], seed: int | None, dataset: Any, epoch: int) -> Any:
    """Return ``make(dataset, epoch)``, in which ``dataset`` makes batches; seed None keeps fairseq's order."""
    dataset.batch_by_size = functools.partial(_batch_by_size, dataset, None if seed is None else (seed, epoch))
    try:
        return make(dataset, epoch)
    finally:
        del dataset.batch_by_size


def sentence_sizes(dataset: Any, option: str) -> np.ndarray:
    """Return the tokens of each sentence of fairseq's ``dataset``, int (sentences, sides).

    Args:
        dataset: of a task.
        option: that needs them.

    Raises:
        UserError: the data set has no such numbers.
    """
    try:
        sizes = np.asarray(dataset.sizes)
    except (AttributeError, NotImplementedError):
        name = type(dataset).__name__
        raise UserError(f"{option}: a {name} does not know the tokens of its sentences; drop the flag") from None
    return sizes if sizes.ndim == 2 else sizes.reshape(-1, 1)


def _batch_by_size(
    dataset: Any,
    seed: tuple[int, int] | None,
    indices: Sequence[int],
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    required_batch_size_multiple: int = 1,
) -> list[np.ndarray]:
    """Return batches of ``indices``, see fairseq's FairseqDataset.batch_by_size; seed None keeps their order."""
    if max_tokens is None:
        raise UserError(f"{OPTION}: --max-tokens is missing, give the budget")
    if dataset.get_batch_shapes() is not None:
        raise UserError(f"{OPTION}: --num-batch-buckets makes batches of fixed padded shapes; drop one of the two")
    indices = np.asarray(indices, dtype=np.int64)
    if seed is not None:
        indices = np.random.default_rng(seed).permutation(indices)
    sizes = sentence_sizes(dataset, OPTION)[indices]
    return [indices[part] for part in fill(sizes, int(max_tokens), max_sentences, required_batch_size_multiple)]

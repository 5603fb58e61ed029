"""Training batches packed on the host, while they are still there, and the fused models' features of them.

fairseq collates padded batches on the CPU. What the layers need to know of the lengths is worked out there, and tokens,
targets and layout reach the device in one copy that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ls_train.graph import Shape, level
from ls_train.packing import Packing, TokenOrder

INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}
"""Keys of ``net_input`` that the fused models know."""

ROW_STEPS = 8
"""Rows are rounded up to this many levels of ``--max-tokens``: 7 % are unused on average."""
SMALLEST_ROWS, SMALLEST_LENGTH = 8, 32


class Plan(NamedTuple):
    """Numbers of an update that the device reads with its batch.

    Attributes:
        seed: added to the number of updates, the seed of the batch's dropout masks.
        inverse: factor of the update's gradients.
        weight: factor of this batch's loss in them.
    """

    seed: int = 0
    inverse: float = 1.0
    weight: float = 1.0


NO_PLAN = Plan()
"""For a batch that is an update by itself, its loss neither scaled nor averaged."""


@dataclass(frozen=True)
class PackedBatch:
    """One training batch on the device, without padding.

    Attributes:
        tokens: int64 (N,), the decoder's input.
        packing: where the decoder's sequences lie.
        target: int64 (N,), padding where a token does not count.
        source_tokens: int64 (Ns,), the encoder's input; None for a language model.
        source: where the encoder's sequences lie.
        seed: int64 (1,), see :class:`Plan`.
        inverse: float32 (1,).
        weight: float32 (1,).
        order: of ``tokens``.
        source_order: of ``source_tokens``.
        is_padded: whether rows are unused: only ``packing.rows`` of them and ``source.rows`` are tokens.
    """

    tokens: Tensor
    packing: Packing
    target: Tensor
    source_tokens: Tensor | None
    source: Packing | None
    seed: Tensor
    inverse: Tensor
    weight: Tensor
    order: TokenOrder
    source_order: TokenOrder | None
    is_padded: bool


class Buckets:
    """Shapes that batches are rounded up to, few enough for each to have a CUDA graph.

    A shape is (target rows, source rows, longest sequence, number of sequences). Rows go up to multiples of an eighth
    of ``--max-tokens``, lengths to powers of two. How many sequences there can be follows from both, in batches that
    fairseq fills by tokens; others get the next power of two.
    """

    def __init__(self, max_tokens: int | None) -> None:
        """Prepare for batches of at most ``max_tokens`` padded tokens a side; None where that is not known."""
        self._max_tokens = max_tokens
        self._step = None if max_tokens is None else level(-(-max_tokens // ROW_STEPS), 30, SMALLEST_ROWS)

    def shape(self, rows: int, source_rows: int, length: int, sequences: int) -> Shape:
        """Return the shape of a batch; ``source_rows`` 0: a language model's."""
        length = level(length, 0, SMALLEST_LENGTH)
        # A sequence of this level is longer than half of it, which bounds their number.
        bound = 0 if self._max_tokens is None else self._max_tokens * (4 if length == SMALLEST_LENGTH else 2) // length
        if sequences > bound:
            bound = level(sequences, 0, 8)
        return self._rows(rows), self._rows(source_rows), length, bound

    def _rows(self, count: int) -> int:
        if count == 0:
            return 0
        return level(count, 2, SMALLEST_ROWS) if self._step is None else -(-count // self._step) * self._step


class _Place(NamedTuple):
    """Where a 1-D array lies in a block: its type, numpy's ``i8`` for example, and its number of elements."""

    kind: str
    length: int

    @property
    def words(self) -> int:
        """Number of 8-byte words; the next array begins at a whole word."""
        return -(-self.length * int(self.kind[1:]) // 8)


class HostBatch(NamedTuple):
    """One training batch packed on the host, but for the :class:`Plan` of its update; it travels between processes.

    Attributes:
        block: int64 (W,), everything the device needs, one array after another.
        places: of the arrays.
        sides: padded shape and longest sequence of the decoder's and the encoder's tokens.
        counted: number of targets that count.
        options: padding index and ignored prefix it was packed with.
    """

    block: Tensor
    places: tuple[_Place, ...]
    sides: tuple[tuple[tuple[int, int], int], ...]
    counted: int
    options: tuple[int, int]


class _Layout:
    """Where the tokens of a padded batch lie once they are packed."""

    def __init__(self, padded: Tensor, padding_idx: int) -> None:
        self.shape = tuple(padded.shape)
        flat = _host(padded)
        mask = flat != padding_idx
        lengths = mask.reshape(padded.shape).sum(1)
        self.indices = np.flatnonzero(mask)
        self.max_length = int(lengths.max(initial=0))
        self.ends = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=self.ends[1:])
        self.positions = np.arange(len(self.indices)) - np.repeat(self.ends[:-1], lengths)
        self.tokens = flat[self.indices]

    def parts(self, padding_idx: int, rows: int | None, sequences: int | None) -> list[_Part]:
        """Return what the device needs to know; with ``rows`` and ``sequences`` rounded up to those."""
        tokens, indices = self.tokens, self.indices
        if rows is not None:
            tokens = np.full(rows, padding_idx)
            tokens[: len(self.tokens)] = self.tokens
            # Without them the padded batch cannot be made again; nobody does for a training batch with unused rows.
            indices = indices[:0]
        order = _order(tokens)
        return [
            _Part(self.ends, None if sequences is None else sequences + 1, self.ends[-1]),
            _Part(self.positions, rows),
            _Part(indices),
            _Part(tokens),
            _Part(tokens[order]),
            _Part(order),
        ]


def _order(tokens: np.ndarray) -> np.ndarray:
    """Return the indices that sort ``tokens``, equal ones as they come."""
    # numpy sorts numbers of 16 bits by radix, many times as fast.
    is_narrow = tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 1 << 16
    return np.argsort(tokens.astype(np.uint16) if is_narrow else tokens, kind="stable")


def pack_on_host(sample: Mapping[str, Any], padding_idx: int, prefix: int = 0) -> HostBatch:
    """Return ``sample``, as fairseq's tasks for translation and language models collate it, packed.

    Args:
        sample: padded batch on the CPU.
        padding_idx: of source and target.
        prefix: this many target tokens of each sentence do not count.

    Raises:
        ValueError: the batch holds an input that the fused models do not know.
    """
    sides, target, counted = _layouts(sample, padding_idx, prefix)
    parts = [*_head(NO_PLAN), _Part(target)]
    for side in sides:
        parts += side.parts(padding_idx, None, None)
    shapes = tuple((side.shape, side.max_length) for side in sides)
    return HostBatch(_block(parts), tuple(part.place for part in parts), shapes, counted, (padding_idx, prefix))


def pack_batch(
    sample: Mapping[str, Any], padding_idx: int, device: torch.device, prefix: int = 0, plan: Plan = NO_PLAN
) -> tuple[PackedBatch, int]:
    """Return ``sample`` packed on ``device``.

    Args:
        sample: see :func:`pack_on_host`; where the process that loaded it has packed it, that serves
            (:class:`fairseq_plugin.loading.LoadedBatch`).
        padding_idx: see :func:`pack_on_host`.
        device: where the batch goes; a GPU receives it in one asynchronous copy.
        prefix: see :func:`pack_on_host`.
        plan: numbers that travel with it.

    Returns:
        The batch and the number of targets that count.

    Raises:
        ValueError: see :func:`pack_on_host`.
    """
    packed = getattr(sample, "packed", None)
    if packed is None or packed.options != (padding_idx, prefix):
        packed = pack_on_host(sample, padding_idx, prefix)
    # The batch may come again, a dummy for example, while the copy of the first time is still under way.
    host = torch.empty(len(packed.block), dtype=torch.int64, pin_memory=device.type == "cuda")
    head = _block(_head(plan))
    host.copy_(packed.block)
    host[: len(head)] = head
    views = _views(host.to(device, non_blocking=True), packed.places)
    return _batch(packed.sides, views, [length for _, length in packed.sides], False), packed.counted


class StaticBatches:
    """Batches in device memory that stays the same for batches of one shape, for captured graphs to read.

    Args:
        device: where the batches go.
        padding_idx: of source and target.
        prefix: this many target tokens of each sentence do not count.
        limits: longest sequences that the decoder's and the encoder's positions reach.
        max_tokens: of a batch, see :class:`Buckets`.
    """

    def __init__(
        self,
        device: torch.device,
        padding_idx: int,
        prefix: int,
        limits: Sequence[int],
        max_tokens: int | None = None,
    ) -> None:
        self._padding_idx = padding_idx
        self._prefix = prefix
        self._limits = limits
        self._buckets = Buckets(max_tokens)
        # All shapes lie over each other at the beginning of the block that was the current one when they came first.
        self._block = torch.empty(0, dtype=torch.int64, device=device)
        self._known: dict[Shape, tuple[Tensor, PackedBatch]] = {}

    def load(self, sample: Mapping[str, Any], plan: Plan = NO_PLAN) -> tuple[Shape, PackedBatch, int]:
        """Return the shape of ``sample``, its batch and the number of targets that count.

        The batch is valid until the next one is loaded; the copy waits its turn on the current stream.

        Args:
            sample: see :func:`pack_batch`.
            plan: see :func:`pack_batch`.

        Raises:
            ValueError: see :func:`pack_batch`.
        """
        sides, target, counted = _layouts(sample, self._padding_idx, self._prefix)
        rows = [len(side.tokens) for side in sides] + [0] * (2 - len(sides))
        shape = self._buckets.shape(*rows, max(side.max_length for side in sides), len(sides[0].ends) - 1)
        parts = [*_head(plan), _Part(target, shape[0], self._padding_idx)]
        for side, count in zip(sides, shape):
            parts += side.parts(self._padding_idx, count, shape[3])
        host = _block(parts, self._block.device.type == "cuda")
        if shape not in self._known:
            if len(host) > len(self._block):
                self._block = self._block.new_empty(level(len(host), 0, 1))
            block = self._block[: len(host)]
            lengths = [min(shape[2], limit) for limit in self._limits]
            shapes = [(side.shape, side.max_length) for side in sides]
            self._known[shape] = block, _batch(shapes, _views(block, [part.place for part in parts]), lengths, True)
        block, batch = self._known[shape]
        block.copy_(host, non_blocking=True)
        return shape, batch, counted


def packed_features(model: torch.nn.Module, batch: PackedBatch, seed: Tensor | None) -> Tensor:
    """Return the features (N, C) that a fused model's decoder computes of ``batch``.

    Args:
        model: ``ls_transformer`` or ``ls_transformer_lm`` with fused layers, not wrapped.
        batch: from :func:`pack_batch`.
        seed: int64 (1,) on the device, of all dropout masks.
    """
    memory = None
    if batch.source is not None and not model.decoder.no_encoder_attn:
        memory = model.encoder.forward_packed(batch.source_tokens, batch.source, seed, order=batch.source_order)
    return model.decoder.forward_packed(batch.tokens, batch.packing, memory, batch.source, seed, order=batch.order)


def _layouts(sample: Mapping[str, Any], padding_idx: int, prefix: int) -> tuple[list[_Layout], np.ndarray, int]:
    """Return where decoder and encoder tokens lie, the packed target, and how many targets count."""
    inputs = sample["net_input"]
    unknown = sorted(set(inputs) - INPUTS)
    if unknown:
        raise ValueError(f"the batch has the inputs {unknown}; the ls_ models take {sorted(INPUTS)}")
    sides = [_Layout(inputs[name], padding_idx) for name in ("prev_output_tokens", "src_tokens") if name in inputs]
    padded = sample["target"]
    target = _host(padded)[sides[0].indices]
    if prefix > 0:
        target[sides[0].indices % padded.shape[1] < prefix] = padding_idx
    return sides, target, int(np.count_nonzero(target != padding_idx))


class _Part(NamedTuple):
    """A 1-D array on its way to the device, filled up to ``size`` elements."""

    array: np.ndarray
    size: int | None = None
    fill: int = 0

    @property
    def place(self) -> _Place:
        return _Place(self.array.dtype.str[1:], len(self.array) if self.size is None else self.size)


def _head(plan: Plan) -> list[_Part]:
    return [_Part(np.array([plan.seed])), _Part(np.array([plan.inverse, plan.weight], dtype=np.float32))]


def _batch(
    sides: Sequence[tuple[tuple[int, int], int]], parts: list[Tensor], lengths: Sequence[int], is_padded: bool
) -> PackedBatch:
    """Return the batch of ``parts`` on the device; ``sides``: see :class:`HostBatch`, ``lengths``: bounds of theirs."""
    seed, factors, target = parts[:3]
    packed = [
        (tokens, _packing(shape, length, ends, positions, indices), TokenOrder(*order))
        for (shape, _), length, (ends, positions, indices, tokens, *order) in zip(
            sides, lengths, (parts[3:9], parts[9:15])
        )
    ]
    (tokens, packing, order), *others = packed
    source_tokens, source, source_order = others[0] if others else (None, None, None)
    inverse, weight = factors[:1], factors[1:]
    return PackedBatch(
        tokens, packing, target, source_tokens, source, seed, inverse, weight, order, source_order, is_padded
    )


def _packing(shape: tuple[int, int], max_length: int, ends: Tensor, positions: Tensor, indices: Tensor) -> Packing:
    full = len(indices) in (0, shape[0] * shape[1])
    return Packing(ends, max_length, positions, None if full else indices, *shape)


def _host(padded: Tensor) -> np.ndarray:
    return padded.cpu().numpy().reshape(-1)


def _block(parts: list[_Part], pinned: bool = False) -> Tensor:
    """Return the parts in one int64 tensor; narrower numbers stay what they are."""
    places = [part.place for part in parts]
    host = torch.empty(sum(place.words for place in places), dtype=torch.int64, pin_memory=pinned)
    words, start = host.numpy(), 0
    for part, place in zip(parts, places, strict=True):
        end = start + place.words
        space = words[start:end].view(part.array.dtype)
        space[: len(part.array)] = part.array
        space[len(part.array) : place.length] = part.fill
        start = end
    return host


_TYPES = {"i4": torch.int32, "i8": torch.int64, "f4": torch.float32}


def _views(block: Tensor, places: Sequence[_Place]) -> list[Tensor]:
    """Return what lies at ``places`` in ``block``."""
    pieces = block.split([place.words for place in places])
    return [
        piece if place.kind == "i8" else piece.view(_TYPES[place.kind])[: place.length]
        for piece, place in zip(pieces, places, strict=True)
    ]

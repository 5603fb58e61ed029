"""Training batches packed on the host, while they are still there, and the fused models' features of them.

fairseq collates padded batches on the CPU. What the layers need to know of the lengths is worked out there, and tokens,
targets and layout reach the device in one copy that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ls_train.graph import level
from ls_train.packing import Packing

INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}
"""Keys of ``net_input`` that the fused models know."""

ROW_BITS, SMALLEST_ROWS = 3, 32
"""Rows are rounded up to eight levels an octave: at most 1/8 is unused, 5 % on average."""
LENGTH_BITS, SMALLEST_LENGTH = 1, 16
SMALLEST_BATCH = 16


@dataclass(frozen=True)
class PackedBatch:
    """One training batch on the device, without padding.

    Attributes:
        tokens: int64 (N,), the decoder's input.
        packing: where the decoder's sequences lie.
        target: int64 (N,), padding where a token does not count.
        counted: number of targets that count.
        source_tokens: int64 (Ns,), the encoder's input; None for a language model.
        source: where the encoder's sequences lie.
        is_padded: whether rows are unused: only ``packing.rows`` of them and ``source.rows`` are tokens.
    """

    tokens: Tensor
    packing: Packing
    target: Tensor
    counted: int
    source_tokens: Tensor | None
    source: Packing | None
    is_padded: bool = False


class _Layout:
    """Where the tokens of a padded batch lie once they are packed."""

    def __init__(self, padded: Tensor, padding_idx: int) -> None:
        self.shape = padded.shape
        self._flat = _host(padded)
        mask = self._flat != padding_idx
        lengths = mask.reshape(padded.shape).sum(1)
        self.indices = np.flatnonzero(mask)
        self.max_length = int(lengths.max(initial=0))
        self.ends = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=self.ends[1:])
        self.positions = np.arange(len(self.indices)) - np.repeat(self.ends[:-1], lengths)
        self.tokens = self._flat[self.indices]

    def pad(self, padding_idx: int, length: int) -> None:
        """Add unused rows and empty sequences up to a few levels of numbers, so that few shapes come up."""
        rows, sequences = len(self.tokens), len(self.ends) - 1
        unused = level(rows, ROW_BITS, SMALLEST_ROWS) - rows
        self.tokens = np.pad(self.tokens, (0, unused), constant_values=padding_idx)
        self.positions = np.pad(self.positions, (0, unused))
        self.ends = np.pad(self.ends, (0, level(sequences, 0, SMALLEST_BATCH) - sequences), mode="edge")
        self.indices = self.indices[:0]
        self.max_length = length

    def packing(self, ends: Tensor, positions: Tensor, indices: Tensor) -> Packing:
        """Return the packing with its tensors on the device."""
        # Without indices the padded batch cannot be made again; nobody does for a training batch with unused rows.
        full = len(self.indices) in (0, len(self._flat))
        return Packing(ends, self.max_length, positions, None if full else indices, *self.shape)


def pack_batch(sample: Mapping[str, Any], padding_idx: int, device: torch.device, prefix: int = 0) -> PackedBatch:
    """Return ``sample``, as fairseq's tasks for translation and language models collate it, packed on ``device``.

    Args:
        sample: padded batch on the CPU.
        padding_idx: of source and target.
        device: where the batch goes; a GPU receives it in one asynchronous copy.
        prefix: this many target tokens of each sentence do not count.

    Raises:
        ValueError: the batch holds an input that the fused models do not know.
    """
    sides, target = _layouts(sample, padding_idx, prefix)
    arrays = _arrays(sides, target)
    counted = int(np.count_nonzero(target != padding_idx))
    return _batch(sides, _views(_block(arrays).to(device, non_blocking=True), arrays), counted, False)


class StaticBatches:
    """Batches in device memory that stays the same for batches of one shape, for captured graphs to read.

    Args:
        device: where the batches go.
        padding_idx: of source and target.
        prefix: this many target tokens of each sentence do not count.
        limits: longest sequences that the decoder's and the encoder's positions reach.
    """

    def __init__(self, device: torch.device, padding_idx: int, prefix: int, limits: Sequence[int]) -> None:
        self._padding_idx = padding_idx
        self._prefix = prefix
        self._limits = limits
        # All shapes lie over each other at the beginning of the block that was the current one when they came first.
        self._block = torch.empty(0, dtype=torch.int64, device=device)
        self._known: dict[tuple[int, ...], tuple[Tensor, PackedBatch]] = {}

    def load(self, sample: Mapping[str, Any]) -> tuple[tuple[int, ...], PackedBatch, int]:
        """Return the shape of ``sample``, its batch and the number of targets that count.

        Rows, sequences and lengths are rounded up to levels (:func:`ls_train.graph.level`). The batch is valid until
        the next one is loaded; the copy waits its turn on the current stream.

        Raises:
            ValueError: see :func:`pack_batch`.
        """
        sides, target = _layouts(sample, self._padding_idx, self._prefix)
        counted = int(np.count_nonzero(target != self._padding_idx))
        length = level(max(side.max_length for side in sides), LENGTH_BITS, SMALLEST_LENGTH)
        for side, limit in zip(sides, self._limits):
            side.pad(self._padding_idx, min(length, limit))
        target = np.pad(target, (0, len(sides[0].tokens) - len(target)), constant_values=self._padding_idx)
        arrays = _arrays(sides, target)
        shape = (length, *(len(array) for array in arrays))
        host = _block(arrays)
        if shape not in self._known:
            if len(host) > len(self._block):
                self._block = self._block.new_empty(level(len(host), 0, 1))
            block = self._block[: len(host)]
            self._known[shape] = block, _batch(sides, _views(block, arrays), counted, True)
        block, batch = self._known[shape]
        block.copy_(host, non_blocking=True)
        return shape, batch, counted


def _layouts(sample: Mapping[str, Any], padding_idx: int, prefix: int) -> tuple[list[_Layout], np.ndarray]:
    """Return where decoder and encoder tokens lie, and the packed target."""
    inputs = sample["net_input"]
    unknown = sorted(set(inputs) - INPUTS)
    if unknown:
        raise ValueError(f"the batch has the inputs {unknown}; the ls_ models take {sorted(INPUTS)}")
    sides = [_Layout(inputs[name], padding_idx) for name in ("prev_output_tokens", "src_tokens") if name in inputs]
    padded = sample["target"]
    target = _host(padded)[sides[0].indices]
    if prefix > 0:
        target[sides[0].indices % padded.shape[1] < prefix] = padding_idx
    return sides, target


def _batch(sides: list[_Layout], parts: list[Tensor], counted: int, is_padded: bool) -> PackedBatch:
    packed = [
        (tokens, side.packing(ends, positions, indices))
        for side, (ends, tokens, positions, indices) in zip(sides, (parts[1:5], parts[5:9]))
    ]
    (tokens, packing), (source_tokens, source) = packed if len(packed) == 2 else (*packed, (None, None))
    return PackedBatch(tokens, packing, parts[0], counted, source_tokens, source, is_padded)


def packed_features(model: torch.nn.Module, batch: PackedBatch, seed: Tensor | None) -> Tensor:
    """Return the features (N, C) that a fused model's decoder computes of ``batch``.

    Args:
        model: ``ls_transformer`` or ``ls_transformer_lm`` with fused layers, not wrapped.
        batch: from :func:`pack_batch`.
        seed: int64 (1,) on the device, of all dropout masks.
    """
    memory = None
    if batch.source is not None and not model.decoder.no_encoder_attn:
        memory = model.encoder.forward_packed(batch.source_tokens, batch.source, seed)
    return model.decoder.forward_packed(batch.tokens, batch.packing, memory, batch.source, seed)


def _host(padded: Tensor) -> np.ndarray:
    return padded.cpu().numpy().reshape(-1)


def _arrays(sides: list[_Layout], target: np.ndarray) -> list[np.ndarray]:
    arrays = [target]
    for side in sides:
        arrays += [side.ends, side.tokens, side.positions, side.indices]
    return arrays


def _words(array: np.ndarray) -> int:
    """Return the number of 8-byte words of a part; the next one begins at a whole word."""
    return -(-len(array) // 2) if array.dtype == np.int32 else len(array)


def _block(arrays: list[np.ndarray]) -> Tensor:
    """Return 1-D integer arrays in one int64 tensor, in pinned memory where there is a GPU; int32 stays int32."""
    words = [_words(array) for array in arrays]
    host = torch.empty(sum(words), dtype=torch.int64, pin_memory=torch.cuda.is_available())
    for array, part in zip(arrays, host.split(words)):
        part.numpy().view(array.dtype)[: len(array)] = array
    return host


def _views(block: Tensor, arrays: list[np.ndarray]) -> list[Tensor]:
    """Return the parts of ``block`` that hold ``arrays``."""
    parts = block.split([_words(array) for array in arrays])
    return [
        part.view(torch.int32)[: len(array)] if array.dtype == np.int32 else part for array, part in zip(arrays, parts)
    ]

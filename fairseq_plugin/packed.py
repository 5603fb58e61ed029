"""Training batches packed on the host, while they are still there, and the fused models' features of them.

fairseq collates padded batches on the CPU. What the layers need to know of the lengths is worked out there, and tokens,
targets and layout reach the device in one copy that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ls_train.packing import Packing

INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}
"""Keys of ``net_input`` that the fused models know."""


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
    """

    tokens: Tensor
    packing: Packing
    target: Tensor
    counted: int
    source_tokens: Tensor | None
    source: Packing | None


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

    def packing(self, ends: Tensor, positions: Tensor, indices: Tensor) -> Packing:
        """Return the packing with its tensors on the device."""
        full = len(self.indices) == len(self._flat)
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
    inputs = sample["net_input"]
    unknown = sorted(set(inputs) - INPUTS)
    if unknown:
        raise ValueError(f"the batch has the inputs {unknown}; the ls_ models take {sorted(INPUTS)}")
    sides = [_Layout(inputs[name], padding_idx) for name in ("prev_output_tokens", "src_tokens") if name in inputs]
    padded_target = sample["target"]
    target = _host(padded_target)[sides[0].indices]
    if prefix > 0:
        target[sides[0].indices % padded_target.shape[1] < prefix] = padding_idx
    arrays = [target]
    for side in sides:
        arrays += [side.ends, side.tokens, side.positions, side.indices]
    target_rows, *parts = _to_device(arrays, device)
    packed = [(parts[i + 1], side.packing(parts[i], *parts[i + 2 : i + 4])) for side, i in zip(sides, (0, 4))]
    (tokens, packing), (source_tokens, source) = packed if len(packed) == 2 else (*packed, (None, None))
    counted = int(np.count_nonzero(target != padding_idx))
    return PackedBatch(tokens, packing, target_rows, counted, source_tokens, source)


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


def _to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return 1-D integer arrays as tensors that share one block on ``device``; int32 stays, the rest is int64."""
    words = [-(-len(array) // 2) if array.dtype == np.int32 else len(array) for array in arrays]
    host = torch.empty(sum(words), dtype=torch.int64, pin_memory=device.type == "cuda")
    for array, part in zip(arrays, host.split(words)):
        part.numpy().view(array.dtype)[: len(array)] = array
    parts = host.to(device, non_blocking=True).split(words)
    return [
        part.view(torch.int32)[: len(array)] if array.dtype == np.int32 else part for array, part in zip(arrays, parts)
    ]

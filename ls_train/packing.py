"""Padded batches ``(B, T, ...)`` to packed rows ``(N, ...)`` and back.

Inside the layers a batch is its real tokens one after another, sentence by sentence, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class TokenOrder(NamedTuple):
    """Tokens in ascending order, equal ones as they come: what ``tokens.sort(stable=True)`` returns.

    The gradient of an embedding sums the rows of equal tokens. Whoever has the tokens on the host sorts them there,
    which spares the device two sorts a step.

    Attributes:
        sorted_ids: int64 (N,), the tokens.
        rows: int64 (N,), the row of each.
    """

    sorted_ids: Tensor
    rows: Tensor

    def check(self, tokens: Tensor) -> None:
        """Raise a ValueError where this cannot be the order of ``tokens`` int64 (N,); values are not looked at."""
        for name, tensor in zip(self._fields, self, strict=True):
            if tensor.shape != tokens.shape or tensor.dtype != torch.int64 or tensor.device != tokens.device:
                raise ValueError(
                    f"order.{name} must be int64 of shape {tuple(tokens.shape)} on {tokens.device}, got {tensor.dtype} "
                    f"of shape {tuple(tensor.shape)} on {tensor.device}; pass TokenOrder(*tokens.sort(stable=True))"
                )


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the rows of a packed tensor come from.

    Attributes:
        cu_seqlens: int32 (B + 1,), on the device: sequence b owns rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
        max_length: host int, no sequence is longer.
        positions: int64 (N,), on the device: index of each row's token in its own sequence, from 0.
        indices: int64 (N,), on the device: flat index ``b * T + t`` of each row in the padded batch, or None where
            there is no padding (row i is flat index i).
        batch: B.
        length: T, the padded length.
    """

    cu_seqlens: Tensor
    max_length: int
    positions: Tensor
    indices: Tensor | None
    batch: int
    length: int

    @cached_property
    def rows(self) -> Tensor:
        """Number of used rows: int32 (1,), a view of the last element of ``cu_seqlens``."""
        return self.cu_seqlens[-1:]

    @staticmethod
    def from_padding_mask(padding_mask: Tensor | None, batch: int, length: int, device: torch.device) -> Packing:
        """Build from a bool (B, T) mask, True where padded (left, right or anywhere), or None for no padding.

        A mask that is on a GPU costs one synchronisation; pass the CPU mask where there is one.

        Raises:
            TypeError: the mask is no tensor.
            ValueError: its shape is not (batch, length), its dtype is not bool or it holds no values.
        """
        if padding_mask is None:
            return Packing.from_lengths(torch.full((batch,), length, dtype=torch.int64), length, device)
        if not isinstance(padding_mask, Tensor):
            raise TypeError(f"padding_mask is of type {type(padding_mask).__name__}; pass a bool torch.Tensor or None")
        if padding_mask.is_meta:
            raise ValueError("padding_mask is on the device meta, where tensors have no values; pass real tokens")
        if padding_mask.dtype != torch.bool or padding_mask.shape != (batch, length):
            raise ValueError(
                f"padding_mask must be bool of shape ({batch}, {length}), got {padding_mask.dtype} of shape "
                f"{tuple(padding_mask.shape)}"
            )
        real = ~padding_mask.cpu()
        lengths = real.sum(1)
        indices = real.reshape(-1).nonzero().squeeze(1)
        return _build(lengths, indices if indices.numel() < batch * length else None, length, device)

    @staticmethod
    def from_lengths(lengths: Tensor, length: int, device: torch.device) -> Packing:
        """Build from the lengths int64 (B,) of right-padded sequences in a batch padded to ``length``.

        Raises:
            ValueError: a length is negative or larger than ``length``.
        """
        lengths = lengths.cpu().to(torch.int64)
        if lengths.numel() and not (0 <= int(lengths.min()) and int(lengths.max()) <= length):
            raise ValueError(f"lengths must be between 0 and the padded length {length}, got {lengths.tolist()}")
        mask = torch.arange(length) < lengths[:, None]
        full = bool(mask.all())
        return _build(lengths, None if full else mask.reshape(-1).nonzero().squeeze(1), length, device)

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows (N, ...) of ``x`` (B, T, ...)."""
        if x.shape[:2] != (self.batch, self.length):
            raise ValueError(f"x must start with shape ({self.batch}, {self.length}), got {tuple(x.shape)}")
        flat = x.reshape(self.batch * self.length, *x.shape[2:])
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return ``rows`` (N, ...) as (B, T, ...), zero where padded."""
        if self.indices is None:
            return rows.reshape(self.batch, self.length, *rows.shape[1:])
        flat = rows.new_zeros(self.batch * self.length, *rows.shape[1:]).index_copy(0, self.indices, rows)
        return flat.view(self.batch, self.length, *rows.shape[1:])


def _build(lengths: Tensor, indices: Tensor | None, length: int, device: torch.device) -> Packing:
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    starts = cu_seqlens[:-1].to(torch.int64)
    positions = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(lengths)
    return Packing(
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        max_length=int(lengths.max()) if lengths.numel() else 0,
        positions=positions.to(device, non_blocking=True),
        indices=None if indices is None else indices.to(device, non_blocking=True),
        batch=lengths.numel(),
        length=length,
    )

"""Counter-based dropout: every keep decision is a pure function of (seed, offset, element).

Generator: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call takes the
64-bit seed as key and the counter ``(group, row mod 2**32, plane, offset)`` and gives four 32-bit words, used as eight
16-bit lanes (lane ``2i`` is the low and ``2i + 1`` the high half of word ``i``): one call serves one 16-byte pack of
half-precision elements. An element is kept when its lane is at least ``round(p * 65536)``.

- Row-wise operators: ``plane = row >> 32``, ``group = column // 8``, lane ``column % 8``.
- Attention: ``row`` is the packed query row, ``plane`` the head and the column the key position ``j`` in its own
  sequence: ``group = (j // 32) * 4 + (j % 8) // 2``, lane ``((j % 32) // 8) * 2 + j % 2``. A tensor-core accumulator
  holds columns ``8t + 2q`` and ``8t + 2q + 1`` in one thread, so 32 keys of a row cost each of its threads one call.

``csrc/device.cuh`` implements the same function; the keep masks are equal bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
LEVELS = 1 << 16


def threshold(p: float) -> int:
    """Return the number of the 65536 lane values that are dropped for dropout probability ``p``.

    Raises:
        ValueError: ``p`` is not in [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability p = {p} must be between 0 and 1")
    return round(p * LEVELS)


def keep_scale(p: float) -> float:
    """Return the factor of kept elements: the inverse of the exact keep rate, 0 if everything is dropped."""
    dropped = threshold(p)
    return LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


def draw_seed(device: torch.device | str) -> Tensor:
    """Return a fresh int64 seed, shape (1,), from torch's default generator of ``device``; capturable in a graph."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def philox(seed: int, counter: tuple[np.ndarray | int, np.ndarray | int, np.ndarray | int, int]) -> list[np.ndarray]:
    """Return the four 32-bit output words (as uint64 arrays) of Philox 4x32-10 for broadcastable counter words."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(key[0]),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(key[1]),
            product0 & _LOW,
        )
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, _KEY_STEPS, strict=True)]
    return [c0, c1, c2, c3]


def keep_mask(seed: Tensor, offset: int, rows: int, columns: int, p: float) -> Tensor:
    """Return the keep mask of a row-wise operator.

    Args:
        seed: int64 (1,), on the CPU.
        offset: constant of the dropout site.
        rows: number of rows, from row 0.
        columns: number of columns.
        p: dropout probability.

    Returns:
        bool (rows, columns), on the CPU.
    """
    groups = -(-columns // 8)
    row = np.arange(rows, dtype=np.uint64)[:, None]
    words = philox(int(seed), (np.arange(groups, dtype=np.uint64)[None, :], row & _LOW, row >> _SHIFT, offset))
    return torch.from_numpy(_lanes(words).reshape(rows, groups * 8)[:, :columns] >= threshold(p))


def attention_keep_mask(seed: Tensor, offset: int, rows: Tensor, heads: int, keys: int, p: float) -> Tensor:
    """Return the keep mask of attention probabilities.

    Args:
        seed: int64 (1,), on the CPU.
        offset: constant of the dropout site.
        rows: packed query rows, int64 of any shape, on the CPU.
        heads: number of heads H.
        keys: number of key positions S, from position 0.
        p: dropout probability.

    Returns:
        bool (H, *rows.shape, S), on the CPU.
    """
    blocks = -(-keys // 32)
    row = rows.reshape(1, -1, 1).numpy().astype(np.uint64)
    head = np.arange(heads, dtype=np.uint64).reshape(-1, 1, 1)
    words = philox(int(seed), (np.arange(blocks * 4, dtype=np.uint64).reshape(1, 1, -1), row & _LOW, head, offset))
    lanes = _lanes(words).reshape(heads, rows.numel(), blocks, 4, 4, 2)
    keep = lanes.swapaxes(3, 4).reshape(heads, rows.numel(), blocks * 32)[:, :, :keys] >= threshold(p)
    return torch.from_numpy(keep.reshape(heads, *rows.shape, keys))


def _lanes(words: list[np.ndarray]) -> np.ndarray:
    halves = [half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, axis=-1).astype(np.int64)

"""Counter-based dropout: every keep decision is a pure function of (seed, offset, element).

Generator: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call takes the
64-bit seed as key and the counter ``(group, row mod 2**32, plane, offset)`` and gives four 32-bit words, used as eight
15-bit lanes (lane ``2i`` is bits 0-14 and ``2i + 1`` bits 16-30 of word ``i``): one call serves one 16-byte pack of
half-precision elements. An element is kept when its lane is at least ``round(p * 32768)``.

- Row-wise operators: ``plane = row >> 32``, ``group = column // 8``, lane ``column % 8``.
- Attention: ``row`` is the packed query row, ``plane`` the head and the column the key position ``j`` in its own
  sequence: ``group = (j // 32) * 4 + (j % 8) // 2``, lane ``((j % 32) // 8) * 2 + j % 2``. A tensor-core accumulator
  holds columns ``8t + 2q`` and ``8t + 2q + 1`` in one thread, so 32 keys of a row cost each of its threads one call.

``csrc/philox.cuh`` implements the same function; the keep masks are equal bit for bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
LEVELS = 1 << 15
_BLOCK = 1 << 14  # counters worked on at a time, so that the words of all rounds stay in the cache
_MEMO_BYTES, _MEMO_MASKS = 1 << 27, 512


def threshold(p: float) -> int:
    """Return the number of the 32768 lane values that are dropped for dropout probability ``p``.

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
    # Not broadcast here: the first rounds work on words that depend on the row or on the column alone.
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ (c1 ^ np.uint64(key0)),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ (c3 ^ np.uint64(key1)),
            product0 & _LOW,
        )
        key0, key1 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
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
        bool (rows, columns), on the CPU; shared between calls, not to be changed.
    """
    key = int(seed)

    def compute() -> np.ndarray:
        group = np.arange(-(-columns // 8), dtype=np.uint64)[None, :]
        row = np.arange(rows, dtype=np.uint64)[:, None]
        keep = np.empty((rows, group.size * 8), dtype=bool)
        for part in _blocks(rows, group.size):
            words = philox(key, (group, row[part] & _LOW, row[part] >> _SHIFT, offset))
            np.greater_equal(_lanes(words).reshape(keep[part].shape), threshold(p), out=keep[part])
        return keep[:, :columns]

    return _remember(("rows", key, offset, rows, columns, threshold(p)), compute)


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
        bool (H, *rows.shape, S), on the CPU; shared between calls, not to be changed.
    """
    key = int(seed)
    packed = rows.reshape(-1).numpy().astype(np.uint64)

    def compute() -> np.ndarray:
        blocks = -(-keys // 32)
        group = np.arange(blocks * 4, dtype=np.uint64)
        keep = np.empty((heads, packed.size, blocks, 4, 4, 2), dtype=bool)
        for head in range(heads):
            for part in _blocks(packed.size, group.size):
                words = philox(key, (group[None, :], packed[part, None] & _LOW, head, offset))
                lanes = _lanes(words).reshape(keep[head, part].shape).swapaxes(2, 3)
                np.greater_equal(lanes, threshold(p), out=keep[head, part])
        return keep.reshape(heads, packed.size, blocks * 32)[:, :, :keys]

    keep = _remember(("attention", key, offset, packed.tobytes(), heads, keys, threshold(p)), compute)
    return keep.view(heads, *rows.shape, keys)


def _blocks(rows: int, groups: int) -> list[slice]:
    step = max(1, _BLOCK // max(1, groups))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _lanes(words: list[np.ndarray]) -> np.ndarray:
    """Return the eight 15-bit lanes of four words as a new last dimension."""
    halves = [half for word in words for half in (word & np.uint64(0x7FFF), word >> np.uint64(16) & np.uint64(0x7FFF))]
    return np.stack(halves, axis=-1, dtype=np.uint16, casting="unsafe")


_memo: OrderedDict[Hashable, Tensor] = OrderedDict()
_memo_lock = threading.Lock()


def _remember(key: Hashable, compute: Callable[[], np.ndarray]) -> Tensor:
    """Return the mask of ``key`` from the memo of the latest masks: a backward needs its forward's again."""
    with _memo_lock:
        mask = _memo.pop(key, None)
        if mask is None:
            mask = torch.from_numpy(np.ascontiguousarray(compute()))
        _memo[key] = mask
        size = sum(m.numel() for m in _memo.values())
        while len(_memo) > 1 and (size > _MEMO_BYTES or len(_memo) > _MEMO_MASKS):
            size -= _memo.popitem(last=False)[1].numel()
        return mask

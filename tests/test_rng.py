from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ls_train import rng

SEED = torch.tensor([(0xA4093822 | 0x299F31D0 << 32)])


@pytest.mark.parametrize(
    "counter, seed, words",
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0xA4093822 | 0x299F31D0 << 32,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter: tuple[int, ...], seed: int, words: tuple[int, ...]) -> None:
    """Vectors of ``kat_vectors`` in the Random123 distribution (philox4x32, 10 rounds)."""
    assert tuple(int(word) for word in rng.philox(seed, counter)) == words
    signed = seed - (1 << 64) if seed >> 63 else seed
    assert tuple(int(word) for word in rng.philox(signed, counter)) == words, "a negative int64 seed is the same key"


def test_lanes_of_a_row() -> None:
    """Element (row, column) is lane column % 8 of the counter (column // 8, row, 0, offset)."""
    p, offset = 0.5, 9
    mask = rng.keep_mask(SEED, offset, 5, 27, p)
    for row, column in ((0, 0), (0, 7), (3, 8), (4, 26)):
        words = rng.philox(int(SEED), (column // 8, row, 0, offset))
        lane = int(words[column % 8 // 2]) >> 16 * (column % 2) & 0x7FFF
        assert bool(mask[row, column]) == (lane >= rng.threshold(p))


def test_lanes_of_attention() -> None:
    """Keys 8t + 2q and 8t + 2q + 1 of a block of 32 are the halves of word t of the counter of group q."""
    p, offset = 0.5, 9
    rows = torch.tensor([2, 77])
    mask = rng.attention_keep_mask(SEED, offset, rows, 3, 70, p)
    for head, index, key in ((0, 0, 0), (1, 0, 9), (2, 1, 31), (2, 1, 32), (1, 1, 69)):
        group = key // 32 * 4 + key % 8 // 2
        words = rng.philox(int(SEED), (group, int(rows[index]), head, offset))
        lane = int(words[key % 32 // 8]) >> 16 * (key % 2) & 0x7FFF
        assert bool(mask[head, index, key]) == (lane >= rng.threshold(p))


def test_blocks_do_not_show() -> None:
    """Masks that are worked out in several blocks equal their own beginnings."""
    large = rng.keep_mask(SEED, 1, 1000, 403, 0.3)
    assert torch.equal(large[:7, :16], rng.keep_mask(SEED, 1, 7, 16, 0.3))
    last = rng.philox(int(SEED), (np.arange(51), 999, 0, 1))
    lanes = np.stack(
        [h for w in last for h in (w & np.uint64(0x7FFF), w >> np.uint64(16) & np.uint64(0x7FFF))], -1
    ).reshape(-1)[:403]
    assert torch.equal(large[999], torch.from_numpy(lanes >= rng.threshold(0.3)))
    rows = torch.arange(3000)
    large = rng.attention_keep_mask(SEED, 1, rows, 2, 97, 0.3)
    assert torch.equal(large[:, 2990:, :40], rng.attention_keep_mask(SEED, 1, rows[2990:], 2, 40, 0.3))
    assert torch.equal(rng.attention_keep_mask(SEED, 1, rows.view(2, 1500), 2, 97, 0.3), large.view(2, 2, 1500, 97))


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999, 1.0])
def test_rate_and_scale(p: float) -> None:
    mask = rng.keep_mask(SEED, 3, 300, 800, p)
    rate = 1 - rng.threshold(p) / rng.LEVELS
    assert abs(rate - (1 - p)) <= 0.5 / rng.LEVELS
    assert abs(int(mask.sum()) - mask.numel() * rate) <= 5 * math.sqrt(mask.numel() * rate * (1 - rate))
    assert rng.keep_scale(p) == (1 / rate if rate else 0.0)


def test_neighbouring_rows_columns_and_offsets_are_unrelated() -> None:
    mask = rng.keep_mask(SEED, 3, 400, 400, 0.5)
    others = {
        "row": (mask[1:], mask[:-1]),
        "column": (mask[:, 1:], mask[:, :-1]),
        "pack": (mask[:, 8:], mask[:, :-8]),
        "offset": (mask, rng.keep_mask(SEED, 4, 400, 400, 0.5)),
        "seed": (mask, rng.keep_mask(SEED + 1, 3, 400, 400, 0.5)),
    }
    for name, (one, two) in others.items():
        agree = float((one == two).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(one.numel()), name


def test_masks_are_remembered_by_value() -> None:
    """A seed tensor that changes in place gives another mask, and the same value the same mask again."""
    seed = torch.tensor([1])
    first = rng.keep_mask(seed, 0, 9, 40, 0.5).clone()
    seed.fill_(2)
    assert not torch.equal(rng.keep_mask(seed, 0, 9, 40, 0.5), first)
    seed.fill_(1)
    assert torch.equal(rng.keep_mask(seed, 0, 9, 40, 0.5), first)


def test_memory_of_remembered_masks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_MEMO_BYTES", 10_000)
    monkeypatch.setattr(rng, "_memo", type(rng._memo)())
    for offset in range(50):
        rng.keep_mask(SEED, offset, 10, 100, 0.5)
    assert len(rng._memo) == 10


def test_drawn_seeds_follow_torch() -> None:
    torch.manual_seed(5)
    first, second = rng.draw_seed("cpu"), rng.draw_seed("cpu")
    torch.manual_seed(5)
    assert torch.equal(rng.draw_seed("cpu"), first)
    assert first.dtype == torch.int64
    assert first.shape == (1,)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_probability_out_of_range(p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout probability p = .* must be between 0 and 1"):
        rng.threshold(p)

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ls_train.packing import Packing

CPU = torch.device("cpu")


def mask_of(rows: list[str]) -> Tensor:
    """Return a padding mask from one string a sentence, '.' for a token and 'x' for padding."""
    flat = torch.tensor([c == "x" for row in rows for c in row], dtype=torch.bool)
    return flat.view(len(rows), len(rows[0]) if rows else 0)


@pytest.mark.parametrize(
    "rows, lengths",
    [
        (["...xx", ".....", ".xxxx"], [3, 5, 1]),
        (["xx...", ".....", "xxxx."], [3, 5, 1]),
        ([".x.x.", "xxxxx", "x...."], [3, 0, 4]),
        (["....", "...."], [4, 4]),
        (["xxx"], [0]),
        ([], []),
    ],
)
def test_rows_in_order_and_back(rows: list[str], lengths: list[int]) -> None:
    mask = mask_of(rows)
    packing = Packing.from_padding_mask(mask, *mask.shape, CPU)
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.cu_seqlens.diff().tolist() == lengths
    assert packing.max_length == max(lengths, default=0)
    assert packing.positions.tolist() == [i for n in lengths for i in range(n)]
    assert packing.rows.tolist() == [sum(lengths)]
    x = torch.randn(*mask.shape, 3)
    packed = packing.pack(x)
    assert torch.equal(packed, x[~mask])
    assert torch.equal(packing.unpack(packed), x.masked_fill(mask[:, :, None], 0))


def test_no_padding_costs_no_index() -> None:
    for packing in (
        Packing.from_padding_mask(None, 2, 3, CPU),
        Packing.from_padding_mask(torch.zeros(2, 3, dtype=torch.bool), 2, 3, CPU),
        Packing.from_lengths(torch.tensor([3, 3]), 3, CPU),
    ):
        assert packing.indices is None
        x = torch.randn(2, 3, 4)
        assert packing.pack(x).data_ptr() == x.data_ptr()
        assert packing.cu_seqlens.tolist() == [0, 3, 6]


def test_lengths_equal_the_right_padded_mask() -> None:
    lengths = torch.tensor([2, 0, 4])
    packing = Packing.from_lengths(lengths, 5, CPU)
    same = Packing.from_padding_mask(torch.arange(5) >= lengths[:, None], 3, 5, CPU)
    for name in ("cu_seqlens", "positions", "indices"):
        assert torch.equal(getattr(packing, name), getattr(same, name))
    assert (packing.max_length, packing.batch, packing.length) == (same.max_length, 3, 5)


def test_gradients_pass_through() -> None:
    packing = Packing.from_padding_mask(mask_of(["..x", "x.."]), 2, 3, CPU)
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packing.pack, (x,))
    assert torch.autograd.gradcheck(packing.unpack, (rows,))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"padding_mask must be bool of shape \(2, 3\), got torch.float32"):
        Packing.from_padding_mask(torch.zeros(2, 3), 2, 3, CPU)
    with pytest.raises(ValueError, match=r"of shape \(2, 3\), got torch.bool of shape \(3, 2\)"):
        Packing.from_padding_mask(torch.zeros(3, 2, dtype=torch.bool), 2, 3, CPU)
    with pytest.raises(ValueError, match=r"lengths must be between 0 and the padded length 3, got \[4\]"):
        Packing.from_lengths(torch.tensor([4]), 3, CPU)
    with pytest.raises(ValueError, match=r"x must start with shape \(2, 3\), got \(3, 2\)"):
        Packing.from_padding_mask(None, 2, 3, CPU).pack(torch.zeros(3, 2))

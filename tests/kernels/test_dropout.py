from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ls_train import rng
from ls_train.ops import dropout
from ls_train.testing import ROW_SHAPES, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type, row_count, seed_tensor


def kept(x: Tensor, seed: int, offset: int, p: float) -> Tensor:
    """Return PyTorch's form of dropout with the mask of (seed, offset)."""
    mask = rng.keep_mask(torch.tensor([seed]), offset, *x.shape, p).to(x.device)
    return x * mask * rng.keep_scale(p)


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        calls = []
        for columns in (24, 23):
            x, y = torch.randn(2, 13, columns, device=device).to(dtype)
            for p in (0.3, 0.0):
                calls.append(call("dropout_fwd", y=y, x=x, seed=seed_tensor(3, device), rows=None, p=p, offset=2))
        return calls


@on_every_type
# The last: several blocks, which begin anywhere in a row; rows shorter than a pack; more columns than a block has.
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (700, 33), (9000, 3), (3, 9001)])
def test_matches_torch(shape: tuple[int, int], device: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    seed = seed_tensor(-5, device)
    assert_matches_torch(lambda x: dropout(x, 0.3, seed, 7), lambda x: kept(x, -5, 7, 0.3), (x,))


RATES = (0.0, 2.0**-15, 7 * 2.0**-15, 657 * 2.0**-15, 0.1, 0.5, 0.96875, 0.9688, 0.999, 1.0)
"""Around what kernels compare as float16: subnormal numbers, infinity, beyond. With the seeds of the tests there are
lanes equal to the thresholds 7 and 657."""


@on_every_type
@pytest.mark.parametrize("p", RATES)
def test_mask_is_the_reference_mask(p: float, device: str, dtype: torch.dtype) -> None:
    y = dropout(torch.ones(61, 203, device=device, dtype=dtype), p, seed_tensor(1 << 40, device), (1 << 32) - 1)
    mask = rng.keep_mask(torch.tensor([1 << 40]), (1 << 32) - 1, 61, 203, p)
    assert torch.equal((y != 0).cpu(), mask)
    scale = torch.tensor(rng.keep_scale(p), dtype=dtype)
    assert torch.equal(y.cpu()[mask], scale.expand(int(mask.sum())))
    count, rate = mask.numel(), 1 - rng.threshold(p) / rng.LEVELS
    assert abs(int(mask.sum()) - count * rate) <= 5 * math.sqrt(count * rate * (1 - rate))


@on_every_type
def test_mask_depends_on_seed_offset_and_element_only(device: str, dtype: torch.dtype) -> None:
    def mask(seed: int, offset: int, rows: int = 64, used: int | None = None) -> Tensor:
        x = torch.ones(rows, 96, device=device, dtype=dtype)
        y = dropout(x, 0.5, seed_tensor(seed, device), offset, None if used is None else row_count(used, device))
        return y != 0

    base = mask(1, 0)
    assert torch.equal(base, mask(1, 0))
    assert torch.equal(base[:31], mask(1, 0, rows=31)), "the number of rows changed the mask"
    assert torch.equal(base[:31], mask(1, 0, used=31)[:31]), "rounded rows changed the mask"
    for other in (mask(2, 0), mask(1, 1), mask(1 | 1 << 32, 0)):
        agree = float((base == other).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(base.numel()), "masks of different counters are related"


def test_gradcheck() -> None:
    x = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, torch.tensor([3])), (x,))


def test_errors() -> None:
    x, seed = torch.ones(2, 3), torch.tensor([1])
    with pytest.raises(ValueError, match=r"dropout: argument p = 1.5 must be between 0 and 1"):
        dropout(x, 1.5, seed)
    with pytest.raises(ValueError, match=r"argument offset = -1 must be between 0 and 2\*\*32 - 1"):
        dropout(x, 0.5, seed, -1)
    with pytest.raises(ValueError, match="argument seed is missing with p = 0.5; pass ls_train.rng.draw_seed"):
        dropout(x, 0.5, None)
    with pytest.raises(TypeError, match="argument seed has dtype torch.int32; convert it to torch.int64"):
        dropout(x, 0.5, seed.int())

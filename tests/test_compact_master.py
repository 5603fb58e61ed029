"""A float32 master in 16 bits beside a 16-bit parameter: which numbers come back, and what the parameter is."""

import pytest
import torch

from ls_train.compact_master import SMALLEST_EXACT, join_master, rounds_to, split_master

NARROW = (torch.float16, torch.bfloat16)


def numbers() -> torch.Tensor:
    """Return float32 numbers: special ones, every exponent, weights as they are, and ties between 16-bit numbers."""
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, 65504.0, 65519.9, 65520.0, float("inf")])
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).int()
    weights = 0.02 * torch.randn(100_000, generator=generator)
    bfloat16_ties = (weights.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    half = weights.half()
    float16_ties = (half.float() + torch.nextafter(half, torch.full_like(half, 1.0)).float()) / 2
    return torch.cat([special, -special, bits.view(torch.float32), weights, bfloat16_ties, float16_ties])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.view(torch.int32) == other.view(torch.int32)


def test_bfloat16_pair_is_the_float32_number():
    master = numbers()
    param, remainder = split_master(master, torch.bfloat16)
    again = join_master(param, remainder)
    assert bool((same_bits(again, master) | (again.isnan() & master.isnan())).all())
    assert torch.equal(param.isnan(), master.isnan())


def test_float16_pair_is_the_float32_number_in_range():
    master = numbers()
    master = master[master.half().isfinite()]
    again = join_master(*split_master(master, torch.float16))
    exact = master.abs() >= SMALLEST_EXACT[torch.float16]
    assert torch.equal(again[exact], master[exact])
    assert float((again - master).abs().max()) <= 2**-40
    param = split_master(master, torch.float16)[0]
    assert torch.equal(split_master(again, torch.float16)[0], param), "the pair rounds to another parameter"
    assert torch.equal(join_master(*split_master(again, torch.float16)), again), "the second time changes nothing"


@pytest.mark.parametrize("value", [65520.0, -1e30, float("inf"), float("nan")])
def test_float16_beyond_its_range(value):
    param, remainder = split_master(torch.tensor([value]), torch.float16)
    torch.testing.assert_close(join_master(param, remainder), param.float(), equal_nan=True)
    assert remainder.item() == 0


@pytest.mark.parametrize("dtype", NARROW)
def test_every_nan_is_stored_alike(dtype):
    """Quiet and signalling ones of both signs, those that an overflow of the rounding would make numbers included."""
    bits = torch.tensor([0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF])
    master = torch.cat([bits, bits - 2**31]).repeat(9).int().view(torch.float32)  # long enough for vector instructions
    param, remainder = split_master(master, dtype)
    assert bool((param.view(torch.int16) == 0x7FFF).all())
    assert not remainder.any()
    assert bool(join_master(param, remainder).isnan().all())


@pytest.mark.parametrize("dtype", NARROW)
def test_parameter_is_the_nearest_number(dtype):
    """It is torch's rounding, but for bfloat16 at ties, where it is the number away from zero, equally near."""
    master = numbers()
    master = master[master.isfinite() & ((master.abs() >= SMALLEST_EXACT[dtype]) | (master == 0))]
    param, _ = split_master(master, dtype)
    other = (param != master.to(dtype)).nonzero().flatten()
    assert bool(rounds_to(master, param).all())
    if dtype == torch.float16:
        assert not len(other)
        return
    assert len(other) > 1000, "no ties among the numbers"
    assert bool((master[other].view(torch.int32) & 0xFFFF == 0x8000).all())
    theirs = master[other].to(dtype)
    finite = param[other].isfinite() & theirs.isfinite()
    assert torch.equal(
        (param[other].double() - master[other]).abs()[finite], (theirs.double() - master[other]).abs()[finite]
    )
    assert bool((param[other].float().abs() > theirs.float().abs()).all())


@pytest.mark.parametrize("dtype", NARROW)
def test_what_does_not_round_to_it(dtype):
    master = torch.tensor([1.0, 1.0, -0.5])
    assert rounds_to(master, torch.tensor([1.0, 1.01, 0.5], dtype=dtype)).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", NARROW)
def test_parameter_written_since(dtype):
    """With any remainder the master stays within half a unit in the last place of what was written."""
    remainders = split_master(0.02 * torch.randn(2**15, generator=torch.Generator().manual_seed(1)), dtype)[1]
    for value in (0.0, -0.0, 1.0, -3.0, 6e-8, 60000.0):
        written = torch.full_like(remainders, value, dtype=dtype)
        master = join_master(written, remainders)
        unit = torch.nextafter(written.abs(), torch.full_like(written, float("inf"))).double() - written.abs().double()
        assert bool(((master.double() - written.double()).abs() <= unit / 2).all()), value


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"master has dtype torch.float64; convert it to torch.float32"):
        split_master(torch.zeros(1, dtype=torch.float64), torch.float16)
    with pytest.raises(TypeError, match=r"dtype = torch.float32 has no remainder; use torch.float16"):
        split_master(torch.zeros(1), torch.float32)
    with pytest.raises(TypeError, match=r"remainder has dtype torch.int32; convert it to torch.int16"):
        join_master(torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"param has dtype torch.float32; use torch.float16"):
        join_master(torch.zeros(1), torch.zeros(1, dtype=torch.int16))

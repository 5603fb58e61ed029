from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from ls_train.ops import scale_cast
from ls_train.ops._arguments import statistics_dtype
from ls_train.testing import ROW_SHAPES, devices, dtypes
from tests.kernels.leaf_contract import Call, LeafContract, call, on_a_card, on_every_type, operator

PAIRS = [
    pytest.param(device, *pair, id=f"{device}-{pair[0]}-from-{pair[1]}".replace("torch.", ""))
    for device in devices()
    for pair in product(dtypes(device), repeat=2)
]
on_every_pair = pytest.mark.parametrize("device, dtype, kind", PAIRS)


def factor_of(value: float, device: str, *types: torch.dtype) -> Tensor:
    """Return the factor in the type of a calculation with tensors of ``types``."""
    wide = torch.float64 if torch.float64 in types else torch.float32
    return torch.tensor([value], device=device, dtype=wide)


def assert_scaled(out: Tensor, x: Tensor, factor: Tensor, accumulate: bool) -> None:
    """Call the operator: ``out`` must become the rounded result of the same steps in the type of the calculation."""
    exact = factor.double() * x.double()
    if accumulate:
        exact += out.double()
    operator("scale_cast")(out=out, x=x, factor=factor, accumulate=accumulate)
    unit, wide = torch.finfo(out.dtype).eps, torch.finfo(factor.dtype).eps
    # Half a unit for the rounding, and what the steps before it may leave, where summands may cancel.
    bound = exact.abs() * (0.51 * unit + 2 * wide) + torch.finfo(out.dtype).smallest_normal * unit
    if accumulate:
        bound += 4 * wide * float(exact.abs().max() if exact.numel() else 0)
    assert bool(((out.double() - exact).abs() <= bound).all())


class TestLeaf(LeafContract):
    read_write = frozenset({"out"})

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        """All pairs with ``dtype``, of whole packs and not."""
        calls = []
        for columns in (24, 23):
            for out_type, kind in ((dtype, statistics_dtype(dtype)), (statistics_dtype(dtype), dtype), (dtype, dtype)):
                out = torch.randn(13, columns, device=device).to(out_type)
                x = torch.randn(13, columns, device=device).to(kind)
                factor = factor_of(0.37, device, out_type, kind)
                calls.append(call("scale_cast", out=out, x=x, factor=factor, accumulate=False))
        return calls


@on_every_pair
@pytest.mark.parametrize("accumulate", [False, True])
# The last: whole tiles and parts of them, in packs and one by one.
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (3, 2731), *on_a_card((40, 8192), (331, 1009), (4099, 1024))])
def test_values(shape: tuple[int, int], accumulate: bool, device: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    x, out = torch.randn(shape, device=device).to(kind), torch.randn(shape, device=device).to(dtype)
    assert_scaled(out, x, factor_of(-0.37, device, dtype, kind), accumulate)


@on_every_pair
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("starts", [(1, 0), (0, 1), (1, 1), (4, 0), (0, 4), (8, 8)])
def test_views(starts: tuple[int, int], accumulate: bool, device: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Of any alignment, with the bits of an aligned tensor; what lies beside the result stays."""
    rows, columns = 61, 137
    x, before = torch.randn(rows, columns, device=device).to(kind), torch.randn(rows, columns, device=device).to(dtype)
    factor = factor_of(3.7, device, dtype, kind)
    expected = before.clone()
    operator("scale_cast")(out=expected, x=x, factor=factor, accumulate=accumulate)
    size = rows * columns
    memory = torch.full((starts[0] + size + 9,), 5.0, device=device, dtype=dtype)
    out = memory[starts[0] : starts[0] + size].view(rows, columns).copy_(before)
    moved = torch.empty(starts[1] + size, device=device, dtype=kind)[starts[1] :].view(rows, columns).copy_(x)
    operator("scale_cast")(out=out, x=moved, factor=factor, accumulate=accumulate)
    assert torch.equal(out, expected)
    assert bool((memory[: starts[0]] == 5).all())
    assert bool((memory[starts[0] + size :] == 5).all())


@on_every_pair
def test_special_values(device: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Infinity, NaN, signed zero and subnormal numbers, in a whole pack and in the rest behind it."""
    largest = torch.finfo(kind).max
    values = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, largest, -largest, torch.finfo(kind).tiny / 4]
    x = torch.tensor(values, device=device, dtype=torch.float64).to(kind).repeat(3).view(1, -1)
    for value in (1.0, -2.0, 0.0, 1e-6, 3e38, torch.inf, torch.nan):
        factor = factor_of(value, device, dtype, kind)
        out = scale_cast(x, factor, dtype)
        expected = (factor * x.to(factor.dtype)).to(dtype)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit() & ~out.isnan(), expected.signbit() & ~expected.isnan())


@on_every_type
def test_a_result_that_does_not_fit_is_infinite(device: str, dtype: torch.dtype) -> None:
    """So that mixed precision sees an overflow; the sum with what is there, too, before it is rounded."""
    x = torch.tensor([[60000.0, -70000.0, 1.0] * 11], device=device)
    one = factor_of(1.0, device, dtype)
    out = scale_cast(x.to(one.dtype), one, dtype)
    narrow = dtype == torch.float16
    assert out.isinf().tolist() == [[False, narrow, False] * 11]
    operator("scale_cast")(out=out, x=torch.full_like(x, 60000.0).to(one.dtype), factor=one, accumulate=True)
    assert out.isinf().tolist() == [[narrow, narrow, False] * 11]


@on_every_type
def test_factor_beyond_the_range_of_the_type(device: str, dtype: torch.dtype) -> None:
    """A loss scale may exceed float16's range, as long as the products fit."""
    x = torch.full((3, 5), 2.0**-10, device=device, dtype=dtype)
    assert torch.equal(scale_cast(x, factor_of(2.0**20, device, dtype)), torch.full_like(x, 2.0**10))


@on_every_type
def test_rounds_once(device: str, dtype: torch.dtype) -> None:
    """Rounded before the addition, a small product would be lost, or the sum rounded to even."""
    if dtype not in (torch.float16, torch.bfloat16):
        pytest.skip("sums are made in this type")
    unit = torch.finfo(dtype).eps
    out = torch.full((1, 9), 1 + unit, device=device, dtype=dtype)
    # Just below the middle between two numbers; rounded to 16 bits it is the middle, of which the even one is taken.
    x = torch.full((1, 9), unit / 2 * (1 - 2.0**-12), device=device)
    operator("scale_cast")(out=out, x=x, factor=factor_of(1.0, device), accumulate=True)
    assert torch.equal(out, torch.full_like(out, 1 + unit))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_reads_the_factor(accumulate: bool) -> None:
    x, factor = torch.randn(67, 129, device="cuda"), torch.ones(1, device="cuda")
    out, eager = torch.zeros(2, 67, 129, dtype=torch.float16, device="cuda")
    run = operator("scale_cast")
    run(out=out, x=x, factor=factor, accumulate=accumulate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out=out, x=x, factor=factor, accumulate=accumulate)
    for value in (0.5, -128.0):
        factor.fill_(value)
        for tensor in (out, eager):
            tensor.fill_(1)
        graph.replay()
        run(out=eager, x=x, factor=factor, accumulate=accumulate)
        assert torch.equal(out, eager)
        assert_scaled(torch.ones_like(out), x, factor, accumulate)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 5)}, r"argument x has shape \(3, 5\); it needs \(N = 3, C = 4\)"),
        ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "argument x has dtype float64; use float32"),
        ({"x": torch.zeros(3, 4, dtype=torch.int64)}, "argument x has dtype int64; use float32"),
        ({"out": torch.zeros(3, 4, dtype=torch.float64)}, "argument out has dtype float64; use float32"),
        ({"factor": torch.ones(1, dtype=torch.float16)}, "argument factor has dtype float16; convert it to float32"),
        ({"factor": torch.ones(2)}, r"argument factor has shape \(2,\)"),
    ],
)
def test_compiled_errors(changes: dict[str, Tensor], message: str) -> None:
    arguments = {"out": torch.zeros(3, 4, dtype=torch.float16), "x": torch.zeros(3, 4), "factor": torch.ones(1)}
    moved = {name: tensor.cuda() for name, tensor in (arguments | changes).items()}
    with pytest.raises(RuntimeError, match=f"scale_cast: {message}"):
        operator("scale_cast")(**moved, accumulate=False)


@on_every_type
def test_is_not_differentiable(device: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, device=device, dtype=dtype, requires_grad=True)
    assert not scale_cast(x, factor_of(2.0, device, dtype).requires_grad_()).requires_grad


def test_errors() -> None:
    x, one = torch.ones(2, 3), torch.ones(1)
    with pytest.raises(TypeError, match="argument dtype = torch.int64; use float32"):
        scale_cast(x, one, torch.int64)
    with pytest.raises(ValueError, match=r"scale_cast: argument x has shape \(3,\); it needs 2 dimensions"):
        scale_cast(x[0], one)
    with pytest.raises(TypeError, match="argument factor has dtype torch.float32; convert it to torch.float64"):
        scale_cast(x, one, torch.float64)
    with pytest.raises(ValueError, match=r"argument factor has shape \(\); it needs \(1,\)"):
        scale_cast(x, one[0])
    with pytest.raises(TypeError, match="argument x has dtype torch.int64; use float32, float16, bfloat16 or float64"):
        scale_cast(x.long(), one)
    with pytest.raises(ValueError, match=r"argument x has shape \(2, 3\); it needs \(2, 4\)"):
        operator("scale_cast")(torch.ones(2, 4), x, one, False)

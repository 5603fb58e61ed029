from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from ls_train.ops import cross_entropy, linear_cross_entropy, linear_cross_entropy_gradients
from ls_train.ops.linear_cross_entropy import chunk_rows
from ls_train.params import FlatParameters
from ls_train.testing import assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import on_every_type, row_count
from tests.kernels.test_cross_entropy import IGNORE, native, random_target

# (rows, columns, classes)
SHAPES = ((0, 8, 5), (1, 4, 3), (3, 8, 7), (13, 24, 37), (37, 16, 129), (64, 32, 1000))


def random_inputs(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, classes = shape
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.randn(classes, columns, device=device).mul(columns**-0.5).to(dtype)
    return x, weight, random_target(rows, classes, device)


@on_every_type
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_torch(shape: tuple[int, int, int], eps: float, device: str, dtype: torch.dtype) -> None:
    x, weight, target = random_inputs(shape, device, dtype)
    assert_matches_torch(
        lambda x, w: linear_cross_entropy(x, w, target, eps, IGNORE).loss,
        lambda x, w: native(x @ w.t(), target, eps).sum(),
        (x, weight),
    )


@on_every_type
def test_sums_of_the_separate_operator(device: str, dtype: torch.dtype) -> None:
    # Small whole numbers: products are exact at every type, and equal logits are frequent.
    x = torch.randint(-2, 3, (37, 16), device=device).to(dtype)
    weight = torch.randint(-2, 3, (129, 16), device=device).to(dtype)
    target = random_target(37, 129, device)
    expected = cross_entropy(x @ weight.t(), target, 0.1, IGNORE, count_correct=True)
    for inputs in ((x, weight), (x.clone().requires_grad_(), weight)):
        actual = linear_cross_entropy(*inputs, target, 0.1, IGNORE, count_correct=True)
        torch.testing.assert_close(actual.loss.detach(), expected.loss.sum(), rtol=1e-5, atol=0)
        torch.testing.assert_close(actual.nll, expected.nll.sum(), rtol=1e-5, atol=0)
        assert int(actual.correct) == int(expected.correct.sum())
    assert linear_cross_entropy(x, weight, target).correct is None


@on_every_type
def test_unused_rows(device: str, dtype: torch.dtype) -> None:
    x, weight, target = random_inputs((37, 16, 129), device, dtype)
    used = 22  # ends inside a chunk, and a whole chunk is unused
    results = []
    for rows in (None, row_count(used, device)):
        leaves = [x.clone(), weight.clone()] if rows is not None else [x[:used].clone(), weight.clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        labels = target.clone() if rows is not None else target[:used]
        labels[used:] = 1 << 40
        loss = linear_cross_entropy(*leaves, labels, 0.1, IGNORE, rows).loss
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    (loss, dx, dweight), (cut_loss, cut_dx, cut_dweight) = results
    close = {"rtol": 0, "atol": 40 * torch.finfo(dtype).eps}
    torch.testing.assert_close(cut_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(cut_dx[:used], dx, **close)
    assert not cut_dx[used:].any()
    torch.testing.assert_close(cut_dweight, dweight, **close)


@on_every_type
def test_loss_scale_beyond_float16(device: str, dtype: torch.dtype) -> None:
    """The incoming gradient may be larger than float16 can hold, as long as the products fit."""
    x, weight, target = random_inputs((13, 24, 37), device, dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, target, 0.1, IGNORE).loss * 1e-3
    plain = torch.autograd.grad(loss, leaves, retain_graph=True)
    scaled = torch.autograd.grad(loss * 1e5, leaves)
    for ours, theirs in zip(scaled, plain, strict=True):
        assert ours.isfinite().all()
        largest = float(theirs.abs().max())
        difference = (ours.double() / 1e5 - theirs.double()).abs().max()
        assert float(difference) <= 2 * torch.finfo(dtype).eps * largest


@on_every_type
def test_smoothing_gradient_survives_a_large_vocabulary(device: str, dtype: torch.dtype) -> None:
    classes = 40000
    x = torch.ones(8, 2, device=device, dtype=dtype)
    weight = torch.zeros(classes, 2, device=device, dtype=dtype)
    weight[0] = 30
    target = torch.zeros(8, dtype=torch.int64, device=device)
    weight.requires_grad_()
    scale = 1024.0
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, target, 0.12, IGNORE).loss * scale, weight)
    expected = -scale * 8 * 0.12 / (classes - 1)
    assert float((grad[1:].double() / expected - 1).abs().max()) < 2 * torch.finfo(dtype).eps + 1e-6


@on_every_type
def test_backward_twice_and_partly(device: str, dtype: torch.dtype) -> None:
    x, weight, target = random_inputs((13, 24, 37), device, dtype)
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, 0.1, IGNORE).loss
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    weight.requires_grad_()
    (alone,) = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, target, 0.1, IGNORE).loss, weight)
    loss = linear_cross_entropy(x, weight, target, 0.1, IGNORE).loss
    assert torch.equal(torch.autograd.grad(loss, weight)[0], alone)


@on_every_type
def test_gradient_slot(device: str, dtype: torch.dtype) -> None:
    x, weight, target = random_inputs((13, 24, 37), device, dtype)
    plain = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(linear_cross_entropy(x, plain, target, 0.1, IGNORE).loss, plain)
    parameter = torch.nn.Parameter(weight)
    flat = FlatParameters([parameter, torch.nn.Parameter(weight[0].clone())])
    flat.direct_grads = True
    for times in (1, 2):
        linear_cross_entropy(x, parameter, target, 0.1, IGNORE).loss.backward()
        grad = parameter.grad
        assert grad.data_ptr() == flat.buffers[0].slot(parameter).tensor.data_ptr()
        torch.testing.assert_close(grad, expected * times, rtol=0, atol=8 * torch.finfo(dtype).eps)


@on_every_type
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_at_once_match_torch(
    shape: tuple[int, int, int], scale: float, device: str, dtype: torch.dtype
) -> None:
    """The weight's gradient too, whose sums of chunks are rounded: the rule of all operators holds."""
    x, weight, target = random_inputs(shape, device, dtype)
    found = {}
    for name, cast in (("native", dtype), ("reference", torch.float64)):
        leaves = [tensor.to(cast).requires_grad_() for tensor in (x, weight)]
        loss = native(leaves[0] @ leaves[1].t(), target, 0.1).sum()
        found[name] = loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, scale))
    gradient = torch.full((1,), scale, device=device)
    outputs, dx, dweight = linear_cross_entropy_gradients(x, weight.requires_grad_(), target, gradient, 0.1, IGNORE)
    assert not outputs.loss.requires_grad
    assert torch.equal(outputs.loss, linear_cross_entropy(x, weight, target, 0.1, IGNORE).loss)
    largest = max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in found["reference"])
    ours = outputs.loss, dx, dweight
    for name, actual, theirs, reference in zip(("loss", "dx", "dweight"), ours, *found.values(), strict=True):
        assert_accurate(actual, reference, dtype, theirs, name, largest)


@on_every_type
def test_sums_of_equal_chunks_are_accurate(device: str, dtype: torch.dtype) -> None:
    """Four equal parts, for each of which the sum grows: the most that rounding can do."""
    rows, classes = 8192, 5
    x = torch.rand(rows // 4, 3, device=device).to(dtype).repeat(4, 1)
    weight = torch.randn(classes, 3, device=device).to(dtype).requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    assert chunk_rows(rows, holds_gradient=False) == rows // 4
    (expected,), (native_grad,) = (
        torch.autograd.grad(native(x.to(cast) @ w.t(), target, 0.1).sum(), w)
        for cast, w in ((kind, weight.detach().to(kind).requires_grad_()) for kind in (torch.float64, dtype))
    )
    one = torch.ones(1, device=device)
    dweight = linear_cross_entropy_gradients(x, weight, target, one, 0.1, IGNORE)[2]
    assert_accurate(dweight, expected, dtype, native_grad)


@on_every_type
def test_gradients_at_once_go_into_the_slot(device: str, dtype: torch.dtype) -> None:
    x, weight, target = random_inputs((13, 24, 37), device, dtype)
    gradient = torch.full((1,), 4.0, device=device)
    used = row_count(9, device)
    plain = weight.clone().requires_grad_()
    expected = linear_cross_entropy_gradients(x, plain, target, gradient, 0.1, IGNORE, used, True)
    assert plain.grad is None
    parameter = torch.nn.Parameter(weight)
    flat = FlatParameters([parameter, torch.nn.Parameter(weight[0].clone())])
    flat.direct_grads = True
    slot = flat.buffers[0].slot(parameter)
    slot.tensor.fill_(float("nan"))  # what is left of an earlier step must not matter
    for times in (1, 2):
        outputs, dx, dweight = linear_cross_entropy_gradients(
            x, parameter, target, gradient, 0.1, IGNORE, used, count_correct=True
        )
        assert dweight is None
        assert torch.equal(dx, expected[1])
        assert not dx[9:].any()
        assert all(torch.equal(here, there) for here, there in zip(outputs, expected[0], strict=True))
        assert parameter.grad is slot.tensor
        close = 8 * torch.finfo(dtype).eps * float(expected[2].abs().max())
        torch.testing.assert_close(slot.tensor, expected[2] * times, rtol=0, atol=close)
    empty = linear_cross_entropy_gradients(x[:0], plain, target[:0], gradient)
    assert not empty[2].any()
    parameter.grad = None
    linear_cross_entropy_gradients(x[:0], parameter, target[:0], gradient)
    assert not parameter.grad.any()
    frozen = linear_cross_entropy_gradients(x, weight.detach(), target, gradient)
    assert frozen[2] is None


@on_every_type
def test_a_gradient_that_does_not_fit_is_infinite(device: str, dtype: torch.dtype) -> None:
    """So that mixed precision sees an overflow."""
    x, weight, target = random_inputs((13, 24, 37), device, dtype)
    gradient = torch.full((1,), 1e5, device=device)
    _, dx, dweight = linear_cross_entropy_gradients(x, weight.requires_grad_(), target, gradient)
    assert bool(dweight.isfinite().all()) == (dtype != torch.float16)
    assert bool(dx.isfinite().all()) == (dtype != torch.float16)


@on_every_type
@pytest.mark.parametrize("used", [None, 35, 61])
def test_halves_of_chunks(used: int | None, device: str, dtype: torch.dtype, monkeypatch) -> None:
    """Chunks of 13 rows and at last of 9, in parts of 7: every one lies where it belongs, and unused rows too."""
    x, weight, target = random_inputs((61, 16, 129), device, dtype)
    weight.requires_grad_()
    gradient = torch.full((1,), 4.0, device=device)
    rows = None if used is None else row_count(used, device)

    def sums_and_gradients() -> tuple[Tensor, ...]:
        sums, *gradients = linear_cross_entropy_gradients(x, weight, target, gradient, 0.1, IGNORE, rows, True)
        return *sums, *gradients

    expected, parts = sums_and_gradients(), []
    with monkeypatch.context() as patch:
        module = sys.modules[chunk_rows.__module__]  # its name is its function too
        write = module.product
        patch.setattr(module, "_SIDE_ROWS", 2)
        patch.setattr(module, "product", lambda out, *rest, **more: parts.append(len(out)) or write(out, *rest, **more))
        found = sums_and_gradients()
    assert {2, 6, 7} < set(parts)
    for name, actual, wanted in zip(("loss", "nll", "correct", "dx", "dweight"), found, expected, strict=True):
        bound = 4 * torch.finfo(dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_two_streams_have_the_bits_of_one(dtype: torch.dtype, monkeypatch) -> None:
    """Many times, as a buffer that is overwritten too early need not be noticed; captured too."""
    x, weight, target = random_inputs((4096, 512, 8000), "cuda", dtype)
    weight.requires_grad_()
    gradient = torch.full((1,), 64.0, device="cuda")

    def gradients() -> tuple[Tensor, ...]:
        sums, *gradients = linear_cross_entropy_gradients(x, weight, target, gradient, 0.1, IGNORE)
        return sums.loss, *gradients

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[chunk_rows.__module__], "_side_stream", lambda main: main)
        expected = gradients()
    for _ in range(30):
        assert all(map(torch.equal, gradients(), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for _ in range(30):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, captured, expected))


def test_holds_at_most_a_quarter_of_the_logits() -> None:
    for rows in range(1, 200):
        for holds_gradient in (True, False):
            assert 1 <= chunk_rows(rows, holds_gradient) <= max(1, rows // 4)
    for rows in (8192, 8193, 15000):
        assert chunk_rows(rows) <= rows // 8
        assert chunk_rows(rows, holds_gradient=False) <= rows // 4
    assert chunk_rows(0) == 0


def test_gradcheck() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    target = random_target(6, 5, "cpu")
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, target, 0.2, IGNORE).loss, (x, weight))


def test_errors() -> None:
    x, weight, target = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy: argument weight has shape \(5, 3\); it needs \(5, 4\)"
    ):
        linear_cross_entropy(x, weight[:, :3], target)
    with pytest.raises(TypeError, match="argument weight has dtype torch.float16; convert it to torch.float32"):
        linear_cross_entropy(x, weight.half(), target)
    with pytest.raises(IndexError, match="argument target holds 9"):
        linear_cross_entropy(x, weight, torch.tensor([1, 9]))
    with pytest.raises(ValueError, match=r"_gradients: argument gradient has shape \(2,\); it needs \(1,\)"):
        linear_cross_entropy_gradients(x, weight, target, torch.ones(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_error_leaves_nothing_running_beside(monkeypatch) -> None:
    """Tensors that an error frees are the current stream's again: it has to wait for the other one."""
    x, weight, target = random_inputs((4096, 64, 800), "cuda", torch.float16)
    weight.requires_grad_()
    main, beside = torch.cuda.current_stream(), []
    module = sys.modules[chunk_rows.__module__]
    write = module.product

    def write_or_fail(*arguments: object, **options: object) -> None:
        if torch.cuda.current_stream() != main:
            beside.append(torch.cuda.current_stream())
            torch.cuda._sleep(400_000_000)  # cycles
            raise RuntimeError("no product")
        write(*arguments, **options)

    monkeypatch.setattr(module, "product", write_or_fail)
    with pytest.raises(RuntimeError, match="no product"):
        linear_cross_entropy_gradients(x, weight, target, torch.ones(1, device="cuda"), 0.1, IGNORE)
    main.synchronize()
    assert [stream.query() for stream in beside] == [True]

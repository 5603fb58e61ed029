"""Tensors of more than 2**31 elements: the last rows must come out as if they were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ls_train import ops, rng

NEEDED_BYTES = 60 << 30
LIMIT = 1 << 31
TAIL = 8
MANY = 20000  # rows that a kernel treats as it does any number of them

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < NEEDED_BYTES,
    reason=f"needs a CUDA device with {NEEDED_BYTES >> 30} GiB",
)
on_gpu = pytest.mark.parametrize("device", ["cuda"])


def random_rows(columns: int, device: str) -> Tensor:
    """Return half-precision rows of just over 2**31 elements: zeros, with random numbers in the last ones."""
    rows = torch.zeros(LIMIT // columns + TAIL, columns, dtype=torch.float16, device=device)
    rows[-TAIL:] = torch.randn(TAIL, columns, device=device).half()
    return rows


def tail(x: Tensor) -> Tensor:
    return x[-TAIL:].clone()


@on_gpu
def test_layer_norm(device: str) -> None:
    x = random_rows(1024, device)
    weight, bias = torch.randn(2, 1024, device=device).half()
    # The backward adds in another order where rows are few.
    leaf, small = x.requires_grad_(), x.detach()[-MANY:].clone().requires_grad_()
    y, expected = ops.layer_norm(leaf, weight, bias), ops.layer_norm(small, weight, bias)
    assert torch.equal(y[-MANY:], expected)
    grad = torch.zeros_like(y)
    grad[-TAIL:] = 1
    (dx,) = torch.autograd.grad(y, leaf, grad)
    assert torch.equal(dx[-MANY:], torch.autograd.grad(expected[-TAIL:].sum(), small)[0])


@on_gpu
def test_row_wise_operators(device: str) -> None:
    x = random_rows(1000, device)
    bias = torch.randn(1000, device=device).half()
    small = tail(x)
    y = ops.bias_activation_dropout(x, bias, "gelu")
    assert torch.equal(y[-TAIL:], ops.bias_activation_dropout(small, bias, "gelu"))
    y = ops.bias_dropout_add(x, bias, x)
    assert torch.equal(y[-TAIL:], ops.bias_dropout_add(small, bias, small))


@on_gpu
def test_dropout_mask(device: str) -> None:
    columns = 64
    rows = LIMIT // columns + TAIL
    y = ops.dropout(
        torch.ones(rows, columns, dtype=torch.float16, device=device), 0.5, torch.tensor([7], device=device), 3
    )
    for row in (rows - TAIL, rows - 1):
        words = rng.philox(7, (torch.arange(columns // 8).numpy(), row, 0, 3))
        lanes = torch.tensor([[int(w) >> shift & 0x7FFF for w in group for shift in (0, 16)] for group in zip(*words)])
        assert torch.equal((y[row] != 0).cpu(), lanes.view(-1) >= rng.threshold(0.5))


@on_gpu
def test_scale_cast(device: str) -> None:
    x, factor = random_rows(1000, device), torch.full((1,), -3.0, device=device)
    expected = ops.scale_cast(tail(x), factor, torch.float32)
    y = ops.scale_cast(x, factor, torch.float32)
    assert torch.equal(y[-TAIL:], expected)
    torch.ops.ls_train.scale_cast(x, y, factor, True)
    assert torch.equal(x[-TAIL:], (expected * factor + expected / factor).half())


@on_gpu
def test_cross_entropy(device: str) -> None:
    logits = random_rows(40000, device)
    target = torch.randint(40000, (logits.shape[0],), device=device)
    small = tail(logits).requires_grad_()
    leaf = logits.requires_grad_()
    loss, expected = (ops.cross_entropy(x, t, 0.1).loss for x, t in ((leaf, target), (small, target[-TAIL:].clone())))
    assert torch.equal(loss[-TAIL:], expected)
    (dlogits,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.equal(dlogits[-TAIL:], torch.autograd.grad(expected.sum(), small)[0])


@on_gpu
def test_softmax(device: str) -> None:
    x = random_rows(512, device)
    y = ops.softmax_dropout(x.view(1, 1, *x.shape))
    assert torch.equal(y[0, 0, -TAIL:], ops.softmax_dropout(tail(x).view(1, 1, TAIL, 512))[0, 0])


@on_gpu
def test_embedding(device: str) -> None:
    weight = random_rows(1024, device)
    tokens = torch.arange(weight.shape[0] - 5, weight.shape[0], device=device)
    leaf = weight.requires_grad_()
    y = ops.embedding(tokens, tokens, leaf)
    assert torch.equal(y, weight[-5:])
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(grad[-5:], torch.ones_like(y))
    assert not grad[:-5].any()


@on_gpu
def test_attention(device: str) -> None:
    heads, width, length = 16, 64, 32
    rows = LIMIT // (heads * width * length) * length + 2 * length
    q = torch.zeros(rows, heads, width, dtype=torch.float16, device=device)
    q[-length:] = torch.randn(length, heads, width, device=device).half()
    cu = torch.arange(0, rows + 1, length, dtype=torch.int32, device=device)
    small = q[-length:].clone().requires_grad_()
    leaf = q.requires_grad_()
    out = ops.attention(leaf, leaf, leaf, cu, cu, length, length)
    expected = ops.attention(small, small, small, cu[:2].clone(), cu[:2].clone(), length, length)
    assert torch.equal(out[-length:], expected)
    grad = torch.zeros_like(out)
    grad[-length:] = 1
    (dq,) = torch.autograd.grad(out, leaf, grad)
    assert torch.equal(dq[-length:], torch.autograd.grad(expected.sum(), small)[0])


@on_gpu
def test_norm_and_adam(device: str) -> None:
    size = LIMIT + 5
    grad = torch.zeros(size, dtype=torch.float16, device=device)
    grad[-3:] = 2
    segments = torch.tensor([0, LIMIT - 1, size], device=device)
    norm, found_inf = ops.grad_norm(grad, segments)
    assert (float(norm), float(found_inf)) == (pytest.approx(12**0.5), 0)
    param = torch.zeros_like(grad)
    master, exp_avg, exp_avg_sq = (torch.zeros(size, device=device) for _ in range(3))
    hyper = torch.tensor([[0.9, 0.98, 1e-8, 0.0, 0.5, 0.5]], dtype=torch.float64, device=device)
    ops.adam(
        param, master, exp_avg, exp_avg_sq, grad, segments, torch.zeros(2, dtype=torch.int32, device=device),
        torch.ones(2, dtype=torch.int64, device=device), None, hyper, torch.tensor([1, 1], device=device),
    )  # fmt: skip
    assert torch.equal(param[-3:], torch.full_like(param[-3:], -0.5))
    assert not param[:-3].any()

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ls_train.ops import cross_entropy
from ls_train.ops._arguments import statistics_dtype
from ls_train.testing import assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type, row_count, run

IGNORE = 1
SHAPES = ((0, 5), (1, 2), (3, 7), (5, 64), (7, 1023), (2, 5003))


def random_target(rows: int, classes: int, device: str) -> Tensor:
    """Return targets of which about a third are to be ignored, never all of them."""
    target = torch.randint(classes, (rows,))
    target[1::3] = IGNORE
    return target.to(device)


def native(logits: Tensor, target: Tensor, eps: float) -> Tensor:
    """Return fairseq's label-smoothed loss of each row from PyTorch's own cross entropy.

    PyTorch spreads eps' over all V classes, fairseq eps over the V - 1 others: equal for eps' = eps * V / (V - 1).
    """
    classes = logits.shape[1]
    return F.cross_entropy(
        logits, target, ignore_index=IGNORE, reduction="none", label_smoothing=eps * classes / (classes - 1)
    )


class TestLeaf(LeafContract):
    read_write = frozenset({"logits"})

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        rows, classes = 13, 37
        logits, dlogits = torch.randn(2, rows, classes, device=device).to(dtype)
        target = random_target(rows, classes, device)
        loss, nll, lse, dloss = torch.randn(4, rows, dtype=statistics_dtype(dtype), device=device)
        correct = torch.empty(rows, dtype=torch.int32, device=device)
        settings = {"target": target, "rows": None, "label_smoothing": 0.1, "ignore_index": IGNORE}
        forward = call("cross_entropy_fwd", loss=loss, nll=nll, lse=lse, correct=correct, logits=logits, **settings)
        run(*forward)
        inplace = {"logits": logits, "loss": loss, "nll": nll, "correct": correct}
        return [
            forward,
            call("cross_entropy_fwd", **forward[1] | {"correct": None, "label_smoothing": 0.0}),
            call("cross_entropy_bwd", dlogits=dlogits, dloss=dloss, logits=logits, lse=lse, **settings),
            call("cross_entropy_inplace", **inplace, grad_scale=torch.full((1,), 8.0, device=device), **settings),
            call("cross_entropy_inplace", **inplace | {"correct": None}, grad_scale=None, **settings),
        ]


@on_every_type
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_torch(shape: tuple[int, int], eps: float, device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(shape, device=device).mul(3).to(dtype)
    target = random_target(*shape, device)
    assert_matches_torch(
        lambda x: cross_entropy(x, target, eps, IGNORE)[0], lambda x: native(x, target, eps), (logits,)
    )
    assert_accurate(
        cross_entropy(logits, target, eps, IGNORE).nll,
        native(logits.double(), target, 0.0),
        statistics_dtype(dtype),
    )


@on_every_type
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_inplace_gives_the_same(eps: float, device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(11, 129, device=device).mul(3).to(dtype)
    target = random_target(11, 129, device)
    leaf = logits.clone().requires_grad_()
    expected = cross_entropy(leaf, target, eps, IGNORE, count_correct=True)
    (grad,) = torch.autograd.grad(expected.loss, leaf, torch.full_like(expected.loss, 4.0))
    actual = [torch.empty_like(t) for t in (*expected[:2], expected.correct)]
    scale = torch.full((1,), 4.0, device=device)
    torch.ops.ls_train.cross_entropy_inplace(logits, *actual, target, None, scale, eps, IGNORE)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, grad, rtol=0, atol=4 * torch.finfo(dtype).eps)


@on_every_type
def test_correct_counts_the_first_of_equal_logits(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 300, device=device, dtype=dtype)
    logits[0, 7] = logits[1, 299] = 2
    logits[2, [40, 200]] = logits[3, [40, 200]] = 2
    target = torch.tensor([7, 299, 40, 200, IGNORE], device=device)
    assert cross_entropy(logits, target, 0.1, IGNORE, count_correct=True).correct.tolist() == [1, 1, 1, 0, 0]
    assert cross_entropy(logits, target).correct is None


@on_every_type
def test_large_logits(device: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 1e4], [6e4, 6e4, 0.0, -6e4]], device=device).to(dtype)
    target = torch.tensor([3, 2], device=device)
    leaf, reference = logits.requires_grad_(), logits.detach().double().requires_grad_()
    loss, expected = cross_entropy(leaf, target, 0.1, IGNORE).loss, native(reference, target, 0.1)
    assert_accurate(loss.detach(), expected.detach(), loss.dtype)
    grad, expected_grad = torch.autograd.grad(loss.sum(), leaf)[0], torch.autograd.grad(expected.sum(), reference)[0]
    # The saved softmax sum is rounded to float32: half a unit of 6e4 is 2e-3.
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=2e-3 + torch.finfo(dtype).eps)


@on_every_type
def test_unused_rows_do_not_look_at_targets(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 9, device=device).to(dtype)
    target = torch.tensor([2, 3, 1 << 40, -7], device=device)
    result = cross_entropy(logits, target, 0.1, IGNORE, row_count(2, device))
    assert torch.equal(result.loss[:2], cross_entropy(logits[:2], target[:2], 0.1, IGNORE).loss)
    assert not result.loss[2:].any()


@on_every_type
def test_float16_smoothing_gradient_survives_a_large_vocabulary(device: str, dtype: torch.dtype) -> None:
    """0.1 / 39999 is subnormal in float16: the gradient must be written multiplied by the loss scale."""
    classes, scale = 40000, 128.0
    logits = torch.zeros(2, classes, device=device, dtype=dtype)
    logits[:, 0] = 60  # all other probabilities vanish: their gradient is the smoothing alone
    target = torch.tensor([0, 5], device=device)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, target, 0.1, IGNORE).loss
    (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, scale))
    torch.ops.ls_train.cross_entropy_inplace(
        logits, torch.empty_like(loss), torch.empty_like(loss), None, target, None,
        torch.full((1,), scale, device=device), 0.1, IGNORE,
    )  # fmt: skip
    for result in (grad, logits):
        untouched = result[0, 1:].double()
        expected = -scale * 0.1 / (classes - 1)
        assert float((untouched / expected - 1).abs().max()) < 2 * torch.finfo(dtype).eps + 1e-6


def test_gradcheck() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target = random_target(5, 7, "cpu")
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, 0.2, IGNORE).loss, (logits,))


def test_errors() -> None:
    logits, target = torch.randn(2, 4), torch.tensor([1, 2])
    message = "cross_entropy_fwd: argument target holds 4; it must be between 0 and 3, or ignore_index = 1"
    with pytest.raises(IndexError, match=message):
        cross_entropy(logits, torch.tensor([1, 4]), 0.1, 1)
    with pytest.raises(ValueError, match="argument label_smoothing = 1.0 must be at least 0 and less than 1"):
        cross_entropy(logits, target, 1.0)
    with pytest.raises(ValueError, match="argument label_smoothing = 0.1 needs two classes; there is 1"):
        cross_entropy(logits[:, :1].contiguous(), target, 0.1)
    with pytest.raises(ValueError, match=r"argument target has shape \(1,\); it needs \(2,\)"):
        cross_entropy(logits, target[:1])

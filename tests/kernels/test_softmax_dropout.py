from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ls_train import rng
from ls_train.ops import softmax_dropout
from ls_train.testing import assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type, run, seed_tensor
from tests.kernels.test_dropout import kept

# In packs up to 32 lanes a row and more; runs of one to 16 lanes a row, of several blocks; beyond both in chunks.
SHAPES = (
    (0, 2, 3, 4), (1, 1, 1, 1), (2, 1, 4, 2), (2, 3, 5, 7), (1, 2, 9, 33), (2, 2, 37, 129), (1, 1, 9, 511),
    (1, 1, 9, 513), (1, 1, 2, 1030), (1, 1, 2, 2500), (2, 2, 3, 64), (1, 2, 9, 128), (1, 1, 3, 264), (1, 1, 2, 2056),
)  # fmt: skip


def native(x: Tensor, padding: Tensor | None, causal: bool, p: float) -> Tensor:
    masked = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if padding is not None:
        masked = masked | padding[:, None, None, :]
    if causal:
        ones = torch.ones(x.shape[2:], dtype=torch.bool, device=x.device)
        masked = masked | ~ones.tril(x.shape[3] - x.shape[2])
    some = (~masked).any(-1, keepdim=True)
    probs = x.masked_fill(masked & some, float("-inf")).softmax(-1) * some
    return kept(probs.reshape(-1, x.shape[3]), 11, 4, p).view(x.shape)


def random_padding(shape: tuple[int, ...], device: str) -> Tensor:
    padding = torch.rand(shape[0], shape[3]) < 0.3
    if padding.numel():
        padding[-1] = True  # one sequence without any key
    return padding.to(device)


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        return [case for keys in (7, 24) for case in self.calls_of((2, 3, 5, keys), device, dtype)]

    def calls_of(self, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Call]:
        x, y, probs, dy, dx = torch.randn(5, *shape, device=device).to(dtype)
        seed = seed_tensor(3, device)
        padding = random_padding(shape, device)
        forward = call(
            "softmax_dropout_fwd", y=y, probs=probs, x=x, key_padding_mask=padding, seed=seed, causal=True, p=0.3,
            offset=2,
        )  # fmt: skip
        run(*forward)
        plain = {"y": None, "key_padding_mask": None, "seed": None, "p": 0.0}
        return [
            forward,
            call("softmax_dropout_fwd", **forward[1] | plain),
            call("softmax_dropout_bwd", dx=dx, dy=dy, probs=probs, seed=seed, p=0.3, offset=2),
            call("softmax_dropout_bwd", dx=dx, dy=dy, probs=probs, seed=None, p=0.0, offset=2),
        ]


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_torch(
    shape: tuple[int, ...], causal: bool, padded: bool, p: float, device: str, dtype: torch.dtype
) -> None:
    padding = random_padding(shape, device) if padded else None
    x = torch.randn(shape, device=device).to(dtype)
    seed = seed_tensor(11, device)
    assert_matches_torch(
        lambda x: softmax_dropout(x, padding, causal, p, seed, 4), lambda x: native(x, padding, causal, p), (x,)
    )


@on_every_type
def test_large_logits(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([1e4, -1e4, 1e4, 0.0, 9990.0], device=device).to(dtype).view(1, 1, 1, 5)
    assert_accurate(softmax_dropout(x), x.double().softmax(-1), dtype, x.softmax(-1))


@on_every_type
def test_masked_by_the_smallest_logit(device: str, dtype: torch.dtype) -> None:
    """A row that is masked as a whole by the smallest number of its type, or another, has equal probabilities."""
    masked = torch.tensor([torch.finfo(dtype).min, -1e4, -1e9, -1e12, -1e30], dtype=torch.float64)
    for keys, low in itertools.product((5, 8), masked.clamp(min=torch.finfo(dtype).min).tolist()):
        x = torch.full((1, 1, 2, keys), low, device=device, dtype=dtype)
        x[0, 0, 0, 1] = 2
        assert_accurate(softmax_dropout(x), x.double().softmax(-1), dtype, x.softmax(-1))


@on_every_type
def test_single_key_has_no_gradient(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 24, 24, device=device).to(dtype).requires_grad_()
    softmax_dropout(x, causal=True, p=0.3, seed=seed_tensor(9, device)).backward(torch.randn_like(x))
    assert not x.grad[0, 0, 0].any()


@on_every_type
def test_masked_by_infinite_logits(device: str, dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 2, 3), float("-inf"), device=device).to(dtype)
    x[0, 0, 0, 1] = 2
    expected = torch.tensor([[[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]], device=device).to(dtype)
    assert torch.equal(softmax_dropout(x), expected)


@on_every_type
def test_mask_is_the_reference_mask(device: str, dtype: torch.dtype) -> None:
    y = softmax_dropout(torch.zeros(2, 3, 5, 21, device=device, dtype=dtype), p=0.4, seed=seed_tensor(9, device))
    assert torch.equal((y != 0).cpu().view(30, 21), rng.keep_mask(torch.tensor([9]), 0, 30, 21, 0.4))


def test_gradcheck() -> None:
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    padding = random_padding(tuple(x.shape), "cpu")
    assert torch.autograd.gradcheck(lambda x: softmax_dropout(x, padding, True, 0.3, torch.tensor([3])), (x,))


def test_errors() -> None:
    x = torch.randn(2, 2, 3, 4)
    with pytest.raises(
        ValueError, match=r"softmax_dropout: argument key_padding_mask has shape \(2, 3\); it needs \(2, 4\)"
    ):
        softmax_dropout(x, torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="argument key_padding_mask has dtype torch.uint8; convert it to torch.bool"):
        softmax_dropout(x, torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="softmax_dropout_fwd: argument y is missing with p = 0.1"):
        torch.ops.ls_train.softmax_dropout_fwd(None, x.clone(), x, None, torch.tensor([1]), False, 0.1, 0)

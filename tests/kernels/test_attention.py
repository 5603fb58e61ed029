from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ls_train import rng
from ls_train.ops import attention
from ls_train.ops._arguments import statistics_dtype
from ls_train.ops.attention import attention_workspace
from ls_train.testing import assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type, run, seed_tensor
from tests.kernels.test_dropout import RATES

SEED, OFFSET = 11, 4
# (query lengths, key lengths, heads, head size): one token, empty sequences, odd sizes, several 32-key blocks. On a GPU
# heads of up to 64 have their own kernels beyond 128 tokens, and those of more than 32 also below: one warp a sequence
# and head of up to 32 tokens, tiles of 64 rows up to 64 and of 128 rows up to 128.
CASES = {
    "one token": ((1,), (1,), 1, 8),
    "self": ((5, 1, 7), (5, 1, 7), 2, 16),
    "cross": ((3, 8, 2), (6, 1, 9), 2, 32),
    "no keys": ((3, 0, 4), (2, 5, 0), 2, 8),
    "odd sizes": ((7, 13), (11, 13), 3, 5),
    "one warp": ((32, 17, 0, 1, 16), (32, 17, 5, 1, 0), 2, 64),
    "one warp, cross": ((3, 30, 20), (32, 7, 31), 3, 40),
    "64 rows": ((40, 5, 64, 0, 17), (33, 64, 1, 3, 17), 3, 64),
    "64 rows, few queries": ((16, 31, 1), (64, 49, 16), 1, 40),
    "64 rows, few keys": ((64, 48), (7, 31), 1, 56),
    "128 rows": ((128, 1, 96, 0, 65, 100), (128, 70, 33, 2, 65, 1), 2, 64),
    "128 rows, few queries": ((20, 33), (128, 65), 1, 56),
    "128 rows, few keys": ((128, 65), (20, 33), 1, 48),
    "long": ((70, 33), (70, 97), 1, 64),
    "long, narrow heads": ((65, 0, 130, 1), (65, 3, 130, 0), 2, 24),
    "long, wide heads": ((70, 33), (70, 97), 1, 80),
    "two blocks of queries": ((150, 33), (150, 97), 1, 64),
    "many stages": ((150, 20, 257), (90, 129, 257), 1, 40),
    "few queries, many keys": ((30, 5), (250, 64), 2, 64),
    "many queries, few keys": ((250, 64), (30, 5), 2, 64),
    "whole stages": ((192, 64, 512, 129, 0), (256, 128, 512, 129, 3), 1, 32),
    "no queries": ((0, 0), (3, 4), 2, 8),
    "empty batch": ((), (), 2, 8),
}


# Added to longest lengths of up to 32 the second chooses tiles of 64 rows, the third of 128, the last long sequences'.
on_every_path = pytest.mark.parametrize("slack", [0, 32, 64, 144])
on_every_width = pytest.mark.parametrize("width", [16, 64])


def cumulative(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    causal: bool,
    p: float = 0.0,
) -> Tensor:
    """Return attention by PyTorch's own functions, one sequence after another, scale 1 / sqrt(D)."""
    outputs = [q[:0]]
    start_q = start_k = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        rows = slice(start_q, start_q + length_q)
        queries = q[rows].transpose(0, 1)
        keys, values = (x[start_k : start_k + length_k].transpose(0, 1) for x in (k, v))
        allowed = torch.ones(length_q, length_k, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(length_k - length_q)
        some = allowed.any(1, keepdim=True)
        scores = (queries @ keys.transpose(1, 2)) * q.shape[2] ** -0.5
        probs = scores.masked_fill(~allowed & some, float("-inf")).softmax(-1) * some
        if p > 0:
            packed_rows = torch.arange(rows.start, rows.stop)
            keep = rng.attention_keep_mask(torch.tensor([SEED]), OFFSET, packed_rows, q.shape[1], length_k, p)
            probs = probs * keep.to(q.device) * rng.keep_scale(p)
        outputs.append((probs @ values).transpose(0, 1))
        start_q, start_k = start_q + length_q, start_k + length_k
    used = torch.cat(outputs)
    return torch.cat([used, q.new_zeros(q.shape[0] - used.shape[0], *q.shape[1:])]) + 0 * (q.sum() + k.sum() + v.sum())


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        heads, width, lengths_q, lengths_k = 2, 16, (5, 8), (4, 7)
        cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
        # q, k and v as a layer has them: columns of one projection.
        qkv = torch.randn(13, 3 * heads * width, device=device).to(dtype).view(13, 3, heads, width)
        kv = torch.randn(11, 2 * heads * width, device=device).to(dtype).view(11, 2, heads, width)
        q, k, v = torch.randn(3, 13, heads, width, device=device).to(dtype).unbind()
        out, dout = torch.randn(2, 13, heads, width, device=device).to(dtype)
        lse = torch.empty(13, heads, dtype=statistics_dtype(dtype), device=device)
        plan = {"seed": seed_tensor(SEED, device), "max_q": 8, "scale": 0.25, "p": 0.3, "offset": OFFSET}
        packed = {"cu_q": cu_q, "cu_k": cu_q, "max_k": 8, "causal": True} | plan
        cross = {"cu_q": cu_q, "cu_k": cu_k, "max_k": 7, "causal": False} | plan
        plain = packed | {"seed": None, "p": 0.0}
        calls = []
        for inputs, settings in (
            ({"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2]}, packed),
            ({"q": q, "k": kv[:, 0], "v": kv[:, 1]}, cross),
            ({"q": q, "k": k, "v": v}, plain),
        ):
            forward = call("attention_fwd", out=out.clone(), lse=lse.clone(), **inputs, **settings)
            run(*forward)
            workspace = torch.empty(attention_workspace(13, heads, width, 13), device=device)
            backward = {"d" + name: tensor for name, tensor in inputs.items()}
            backward |= {"workspace": workspace, "dout": dout, "out": forward[1]["out"], "lse": forward[1]["lse"]}
            calls += [forward, call("attention_bwd", **backward, **inputs, **settings)]
        return calls


def random_inputs(case: str, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    lengths_q, lengths_k, heads, width = CASES[case]
    q = torch.randn(sum(lengths_q), heads, width, device=device).to(dtype)
    k, v = torch.randn(2, sum(lengths_k), heads, width, device=device).to(dtype).unbind()
    return q, k, v


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_matches_torch(case: str, causal: bool, p: float, device: str, dtype: torch.dtype) -> None:
    lengths_q, lengths_k = CASES[case][:2]
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    max_q, max_k = max(lengths_q, default=0), max(lengths_k, default=0)
    seed = seed_tensor(SEED, device)
    assert_matches_torch(
        lambda q, k, v: attention(q, k, v, cu_q, cu_k, max_q, max_k, causal, p=p, seed=seed, offset=OFFSET),
        lambda q, k, v: native(q, k, v, lengths_q, lengths_k, causal, p),
        random_inputs(case, device, dtype),
    )


@on_every_type
@on_every_path
@pytest.mark.parametrize("case", ["cross", "one warp, cross"])
def test_rounded_sizes_and_poisoned_rows(case: str, slack: int, device: str, dtype: torch.dtype) -> None:
    """Rows and sequences added to round sizes up, and a larger longest length, change nothing and give zeros."""
    lengths_q, lengths_k = CASES[case][:2]
    q, k, v = random_inputs(case, device, dtype)
    dout = torch.randn_like(q)

    def results(rounded: bool) -> list[Tensor]:
        extra = 3 if rounded else 0
        cu_q = cumulative(lengths_q + (0,) * extra, device)
        cu_k = cumulative(lengths_k + (0,) * extra, device)

        def extended(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_full((extra, *x.shape[1:]), float("nan"))])

        leaves = [extended(x).requires_grad_() for x in (q, k, v)]
        seed = seed_tensor(SEED, device)
        longest = max(*lengths_q, *lengths_k) + (slack if rounded else 0)
        out = attention(*leaves, cu_q, cu_k, longest, longest, True, p=0.3, seed=seed)
        return [out.detach(), *torch.autograd.grad(out, leaves, extended(dout))]

    for plain, rounded in zip(results(False), results(True), strict=True):
        assert not rounded[len(plain) :].any()
        # Another longest length may choose another kernel, which sums in another order.
        close = 0 if device == "cpu" or slack == 0 else 16 * torch.finfo(dtype).eps * float(plain.abs().max())
        torch.testing.assert_close(rounded[: len(plain)], plain, rtol=0, atol=close)


@on_every_type
@on_every_path
@pytest.mark.parametrize("longest", [32, 64])
def test_mask_is_the_reference_mask(longest: int, slack: int, device: str, dtype: torch.dtype) -> None:
    """With equal scores and one-hot values the output shows the mask; it belongs to packed row, head and key only."""
    heads, width = 2, 64

    def mask(lengths: tuple[int, ...], offset: int = OFFSET, seed: int = SEED) -> list[Tensor]:
        rows = sum(lengths)
        q = torch.zeros(rows, heads, width, device=device, dtype=dtype)
        v = torch.cat([torch.eye(n, width, device=device, dtype=dtype) for n in lengths])[:, None].repeat(1, heads, 1)
        cu = cumulative(lengths, device)
        limit = longest + slack
        out = attention(q, q, v, cu, cu, limit, limit, p=0.5, seed=seed_tensor(seed, device), offset=offset)
        return [(part[:, :, :n] != 0).cpu() for part, n in zip(out.split(lengths), lengths, strict=True)]

    lengths = (longest - 12, 7, longest)
    kept = mask(lengths)
    start = 0
    for part, n in zip(kept, lengths, strict=True):
        rows = torch.arange(start, start + n)
        reference = rng.attention_keep_mask(torch.tensor([SEED]), OFFSET, rows, heads, n, 0.5)
        assert torch.equal(part, reference.transpose(0, 1))
        start += n
    (one,) = mask((longest,))
    assert torch.equal(one[: lengths[0], :, : lengths[0]], kept[0]), (
        "the mask depends on lengths or on the number of sequences"
    )
    count = one.numel()
    assert abs(int(one.sum()) - count / 2) <= 5 * math.sqrt(count) / 2
    for other in (mask((longest,), offset=OFFSET + 1)[0], mask((longest,), seed=SEED + 1)[0], one.flip(1)):
        assert abs(int((one == other).sum()) - count / 2) <= 5 * math.sqrt(count) / 2


@on_every_type
@on_every_path
def test_everything_dropped(slack: int, device: str, dtype: torch.dtype) -> None:
    """Without a kept probability there is no scale to undo: zeros, not NaN."""
    q, k, v = (torch.randn(20, 2, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    cu = cumulative((17, 3), device)
    out = attention(q, k, v, cu, cu, 17 + slack, 17 + slack, True, p=1.0, seed=seed_tensor(SEED, device))
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert not x.any()


@on_every_type
@on_every_path
@on_every_width
def test_large_logits(width: int, slack: int, device: str, dtype: torch.dtype) -> None:
    lengths = (9, 4)
    q, k, v = torch.randn(3, 13, 2, width).to(device, dtype).unbind()
    q = (q * (1200 / width**0.5)).requires_grad_()  # scores up to about 1e4 before the scale of 10 below
    v.requires_grad_()
    cu = cumulative(lengths, device)
    out = attention(q, k, v, cu, cu, 9 + slack, 9 + slack, scale=10.0)
    dq, dv = torch.autograd.grad(out.sum(), (q, v))
    assert dq.isfinite().all()
    assert out.isfinite().all()
    scores = torch.einsum("ihd,jhd->hij", q.detach().double(), k.double())[:, :9, :9] * 10
    gap = scores.topk(2).values.diff().abs().min()
    assert float(scores.abs().max()) > 1e4
    assert float(gap) > 20, "the seed no longer gives one clear winner a row"
    best = scores.argmax(-1).t()[:, :, None].expand(-1, -1, width)
    # The winner's probability is exactly one, so its value comes through unchanged.
    torch.testing.assert_close(out[:9].detach(), v[:9].detach().gather(0, best), rtol=0, atol=1e-6)
    # The backward has exp(score - lse) of two float32 numbers of up to 1e5, each with some roundings of 2^-24.
    wins = torch.zeros_like(dv[:9]).scatter_add(0, best, torch.ones_like(dv[:9]))
    relative = 2.0**-20 * float(scores.abs().max()) + torch.finfo(dtype).eps
    torch.testing.assert_close(dv[:9], wins, rtol=relative, atol=1e-6)


LENGTHS_IN_ORDER = (257, 140)
ORDERS = ("rising", "falling", "one late", "far below, then near")


def scores_in_order(order: str, device: str, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of LENGTHS_IN_ORDER, one head, whose scores grow or shrink along the keys."""
    q, k, v = torch.randn(3, sum(LENGTHS_IN_ORDER), 1, width, device=device).to(dtype).unbind()
    steps = torch.cat([torch.linspace(0.1, 6.0, length, device=device) for length in LENGTHS_IN_ORDER])
    if order == ORDERS[-1]:
        # More than a chunk of 32 keys with products of -6e6, beside which the last bits of others would be lost.
        q[..., 0], k[..., 0] = 100.0, torch.where(steps < 1.5, -60000.0, 0.0).to(dtype)[:, None]
        return q, k, v
    factors = {"rising": steps, "falling": 6.1 - steps, "one late": torch.where(steps > 5.9, 6.0, 0.1)}[order]
    return q, (k * factors[:, None, None]).to(dtype), v


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3, 0.98])
@pytest.mark.parametrize(
    ("order", "width", "causal"),
    # Under a causal mask the first rows would see nothing but what is far below.
    [(order, 64, False) for order in ORDERS] + [(order, 24, order != ORDERS[-1]) for order in ORDERS],
)
def test_scores_that_change_along_the_keys(
    order: str, width: int, causal: bool, p: float, device: str, dtype: torch.dtype
) -> None:
    """The largest score of a row may come in any chunk of keys, little or far above those before."""
    lengths = LENGTHS_IN_ORDER
    cu, seed = cumulative(lengths, device), seed_tensor(SEED, device)
    assert_matches_torch(
        lambda q, k, v: attention(q, k, v, cu, cu, 257, 257, causal, p=p, seed=seed, offset=OFFSET),
        lambda q, k, v: native(q, k, v, lengths, lengths, causal, p),
        scores_in_order(order, device, dtype, width),
    )


@on_every_type
@pytest.mark.parametrize("order", ORDERS)
def test_logarithm_of_sums_that_change(order: str, device: str, dtype: torch.dtype) -> None:
    q, k, v = scores_in_order(order, device, dtype, 64)
    cu, out = cumulative(LENGTHS_IN_ORDER, device), torch.empty_like(q)
    lse = torch.empty(len(q), 1, dtype=statistics_dtype(dtype), device=device)
    torch.ops.ls_train.attention_fwd(out, lse, q, k, v, cu, cu, None, 257, 257, False, 0.125, 0.0, 0)
    parts = (x.double().split(LENGTHS_IN_ORDER) for x in (q, k))
    reference = [torch.einsum("ihd,jhd->ihj", *part).mul(0.125).logsumexp(-1) for part in zip(*parts, strict=True)]
    assert_accurate(lse, torch.cat(reference), lse.dtype)


@on_every_type
@pytest.mark.parametrize("p", RATES)
def test_masks_of_long_sequences(p: float, device: str, dtype: torch.dtype) -> None:
    """Forward and backward draw the reference's masks at every rate: equal scores, 64 of the keys or queries shown."""
    heads, width, length = 2, 64, 140
    cu, seed = cumulative((length,), device), seed_tensor(SEED, device)
    kept = rng.attention_keep_mask(torch.tensor([SEED]), OFFSET, torch.arange(length), heads, length, p)
    for shown in (slice(0, width), slice(length - width, length)):
        q, one_hot = torch.zeros(2, length, heads, width, device=device, dtype=dtype)
        one_hot[shown] = torch.eye(width, device=device, dtype=dtype)[:, None]
        v = one_hot.clone().requires_grad_()
        out = attention(q, q, v, cu, cu, length, length, p=p, seed=seed, offset=OFFSET)
        (dv,) = torch.autograd.grad(out, v, one_hot)
        assert torch.equal((out != 0).cpu(), kept[:, :, shown].transpose(0, 1))
        assert torch.equal((dv != 0).cpu(), kept[:, shown].permute(2, 0, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_give_the_same_bits(causal: bool, dtype: torch.dtype) -> None:
    """Many blocks and stages, again and again: a stage that is overwritten too early need not be noticed."""
    lengths = (512, 511, 300, 129, 512)
    cu, seed = cumulative(lengths, "cuda"), seed_tensor(SEED, "cuda")
    leaves = [torch.randn(sum(lengths), 16, 64, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn_like(leaves[0])

    def results() -> tuple[Tensor, ...]:
        out = attention(*leaves, cu, cu, 512, 512, causal, p=0.1, seed=seed)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    expected = results()
    for _ in range(20):
        assert all(map(torch.equal, results(), expected))


@on_every_type
@on_every_path
@on_every_width
def test_logarithm_of_the_sums(width: int, slack: int, device: str, dtype: torch.dtype) -> None:
    """lse is the natural logarithm before dropout, -inf without keys and zero in unused rows."""
    q, k, v = torch.randn(3, 8, 2, width, device=device).to(dtype).unbind()
    out = torch.empty_like(q)
    lse = torch.empty(8, 2, dtype=statistics_dtype(dtype), device=device)
    cu_q, cu_k = cumulative((4, 3), device), cumulative((8, 0), device)
    seed = seed_tensor(1, device)
    scale = 2 / width**0.5
    torch.ops.ls_train.attention_fwd(out, lse, q, k, v, cu_q, cu_k, seed, 4 + slack, 8 + slack, False, scale, 0.9, 0)
    reference = torch.einsum("ihd,jhd->ihj", q.double(), k.double()).mul(scale).logsumexp(-1)
    reference[4:7] = float("-inf")
    reference[7:] = 0
    assert_accurate(lse, reference, lse.dtype)


@on_every_type
@pytest.mark.parametrize("longest", [70, 140])
@on_every_width
@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_scales_that_are_not_positive(scale: float, width: int, longest: int, device: str, dtype: torch.dtype) -> None:
    """Scores times a scale are those of scaled queries, whatever its sign; long sequences too."""
    lengths = (70, 3)
    q, k, v = torch.randn(3, 73, 2, width, device=device).to(dtype).unbind()
    cu = cumulative(lengths, device)
    factor = scale * width**0.5  # a power of two or zero: exact
    assert_matches_torch(
        lambda q, k, v: attention(q, k, v, cu, cu, longest, longest, True, scale=scale),
        lambda q, k, v: native(q * factor, k, v, lengths, lengths, True),
        (q, k, v),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    q = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cu_q, cu_k = cumulative((2, 0, 3), "cpu"), cumulative((1, 2, 3), "cpu")
    seed = torch.tensor([3])
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, cu_q, cu_k, 3, 3, causal, p=0.3, seed=seed), (q, k, v)
    )


def test_errors() -> None:
    q, cu = torch.randn(4, 2, 8), cumulative((4,), "cpu")
    with pytest.raises(ValueError, match="argument max_q = 3 is less than the longest sequence, 4"):
        attention(q, q, q, cu, cu, 3, 4)
    with pytest.raises(ValueError, match=r"argument v has shape \(3, 2, 8\); it needs \(4, 2, 8\)"):
        attention(q, q, q[:3], cu, cu, 4, 4)
    with pytest.raises(ValueError, match=r"its last dimension must be contiguous"):
        attention(q.transpose(1, 2).contiguous().transpose(1, 2), q, q, cu, cu, 4, 4)
    with pytest.raises(TypeError, match="attention: argument cu_k has dtype torch.int64; convert it to torch.int32"):
        attention(q, q, q, cu, cu.long(), 4, 4)
    with pytest.raises(ValueError, match=r"argument q has shape \(4, 16\); it needs 3 dimensions"):
        attention(q.view(4, 16), q, q, cu, cu, 4, 4)

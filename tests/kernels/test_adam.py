from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_train.compact_master import SMALLEST_EXACT, join_master, split_master
from ls_train.ops import adam, adam_prepare
from ls_train.ops._arguments import statistics_dtype
from ls_train.testing import device_types
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type

BETA1, BETA2, EPS, DECAY, LR, NEXT_LR = 0.9, 0.98, 1e-8, 0.01, 1e-2, 3e-3


def state(size: int, device: str, dtype: torch.dtype, bounds: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the arguments of one Adam step at step 1 for ``size`` parameters, cut into slots at ``bounds``."""
    wide = statistics_dtype(dtype)
    master = torch.randn(size, device=device).to(wide)
    slots = len(bounds) + 1
    return {
        "param": master.to(dtype),
        "master": master if dtype.itemsize == 2 else None,
        "exp_avg": torch.zeros(size, dtype=wide, device=device),
        "exp_avg_sq": torch.zeros(size, dtype=wide, device=device),
        "grad": torch.randn(size, device=device).to(dtype),
        "segments": torch.tensor([0, *bounds, size], device=device),
        "segment_group": torch.zeros(slots, dtype=torch.int32, device=device),
        "segment_step": torch.ones(slots, dtype=torch.int64, device=device),
        "active": None,
        "hyper": torch.tensor([[BETA1, BETA2, EPS, DECAY, LR, NEXT_LR]], dtype=torch.float64, device=device),
        "update": torch.tensor([1, 1], device=device),
        "grad_scale": None,
        "found_inf": None,
    }


def compact(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the same step with copies of what it changes, and a remainder instead of the master."""
    arguments = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    param, remainder = split_master(arguments["master"], arguments["param"].dtype)
    return arguments | {"param": param, "remainder": remainder, "master": None}


def one(value: float, device: str) -> Tensor:
    return torch.full((1,), float(value), device=device)


def values(arguments: dict[str, Any]) -> Tensor:
    """Return the full-precision parameters."""
    if arguments.get("remainder") is not None:
        return join_master(arguments["param"], arguments["remainder"])
    return arguments["param"] if arguments["master"] is None else arguments["master"]


def assert_close(arguments: dict[str, Any], expected: Tensor) -> None:
    actual = values(arguments)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=2e-6, atol=2e-6)
    if arguments["master"] is not None:
        assert torch.equal(arguments["param"], arguments["master"].to(arguments["param"].dtype))


class TestLeaf(LeafContract):
    read_write = frozenset({"param", "master", "remainder", "exp_avg", "exp_avg_sq", "segment_step", "update"})

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        plain = state(5003, device, dtype, (17, 17, 2000))
        plain |= {"decoupled_decay": True, "bias_correction": True, "eps_after_correction": False}
        full = dict(plain)
        full["active"] = torch.tensor([1, 1, 0, 1], dtype=torch.uint8, device=device)
        full |= {"grad_scale": one(0.5, device), "found_inf": one(0, device), "decoupled_decay": False}
        full |= {"eps_after_correction": True, "segment_step": torch.tensor([3, 1, 2, 7], device=device)}
        scalars = {name: one(2.0, device) for name in ("norm", "multiplier")}
        prepare = {
            "segment_step": full["segment_step"], "update": full["update"], "grad_scale": one(0, device),
            "active": full["active"], "found_inf": one(0, device), "max_norm": 1.0,
        }  # fmt: skip
        pairs = [("adam", plain | {"remainder": None}), ("adam", full | {"remainder": None})]
        if dtype.itemsize == 2:
            pairs += [("adam", compact(plain)), ("adam", compact(full))]
        return [*(call(name, **arguments) for name, arguments in pairs), call("adam_prepare", **prepare, **scalars)]


@on_every_type
@pytest.mark.parametrize("eps_after_correction", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_five_steps_of_the_formula(
    decoupled: bool, bias_correction: bool, eps_after_correction: bool, device: str, dtype: torch.dtype
) -> None:
    arguments = state(37, device, dtype)
    p = values(arguments).double().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 6):
        arguments["grad"].copy_(torch.randn(37))
        arguments["segment_step"].fill_(step)
        adam(
            **arguments,
            decoupled_decay=decoupled,
            bias_correction=bias_correction,
            eps_after_correction=eps_after_correction,
        )
        g = arguments["grad"].double()
        if decoupled:
            p = p - LR * DECAY * p
        else:
            g = g + DECAY * p
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        first, second = (1 - BETA1**step, 1 - BETA2**step) if bias_correction else (1, 1)
        if eps_after_correction:
            p = p - LR / first * m / ((v / second).sqrt() + EPS)
        else:
            p = p - LR * math.sqrt(second) / first * m / (v.sqrt() + EPS)
        assert_close(arguments, p)
    torch.testing.assert_close(arguments["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arguments["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-6)


@on_every_type
@pytest.mark.parametrize("decoupled", [False, True])
def test_matches_torch_optim(decoupled: bool, device: str, dtype: torch.dtype) -> None:
    arguments = state(1001, device, dtype)
    theirs = values(arguments).clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    for step in range(1, 6):
        arguments["grad"].copy_(torch.randn(1001))
        arguments["segment_step"].fill_(step)
        adam(**arguments, decoupled_decay=decoupled, eps_after_correction=True)
        theirs.grad = arguments["grad"].to(theirs.dtype)
        optimizer.step()
        assert_close(arguments, theirs.detach())


@on_every_type
def test_every_element_of_every_size(device: str, dtype: torch.dtype) -> None:
    powers = [2**k + d for k in range(13, 18) for d in (-1, 0, 1)]
    step = 1 if device == "cuda" else 13
    for size in [*range(1, 70), *range(70, 5001, step), *powers]:
        arguments = state(size, device, dtype)
        arguments["grad"].fill_(1)
        before = values(arguments).clone()
        adam(**arguments)
        # The first step moves every element by lr, whatever its gradient, and decays it.
        assert_close(arguments, before * (1 - LR * DECAY) - LR)
        assert bool((arguments["exp_avg"] != 0).all()), size


@on_every_type
def test_inactive_slots_keep_their_bits(device: str, dtype: torch.dtype) -> None:
    bounds = (1, 8, 9, 300, 301, 1024)
    arguments = state(1500, device, dtype, bounds)
    arguments["grad"][8:300] = float("nan")
    arguments["active"] = torch.tensor([1, 1, 0, 0, 1, 1, 0], dtype=torch.uint8, device=device)
    tensors = {k: arguments[k] for k in ("param", "master", "exp_avg", "exp_avg_sq") if arguments[k] is not None}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    adam(**arguments)
    on = torch.zeros(1500, dtype=torch.bool)
    on[:8] = on[300:1024] = True
    for name in tensors:
        changed = (tensors[name] != before[name]).cpu()
        assert not changed[~on].any(), f"{name} of an inactive slot changed"
        if name != "param":
            assert changed[on].all(), f"{name} of an active slot was left out"


@on_every_type
def test_slots_have_their_own_group_and_step(device: str, dtype: torch.dtype) -> None:
    bounds = (5, 77, 78)
    arguments = state(200, device, dtype, bounds)
    arguments["hyper"] = torch.tensor(
        [[0.9, 0.98, 1e-8, 0.0, 0.1, 0.2], [0.8, 0.99, 1e-6, 0.1, 0.01, 0.02]], dtype=torch.float64, device=device
    )
    arguments["segment_group"] = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=device)
    arguments["segment_step"] = torch.tensor([1, 2, 3, 9], device=device)
    expected = []
    for slot, (start, end) in enumerate(zip((0, *bounds), (*bounds, 200), strict=True)):
        beta1, beta2, eps, decay, lr, _ = arguments["hyper"][slot % 2].tolist()
        step = int(arguments["segment_step"][slot])
        p, g = values(arguments)[start:end].double(), arguments["grad"][start:end].double()
        m, v = (1 - beta1) * g, (1 - beta2) * g * g
        factor = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        expected.append(p * (1 - lr * decay) - factor * m / (v.sqrt() + eps))
    adam(**arguments)
    assert_close(arguments, torch.cat(expected))


@on_every_type
@pytest.mark.parametrize("remainders", [False, True])
def test_every_path_gives_the_same_bits(remainders: bool, device: str, dtype: torch.dtype) -> None:
    """All slots active by None or by ones, and buffers off 16 bytes: kernels through shared memory, packs, elements."""
    if remainders and dtype.itemsize != 2:
        pytest.skip("remainders belong to parameters of 16 bits")
    names = ("param", "master", "remainder", "exp_avg", "exp_avg_sq")
    for size in (1, 7, 8, 9, 1023, 1024, 1032, 1033, 3 * 1024 - 1, 16384, 16391, 5 * 16384 + 2048 + 3):
        plain = state(size, device, dtype, tuple(sorted({size // 7, size // 3, size // 3, size // 2 + 1, size - 1})))
        slots = len(plain["segment_group"])
        plain["hyper"] = torch.tensor([[BETA1, BETA2, EPS, DECAY, LR, LR], [0.8, 0.99, 1e-6, 0.1, 1e-3, 1e-3]])
        plain["hyper"] = plain["hyper"].double().to(device)
        plain["segment_group"] = torch.arange(slots, dtype=torch.int32, device=device) // 2 % 2
        plain["segment_step"] = 1 + torch.arange(slots, device=device) // 3
        plain["exp_avg"].normal_(std=1e-2)
        plain["exp_avg_sq"].uniform_(1e-4, 1e-3)
        plain = compact(plain) if remainders else plain
        masked, shifted = ({k: v.clone() if isinstance(v, Tensor) else v for k, v in plain.items()} for _ in range(2))
        masked["active"] = torch.ones(slots, dtype=torch.uint8, device=device)
        for name in (*names, "grad"):
            if shifted.get(name) is not None:
                shifted[name] = torch.cat([shifted[name][:1], shifted[name]])[1:]
        for arguments in (plain, masked, shifted):
            for _ in range(2):
                adam(**arguments)
        for name in names:
            if plain.get(name) is not None:
                assert torch.equal(masked[name], plain[name]), f"{name} of {size}: active slots given"
                assert torch.equal(shifted[name], plain[name]), f"{name} of {size}: not aligned"


@on_every_type
def test_overflow_changes_nothing(device: str, dtype: torch.dtype) -> None:
    arguments = state(333, device, dtype)
    arguments["grad"][5] = float("inf")
    arguments["found_inf"] = one(1, device)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    adam_prepare(arguments["segment_step"], arguments["update"], one(0, device), found_inf=arguments["found_inf"])
    adam(**arguments)
    for name, tensor in before.items():
        assert torch.equal(arguments[name].nan_to_num(), tensor.nan_to_num()), f"{name} changed"


@on_every_type
@pytest.mark.parametrize("done, meant, lr", [(1, 1, LR), (1, 2, LR), (2, 1, NEXT_LR), (9, 1, NEXT_LR)])
def test_learning_rate_follows_the_update_counter(
    done: int, meant: int, lr: float, device: str, dtype: torch.dtype
) -> None:
    arguments = state(9, device, dtype)
    arguments["update"] = torch.tensor([done, meant], device=device)
    arguments["grad"].fill_(1)
    before = values(arguments).clone()
    adam(**arguments)
    assert_close(arguments, before * (1 - lr * DECAY) - lr)


@on_every_type
def test_gradient_factor(device: str, dtype: torch.dtype) -> None:
    scaled, plain = state(99, device, dtype), state(99, device, dtype)
    for name in ("param", "grad"):
        plain[name] = scaled[name].clone()
    plain["master"] = None if scaled["master"] is None else scaled["master"].clone()
    scaled["grad"] = scaled["grad"] * 8
    scaled["grad_scale"] = one(0.125, device)
    adam(**scaled)
    adam(**plain)
    torch.testing.assert_close(values(scaled), values(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    "norm, multiplier, max_norm",
    [(4.0, None, 0.0), (4.0, 0.5, 0.0), (4.0, None, 1.0), (4.0, 0.5, 1.0), (0.1, 0.5, 1.0)],
)
@pytest.mark.parametrize("overflow", [None, 0.0, 1.0])
def test_prepare(norm: float, multiplier: float | None, max_norm: float, overflow: float | None, device: str) -> None:
    steps = torch.tensor([4, 0, 9], device=device)
    update, scale = torch.tensor([7, 8], device=device), one(-1, device)
    adam_prepare(
        steps,
        update,
        scale,
        torch.tensor([1, 0, 1], dtype=torch.uint8, device=device),
        one(norm, device),
        None if overflow is None else one(overflow, device),
        None if multiplier is None else one(multiplier, device),
        max_norm,
    )
    assert steps.tolist() == ([4, 0, 9] if overflow else [5, 0, 10])
    assert update.tolist() == ([7, 8] if overflow else [8, 8])
    factor = multiplier or 1.0
    expected = factor * (min(1.0, max_norm / (norm * factor + 1e-6)) if max_norm > 0 else 1.0)
    assert float(scale) == pytest.approx(expected, rel=1e-6)


def test_prepare_without_optional_tensors() -> None:
    steps, update, scale = torch.tensor([4, 0]), torch.tensor([0, 1]), one(-1, "cpu")
    adam_prepare(steps, update, scale)
    assert (steps.tolist(), update.tolist(), float(scale)) == ([5, 1], [1, 1], 1.0)


on_every_16_bit_type = pytest.mark.parametrize(
    "device, dtype", [pair for pair in device_types() if pair[1].itemsize == 2]
)


@on_every_16_bit_type
@pytest.mark.parametrize("bounds", [(), (1, 8, 9, 300, 301, 1024)])
def test_compact_master_follows_the_float32_one(bounds: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    """Moments bit for bit; the master too where it can be stored, elsewhere within half a unit a step."""
    wide = state(3000, device, dtype, bounds)
    wide["master"] *= torch.logspace(-8, 1, 3000, device=device)
    wide["param"] = wide["master"].to(dtype)
    if bounds:
        wide["active"] = torch.tensor([1, 1, 0, 0, 1, 1, 0], dtype=torch.uint8, device=device)
    wide["hyper"][:, 4] = 1e-6
    narrow = compact(wide)
    for step in range(1, 11):
        for arguments in (wide, narrow):
            arguments["grad"].copy_(torch.randn(3000, generator=torch.Generator().manual_seed(step)))
            arguments["segment_step"].fill_(step)
            adam(**arguments)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(narrow[name], wide[name])
        if dtype == torch.bfloat16:
            assert torch.equal(values(narrow), wide["master"])
        else:
            apart = (values(narrow) - wide["master"]).abs()
            assert apart.max() <= (step + 1) * 2**-40
            assert not apart[wide["master"].abs() > 2 * SMALLEST_EXACT[dtype]].any()
        assert torch.equal(narrow["param"], split_master(values(narrow), dtype)[0])


@on_every_16_bit_type
def test_compact_master_of_every_size_and_after_an_overflow(device: str, dtype: torch.dtype) -> None:
    for size in [*range(1, 40), 255, 256, 257, 5003, 16384, 16391]:
        wide = state(size, device, dtype)
        narrow = compact(wide)
        before = {k: v.clone() for k, v in narrow.items() if isinstance(v, Tensor)}
        adam(**narrow | {"found_inf": one(1, device)})
        for name, tensor in before.items():
            assert torch.equal(narrow[name], tensor), f"{name} changed"
        adam(**wide)
        adam(**narrow)
        torch.testing.assert_close(values(narrow), wide["master"], rtol=0, atol=2**-39)
        assert bool((narrow["exp_avg"] != 0).all()), size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compact_masters_of_the_kernel_are_the_references(dtype: torch.dtype) -> None:
    """A step that moves nothing leaves the same bits of every kind of number, ties, subnormal ones and NaN included."""
    kinds = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -65520.0, float("inf"), -float("inf"), float("nan"), 1 + 2**-8])
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    master = torch.cat([kinds, bits.int().view(torch.float32)])
    arguments = state(len(master), "cpu", dtype) | {"master": master, "param": master.to(dtype)}
    arguments["grad"].zero_()
    arguments["hyper"][:, 3] = 0
    there = compact({k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments.items()})
    here = compact(arguments)
    adam(**there)
    adam(**here)
    for name in ("param", "remainder"):
        assert torch.equal(there[name].cpu().view(torch.int16), here[name].view(torch.int16)), name


def test_errors() -> None:
    arguments = state(9, "cpu", torch.float32)
    with pytest.raises(ValueError, match="adam: argument master must be None with param of dtype torch.float32"):
        adam(**arguments | {"master": torch.zeros(9)})
    with pytest.raises(ValueError, match="adam: argument master is missing with param of dtype torch.float16"):
        adam(**state(9, "cpu", torch.float16) | {"master": None})
    with pytest.raises(ValueError, match=r"adam: argument hyper has shape \(1, 5\); it needs \(1, 6\)"):
        adam(**arguments | {"hyper": torch.zeros(1, 5, dtype=torch.float64)})
    remainder = torch.zeros(9, dtype=torch.int16)
    with pytest.raises(ValueError, match="adam: argument remainder must be None with param of dtype torch.float32"):
        adam(**arguments | {"remainder": remainder})
    with pytest.raises(ValueError, match="adam: argument remainder must be None with a master"):
        adam(**state(9, "cpu", torch.float16) | {"remainder": remainder})
    with pytest.raises(TypeError, match="adam: argument remainder has dtype torch.int32; convert it to torch.int16"):
        adam(**state(9, "cpu", torch.float16) | {"master": None, "remainder": remainder.int()})
    with pytest.raises(ValueError, match="adam_prepare: argument norm is missing with max_norm = 1.0"):
        adam_prepare(torch.tensor([0]), torch.tensor([0, 0]), torch.zeros(1), max_norm=1.0)

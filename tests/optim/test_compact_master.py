"""FusedAdam(compact_master=True) against float32 masters: the same training in 16 bits less a parameter."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ls_train.compact_master import SMALLEST_EXACT, join_master, split_master
from ls_train.optim import FusedAdam
from tests.optim.training import assert_same_parameters, decay_groups, loss_of, network, train

NARROW = [torch.float16, torch.bfloat16]


def masters(optimizer, model):
    """Return the float32 masters as they are saved, by parameter name."""
    saved = optimizer.state_dict()["state"]
    return {name: saved[index]["master"] for index, (name, _) in enumerate(model.named_parameters())}


def build(model, compact=True, lr=1e-3):
    return FusedAdam(model.parameters(), lr, weight_decay=0.1, eps_after_correction=False, compact_master=compact)


@pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_drift_over_many_steps(steps):
    """bfloat16: none, in no bit. float16: none from 2^-16 on, below it at most half of 2^-39 a step."""
    size, slow = 128, 32
    generator = torch.Generator().manual_seed(2)
    # Numbers that all types have, so that one run with float32 parameters is what both are compared with. The first
    # weights start at 0 and, with an eps of 1, move so slowly that they stay where float16 has no more than 2^-39.
    start = (0.02 * torch.randn(size, generator=generator)).bfloat16().float()
    start[:slow] = 0
    gradients = (torch.randn(97, size, generator=generator) * 16).round() / 16
    gradients[:, :slow] *= 2.0**-12
    segments, group = torch.tensor([0, size]), torch.zeros(1, dtype=torch.int32)
    hyper = torch.tensor([[0.9, 0.98, 1.0, 0.1, 0.0, 0.0]], dtype=torch.float64)
    count, update = torch.zeros(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    runs = {}
    for dtype in (torch.float32, *NARROW):
        param, moments = start.clone().to(dtype), (torch.zeros(size), torch.zeros(size))
        remainder = None if dtype == torch.float32 else torch.zeros(size, dtype=torch.int16)
        for step in range(steps):
            count.fill_(step + 1)
            hyper[0, 4] = 1e-3 / (1 + step / 100)
            common = (segments, group, count, None, hyper, update, None, None, True, True, False)
            torch.ops.ls_train.adam(param, None, remainder, *moments, gradients[step % 97].to(dtype), *common)
        runs[dtype] = (param if remainder is None else join_master(param, remainder), *moments)
        if remainder is not None:
            assert torch.equal(param, split_master(runs[dtype][0], dtype)[0])
    expected = runs[torch.float32]
    assert float((expected[0] - start).abs().max()) > 1e-3
    assert [torch.equal(*pair) for pair in zip(runs[torch.bfloat16], expected, strict=True)] == [True] * 3
    assert [torch.equal(*pair) for pair in zip(runs[torch.float16][1:], expected[1:], strict=True)] == [True] * 2
    apart = (runs[torch.float16][0] - expected[0]).abs()
    # Sums of differing weights round apart too, by as much again.
    assert 0 < float(apart.max()) <= 2 * steps * 2**-40


@pytest.mark.parametrize("dtype", NARROW)
def test_trains_like_float32_masters(dtype):
    ours, theirs = network(dtype=dtype), network(dtype=dtype)
    optimizer, peer = build(ours), build(theirs, compact=False)
    assert train(ours, optimizer, range(20)) == pytest.approx(train(theirs, peer, range(20)), rel=1e-5)
    assert_same_parameters(ours, theirs, rtol=0, atol=0)
    assert optimizer.buffers[0].data.dtype == dtype
    live = optimizer.state[ours[0].weight]
    assert set(live) == {"step", "exp_avg", "exp_avg_sq", "remainder"}
    assert live["remainder"].dtype == torch.int16
    torch.testing.assert_close(masters(optimizer, ours), masters(peer, theirs), rtol=0, atol=2**-36)


def test_other_types_keep_what_they_have():
    ours, theirs = network(), network()
    train(ours, build(ours)), train(theirs, build(theirs, compact=False))
    assert_same_parameters(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("first, second", [(True, True), (True, False), (False, True)])
def test_state_is_that_of_float32_masters(dtype, first, second):
    """Saved by one form and loaded by the other: masters of a file are float32 and come back bit for bit."""
    model, resumed = network(dtype=dtype), network(9, dtype)
    optimizer = build(model, first)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    for entry in state["state"].values():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert entry["master"].dtype == torch.float32
    resumed.load_state_dict(weights)
    again = build(resumed, second)
    again.load_state_dict(state)
    expected = masters(optimizer, model)
    if second and dtype == torch.float16:
        expected = {name: join_master(*split_master(master, dtype)) for name, master in expected.items()}
    torch.testing.assert_close(masters(again, resumed), expected, rtol=0, atol=0)
    assert_same_parameters(resumed, model, rtol=0, atol=0)
    losses = train(model, optimizer, range(3, 6)), train(resumed, again, range(3, 6))
    assert losses[1] == pytest.approx(losses[0], rel=0 if first == second else 1e-5)


@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_masters_halfway_between_two_parameters_change_the_form(first, second):
    """At a tie the two forms round a bfloat16 parameter differently; the master of a file stands all the same."""
    weights = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.5 + 2**-9, 3.0])
    params = [nn.Parameter(weights.bfloat16()) for _ in range(2)]
    optimizers = [FusedAdam([p], 0.0, compact_master=c) for p, c in zip(params, (first, second), strict=True)]
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizers[0].state_dict()
    state["state"][0]["master"] = weights
    for optimizer in optimizers:
        optimizer.load_state_dict(state)
        assert torch.equal(optimizer.state_dict()["state"][0]["master"], weights)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert torch.equal(optimizers[1].state_dict()["state"][0]["master"], weights)


@pytest.mark.parametrize("dtype", NARROW)
def test_an_overflow_changes_nothing(dtype):
    model = network(dtype=dtype)
    optimizer = build(model)
    train(model, optimizer, range(3))
    loss_of(model, 3, dtype).backward()
    model[4].bias.grad[1] = float("nan")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _, found_inf = optimizer.measured_step()
    assert found_inf.item() == 1
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_with_the_same_bits(dtype, copier):
    model = network(dtype=dtype)
    optimizer = FusedAdam(decay_groups(model), 1e-3, compact_master=True)
    train(model, optimizer, range(3))
    twin, twin_optimizer = copier((model, optimizer))
    train(model, optimizer, range(3, 6)), train(twin, twin_optimizer, range(3, 6))
    assert_same_parameters(twin, model, rtol=0, atol=0)
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(twin_optimizer.state[one]["remainder"], optimizer.state[other]["remainder"])


@pytest.mark.parametrize("dtype", NARROW)
def test_a_move_keeps_the_masters(dtype):
    model, reference = network(dtype=dtype), network(dtype=dtype)
    optimizer, peer = build(model), build(reference)
    train(model, optimizer, range(3)), train(reference, peer, range(3))
    model[0].weight.data = model[0].weight.data.clone()
    train(model, optimizer, range(3, 6)), train(reference, peer, range(3, 6))
    torch.testing.assert_close(masters(optimizer, model), masters(peer, reference), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_untouched_parameters_keep_their_bits(dtype):
    model = network(dtype=dtype)
    optimizer = build(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    loss_of(model, 2, dtype).backward()
    model[2].weight.grad = model[2].bias.grad = None
    optimizer.step()
    after = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(after[index]["master"], before[index]["master"]) == name.startswith("2."), name


@pytest.mark.parametrize("dtype", NARROW)
def test_weights_loaded_later_are_kept(dtype):
    """Another model's weights, zeros among them, stay what was written until a gradient moves them."""
    model, other = network(dtype=dtype), network(3, dtype)
    with torch.no_grad():
        other[0].weight[0].zero_()
    optimizer = build(model)
    train(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model.load_state_dict(other.state_dict())
    train(model, optimizer, range(1))
    assert_same_parameters(model, other, rtol=0, atol=0)
    assert all(bool(master.isfinite().all()) for master in masters(optimizer, model).values())
    assert float(masters(optimizer, model)["0.weight"][0].abs().max()) < SMALLEST_EXACT[torch.float16]

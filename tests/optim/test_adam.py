"""FusedAdam against torch.optim on ordinary models: groups, freezing, types, clipping, moved parameters."""

import copy
import logging

import pytest
import torch
from torch import nn

from ls_train.optim import FusedAdam
from tests.optim.training import assert_same_parameters, decay_groups, loss_of, network, train


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("flatten", [True, False])
def test_groups_match_torch(decoupled, flatten):
    ours, theirs = network(), network()
    peer = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = FusedAdam(decay_groups(ours), lr=1e-2, decoupled_weight_decay=decoupled, flatten=flatten)
    train(ours, optimizer)
    train(theirs, peer(decay_groups(theirs), lr=1e-2))
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_float64_matches_torch_closely():
    ours, theirs = network(dtype=torch.float64), network(dtype=torch.float64)
    train(ours, FusedAdam(ours.parameters(), lr=1e-2))
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=1e-2))
    assert_same_parameters(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_are_rounded_masters(dtype):
    """Updates far below the parameters' resolution add up in the master, exactly as in a float32 Adam."""
    ours = nn.Parameter(torch.full((10,), 1.0, dtype=dtype))
    theirs = nn.Parameter(torch.full((10,), 1.0))
    optimizer, peer = FusedAdam([ours], lr=1e-4), torch.optim.Adam([theirs], lr=1e-4)
    for _ in range(150):
        ours.grad, theirs.grad = torch.ones_like(ours), torch.ones_like(theirs)
        optimizer.step()
        peer.step()
    torch.testing.assert_close(optimizer.state[ours]["master"], theirs.detach(), rtol=1e-6, atol=0)
    assert torch.equal(ours.detach(), theirs.detach().to(dtype))
    assert ours[0].item() < 1.0


def test_mixed_dtypes_in_one_optimizer():
    half, full = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([half, full], lr=0.1)
    (half.float() * full).sum().backward()
    norm, found_inf = optimizer.grad_norm()
    optimizer.step()
    torch.testing.assert_close(norm, torch.tensor([8.0**0.5]))
    assert found_inf.item() == 0
    torch.testing.assert_close(full.detach(), torch.full((4,), 0.9))
    assert torch.equal(half.detach(), torch.full((4,), 0.9).bfloat16())


def test_parameters_without_gradient_are_untouched_and_count_for_themselves():
    ours, theirs = network(), network()
    optimizer, peer = FusedAdam(ours.parameters(), 1e-2, weight_decay=0.1), torch.optim.AdamW(theirs.parameters(), 1e-2)
    for group in peer.param_groups:
        group["weight_decay"] = 0.1
    for update in range(4):
        for model, opt in ((ours, optimizer), (theirs, peer)):
            opt.zero_grad()
            loss_of(model, update).backward()
            if update % 2:
                model[2].weight.grad = model[2].bias.grad = None
            before = model[2].weight.detach().clone()
            opt.step()
            assert torch.equal(before, model[2].weight) == bool(update % 2)
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert sorted(steps) == [2, 2, 4, 4, 4, 4]


def test_frozen_parameters_stay_and_may_be_freed_later():
    ours, theirs = network(), network()
    optimizer, peer = FusedAdam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)
    frozen = ours[0].weight.detach().clone()
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    train(ours, optimizer, range(2)), train(theirs, peer, range(2))
    assert torch.equal(ours[0].weight, frozen)
    for model in (ours, theirs):
        model[0].requires_grad_(True)
    train(ours, optimizer, range(2, 5)), train(theirs, peer, range(2, 5))
    assert not torch.equal(ours[0].weight, frozen)
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_groups_added_later():
    ours, theirs = network(), network()
    optimizer, peer = FusedAdam(ours[0].parameters(), 1e-2), torch.optim.AdamW(theirs[0].parameters(), 1e-2)
    peer.param_groups[0]["weight_decay"] = 0.0
    train(ours, optimizer, range(2)), train(theirs, peer, range(2))
    for model, opt in ((ours, optimizer), (theirs, peer)):
        opt.zero_grad()
        rest = [*model[2].parameters(), *model[4].parameters()]
        opt.add_param_group({"params": rest, "lr": 5e-3, "weight_decay": 0.1})
        for param in rest:
            param.grad = None
    train(ours, optimizer, range(2, 5)), train(theirs, peer, range(2, 5))
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_tied_parameter_is_updated_once():
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([("a", weight), ("c", nn.Parameter(torch.ones(1)))], lr=0.1)
    (weight * weight).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))


def test_two_models_in_one_process():
    a, b, alone = network(1), network(2), network(1)
    first, second = FusedAdam(a.parameters(), 1e-2), FusedAdam(b.parameters(), 1e-3)
    for update in range(3):
        train(a, first, range(update, update + 1))
        train(b, second, range(update, update + 1))
    train(alone, FusedAdam(alone.parameters(), 1e-2), range(3))
    assert_same_parameters(a, alone, rtol=0, atol=0)


def test_learning_rate_changes_and_may_be_a_tensor():
    ours, theirs = network(), network()
    lr = torch.tensor(1e-2)
    optimizer, peer = FusedAdam(ours.parameters(), lr=lr), torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for update in range(4):
        lr.fill_(1e-2 / (update + 1))
        peer.param_groups[0]["lr"] = 1e-2 / (update + 1)
        train(ours, optimizer, range(update, update + 1)), train(theirs, peer, range(update, update + 1))
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(ours)
    train(ours, optimizer, range(1))
    assert_same_parameters(ours, before, rtol=0, atol=0)


def test_scheduler_and_closure():
    ours, theirs = network(), network()
    results = []
    for model, cls in ((ours, FusedAdam), (theirs, torch.optim.Adam)):
        optimizer = cls(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(3):
            results.append(optimizer.step(closure).item())
            schedule.step()
    assert results[:3] == pytest.approx(results[3:], rel=1e-6)
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_clipping_and_scale_on_the_device_equal_torch():
    ours, theirs = network(), network()
    optimizer, peer = FusedAdam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)
    for update in range(4):
        optimizer.zero_grad(), peer.zero_grad()
        (loss_of(ours, update) * 128).backward()
        loss_of(theirs, update).backward()
        norm, _ = optimizer.grad_norm()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        torch.testing.assert_close(norm[0] / 128, expected)
        optimizer.step(scale=torch.tensor(128.0), max_norm=0.01, norm=norm)
        peer.step()
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clip_grad_norm_in_place():
    model = network()
    optimizer = FusedAdam(model.parameters())
    loss_of(model, 0).backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm, _ = optimizer.grad_norm()
    torch.testing.assert_close(norm[0], expected)
    optimizer.clip_grads(1e-3, norm)
    torch.testing.assert_close(
        nn.utils.get_total_norm([p.grad for p in model.parameters()]), torch.tensor(1e-3), rtol=1e-2, atol=0
    )


def test_an_overflow_changes_nothing():
    model = network(dtype=torch.float16)
    optimizer = FusedAdam(model.parameters(), 1e-2, weight_decay=0.1)
    train(model, optimizer, range(2))
    loss_of(model, 3, torch.float16).backward()
    model[4].bias.grad[1] = float("inf")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    norm, found_inf = optimizer.grad_norm()
    assert found_inf.item() == 1
    optimizer.step(max_norm=1.0, norm=norm, found_inf=found_inf)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_grad_scaler_of_torch():
    ours, theirs = network(), network()
    for model, opt in (
        (ours, FusedAdam(ours.parameters(), 1e-2)),
        (theirs, torch.optim.Adam(theirs.parameters(), 1e-2)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for update in range(5):
            opt.zero_grad()
            loss = loss_of(model, update) * (float("inf") if update == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 2.0**11
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_moved_parameters_are_updated_one_by_one(caplog):
    ours, theirs = network(), network()
    optimizer, peer = FusedAdam(decay_groups(ours), 1e-2), torch.optim.AdamW(decay_groups(theirs), 1e-2)
    train(ours, optimizer, range(2)), train(theirs, peer, range(2))
    for param in ours.parameters():
        param.data = param.data.clone()
    with caplog.at_level(logging.WARNING):
        train(ours, optimizer, range(2, 4)), train(theirs, peer, range(2, 4))
        ours[2].weight.data = ours[2].weight.data.t().contiguous().t()
        train(ours, optimizer, range(4, 6)), train(theirs, peer, range(4, 6))
    assert [record.message.count("tensor by tensor") for record in caplog.records] == [1]
    assert_same_parameters(ours, theirs, rtol=1e-5, atol=1e-7)


def test_masters_survive_a_move():
    model, reference = network(dtype=torch.bfloat16), network(dtype=torch.bfloat16)
    optimizer, peer = FusedAdam(model.parameters(), 1e-4), FusedAdam(reference.parameters(), 1e-4)
    train(model, optimizer, range(3)), train(reference, peer, range(3))
    model[0].weight.data = model[0].weight.data.clone()
    train(model, optimizer, range(3, 6)), train(reference, peer, range(3, 6))
    for moved, stayed in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.state[moved]["master"], peer.state[stayed]["master"])


def test_half_after_building_gets_masters():
    model, reference = network(), network()
    optimizer, peer = FusedAdam(model.parameters(), 1e-3), FusedAdam(reference.parameters(), 1e-3)
    train(model, optimizer, range(2)), train(reference, peer, range(2))
    model.bfloat16()
    train(model, optimizer, range(2, 3))
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(
        state["master"] - reference[0].weight, torch.zeros(7, 5), atol=2e-3, rtol=0
    )  # one update of 1e-3 since
    assert torch.equal(state["master"].bfloat16(), model[0].weight)


def test_stale_weights_in_a_backward_are_noticed():
    model = network()
    optimizer = FusedAdam(model.parameters(), 1e-3)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_counts_although_gradients_come_updates_later():
    """The master of a parameter that was written is made anew when its buffer takes part again."""
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)]
    optimizer = FusedAdam(parameters, lr=1e-4, weight_decay=0.0)

    def update(chosen):
        optimizer.zero_grad()
        for parameter in chosen:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    update(parameters)
    with torch.no_grad():
        parameters[1].fill_(3.0)
    update(parameters[:1])
    update(parameters)
    assert optimizer.state[parameters[1]]["master"].tolist() == pytest.approx([3.0] * 4, abs=1e-3)
    assert parameters[1].tolist() == [3.0] * 4


def test_refusals():
    param = nn.Parameter(torch.ones(2))
    for options, message in (
        ({"lr": -1.0}, "lr = -1"),
        ({"eps": -1.0}, "eps = -1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas = 0.9"),
        ({"eps": None}, "eps = None"),
        ({"lr": "a"}, "lr = 'a'"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": torch.ones(2)}, "one element"),
    ):
        with pytest.raises(ValueError, match=message):
            FusedAdam([param], **options)
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam([{"params": [param], "amsgrad": True}])
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = FusedAdam(embedding.parameters())
    embedding(torch.tensor([0])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step()

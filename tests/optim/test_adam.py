"""FusedAdam against torch.optim on ordinary models: groups, freezing, types, states, copies, moved parameters."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

from ls_train.optim import FusedAdam

UPDATES = 6


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, update: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(11, 5, generator=torch.Generator().manual_seed(update)).to(dtype)
    return model(x).float().pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: range = range(UPDATES)) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for update in updates:
        optimizer.zero_grad()
        loss = loss_of(model, update, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_parameters(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(dict(a.named_parameters()), dict(b.named_parameters()), **tolerance)


def decay_groups(model: nn.Module) -> list[dict]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


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
    torch.testing.assert_close(optimizer.clip_grad_norm(1e-3), expected)
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


@pytest.mark.parametrize("peer", [torch.optim.Adam, torch.optim.AdamW])
def test_state_goes_to_and_from_torch(peer):
    """Train 3 updates with one, 3 with the other: equal to 6 updates with torch."""
    decoupled = peer is torch.optim.AdamW

    def ours(model):
        return FusedAdam(decay_groups(model), 1e-2, decoupled_weight_decay=decoupled)

    def theirs(model):
        return peer(decay_groups(model), 1e-2)

    whole = network()
    train(whole, theirs(whole), range(6))
    for first, second in ((ours, theirs), (theirs, ours), (ours, ours)):
        model = network()
        optimizer = first(model)
        train(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file)
        resumed = network(9)
        resumed.load_state_dict(weights)
        optimizer = second(resumed)
        optimizer.load_state_dict(state)
        train(resumed, optimizer, range(3, 6))
        assert_same_parameters(resumed, whole, rtol=1e-5, atol=1e-6)


def test_resume_in_half_precision_is_exact():
    model = network(dtype=torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), 1e-3)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    resumed = network(5, torch.bfloat16)
    again = FusedAdam(resumed.parameters(), 1e-3)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert again.state[resumed[0].weight]["exp_avg"].dtype == torch.float32
    train(resumed, again, range(3, 6))
    assert_same_parameters(resumed, model, rtol=0, atol=0)


def test_loading_weights_after_building_wins_over_old_masters():
    model, other = network(dtype=torch.float16), network(3, torch.float16)
    optimizer = FusedAdam(model.parameters(), 1e-3)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.0
    model.load_state_dict(other.state_dict())
    train(model, optimizer, range(1))
    assert_same_parameters(model, other, rtol=0, atol=0)


def test_state_dict_has_torch_layout_and_loading_resets_what_is_missing():
    model = network()
    optimizer = FusedAdam(model.parameters(), 1e-2)
    assert optimizer.state_dict()["state"] == {}
    empty = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert set(state["state"]) == set(range(6))
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["state"][0]["step"] == 2
    assert isinstance(state["state"][0]["step"], int)
    state["state"][0]["exp_avg"].zero_()
    assert not optimizer.state[model[0].weight]["exp_avg"].any(), "the state dict refers to the live state"
    optimizer.load_state_dict(empty)
    assert optimizer.state_dict()["state"] == {}
    fresh = copy.deepcopy(model)
    train(model, optimizer, range(1)), train(fresh, FusedAdam(fresh.parameters(), 1e-2), range(1))
    assert_same_parameters(model, fresh, rtol=0, atol=0)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_independently(copier):
    model = network()
    optimizer = FusedAdam(decay_groups(model), 1e-2, eps_after_correction=False)
    train(model, optimizer, range(2))
    twin, twin_optimizer = copier((model, optimizer))
    assert twin_optimizer.form == optimizer.form
    train(twin, twin_optimizer, range(2, 5))
    assert twin_optimizer.state_dict()["state"][0]["step"] == 5
    assert optimizer.state_dict()["state"][0]["step"] == 2
    train(model, optimizer, range(2, 5))
    assert_same_parameters(twin, model, rtol=0, atol=0)


def test_size_of_a_pickled_optimizer():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = FusedAdam(model.parameters(), 1e-3)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    elements = sum(p.numel() for p in model.parameters())
    assert len(pickle.dumps(optimizer)) < 1.2 * 12 * elements
    assert len(pickle.dumps(optimizer.state[model[0].weight])) < 3 * 4 * 64 * 64


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


def test_half_after_building_gets_masters(caplog):
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


def test_refusals():
    param = nn.Parameter(torch.ones(2))
    for options, message in (
        ({"lr": -1.0}, "lr = -1"),
        ({"eps": -1.0}, "eps = -1"),
        ({"betas": (0.9, 1.0)}, "betas"),
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


def test_states_that_do_not_fit_are_refused():
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    good = {"step": 1, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}

    def state(values, **options):
        return {"state": {0: values}, "param_groups": [{"params": [0], "lr": 1.0, **options}]}

    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(state(good, amsgrad=True))
    with pytest.raises(ValueError, match="has no exp_avg_sq"):
        optimizer.load_state_dict(state({"step": 1, "exp_avg": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        optimizer.load_state_dict(state({**good, "exp_avg": torch.ones(3)}))
    optimizer.load_state_dict(state(good))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    apex = {key: value for key, value in good.items() if key != "step"}
    optimizer.load_state_dict(state(apex, step=7))
    assert optimizer.state_dict()["state"][0]["step"] == 7

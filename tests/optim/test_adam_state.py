"""FusedAdam's state: to and from torch, through files, copies and pickles, in 16 bits, and what is refused."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ls_train.optim import FusedAdam
from tests.optim.training import assert_same_parameters, decay_groups, network, train


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

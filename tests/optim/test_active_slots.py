"""Which parameters take part in an update, where captured graphs read the device's list of them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ls_train.optim import FusedAdam, moments


def updated(optimizer: FusedAdam, parameters: list[nn.Parameter], chosen: set[int]) -> list[bool]:
    """Do an update with gradients for ``chosen``; return which parameters changed."""
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.zero_grad()
    for index in chosen:
        parameters[index].grad = torch.ones_like(parameters[index])
    optimizer.step()
    return [not torch.equal(old, parameter) for old, parameter in zip(before, parameters, strict=True)]


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3)) for _ in range(7)]


def test_choices_that_graphs_read_are_kept(parameters, monkeypatch) -> None:
    optimizer = FusedAdam(parameters, lr=0.1)
    state = optimizer._moments_of(optimizer.buffers[0])
    updated(optimizer, parameters, {0, 2})
    monkeypatch.setattr(moments, "is_capturing", lambda: True)
    updated(optimizer, parameters, {0, 2})
    monkeypatch.undo()
    captured, values = weakref.ref(state._active_tensor), state._active_tensor.tolist()
    for number in range(1, 127):
        chosen = {index for index in range(7) if number >> index & 1}
        assert updated(optimizer, parameters, chosen) == [index in chosen for index in range(7)]
    assert captured() is not None, "a graph reads it"
    assert captured().tolist() == values
    assert len(state._active_tensors) <= moments._CHOICES


def test_a_choice_that_comes_first_in_a_capture_is_refused(parameters, monkeypatch) -> None:
    """Its upload would become part of the graph, from memory that others get."""
    optimizer = FusedAdam(parameters, lr=0.1)
    updated(optimizer, parameters, {0, 2})
    updated(optimizer, parameters, {1})
    monkeypatch.setattr(moments, "is_capturing", lambda: True)
    assert updated(optimizer, parameters, {0, 2}) == [index in {0, 2} for index in range(7)]
    with pytest.raises(RuntimeError, match="other parameters have a gradient"):
        updated(optimizer, parameters, {3})
    monkeypatch.undo()
    assert updated(optimizer, parameters, {3}) == [index == 3 for index in range(7)]
    assert updated(optimizer, parameters, set(range(7))) == [True] * 7

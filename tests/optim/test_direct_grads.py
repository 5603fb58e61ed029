"""Gradients written straight into the flat buffer give what ordinary gradients give, whatever the step looks like."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ls_train.flat_order import keep_together
from ls_train.optim import FusedAdam
from ls_train.params import grad_slot, joined


class _Project(torch.autograd.Function):
    """y = x [w1; w2]^T, a stand-in for the layers: both gradients are one product where the slots are neighbours."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        together = joined([first, second])
        return x @ (torch.cat([first, second]) if together is None else together).t()

    @staticmethod
    def backward(ctx, dy):
        x, first, second = ctx.saved_tensors
        dx = dy @ torch.cat([first, second])
        slots = [grad_slot(first), grad_slot(second)]
        if None in slots:
            return dx, *(dy.t() @ x).split([first.shape[0], second.shape[0]])
        target = joined([slot.tensor for slot in slots])
        target.copy_(target + dy.t() @ x if slots[0].written else dy.t() @ x)
        for slot in slots:
            slot.commit()
        return dx, None, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.randn(3, 4))
        self.first = nn.Parameter(torch.randn(5, 4))
        self.plain = nn.Linear(8, 4)
        keep_together([self.first, self.second])

    def forward(self, x):
        return torch.tanh(self.plain(_Project.apply(x, self.first, self.second)))


def step_once(model, x, update):
    model(x).pow(2).sum().backward()


def step_twice(model, x, update):
    """Two micro-batches."""
    for part in x.chunk(2):
        model(part).pow(2).sum().backward()


def step_two_forwards(model, x, update):
    a, b = model(x), model(x * 2)
    (a - b).pow(2).sum().backward()


def step_retained(model, x, update):
    loss = model(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def step_checkpointed(model, x, update):
    hidden = x.requires_grad_()
    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=update % 2 == 0)
    hidden.pow(2).sum().backward()


def step_with_ordinary_use(model, x, update):
    """The same parameter also gets a gradient from autograd, before or after."""
    loss, other = model(x).pow(2).sum(), (model[0].first * 2).sum()
    for term in (loss, other) if update % 2 else (other, loss):
        term.backward()


def step_unused(model, x, update):
    (model if update % 2 else model[1:])(x).pow(2).sum().backward()


STEPS = [
    step_once,
    step_twice,
    step_two_forwards,
    step_retained,
    step_checkpointed,
    step_with_ordinary_use,
    step_unused,
]


def trained(step, direct: bool, clear: str = "zero_grad") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(4, 2))
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer.direct_grads = direct
    for update in range(5):
        if clear == "zero_grad":
            optimizer.zero_grad()
        elif clear == "zeros":
            optimizer.zero_grad(set_to_none=False)
        else:
            for param in model.parameters():
                param.grad = None
        step(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(update)), update)
        optimizer.step(max_norm=1.0)
    return model


@pytest.mark.parametrize("step", STEPS)
def test_direct_gradients_change_nothing(step):
    ordinary, direct = trained(step, False), trained(step, True)
    torch.testing.assert_close(dict(direct.named_parameters()), dict(ordinary.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clear", ["zeros", "by hand"])
def test_any_way_of_clearing_gradients_works(clear):
    ordinary, direct = trained(step_once, False, clear), trained(step_once, True, clear)
    torch.testing.assert_close(dict(direct.named_parameters()), dict(ordinary.named_parameters()), rtol=1e-5, atol=1e-6)


def test_direct_gradients_are_not_copied():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    optimizer = FusedAdam(model.parameters())
    optimizer.direct_grads = True
    step_once(model, torch.randn(6, 4), 0)
    slot = grad_slot(model[0].first)
    assert slot.written
    assert model[0].first.grad is slot.tensor
    (buffer,) = optimizer.buffers
    optimizer.grad_norm()
    assert model[0].first.grad is slot.tensor
    assert slot.tensor.untyped_storage().data_ptr() == buffer.grad.data_ptr()


def test_later_groups_follow_the_switch():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([first])
    optimizer.direct_grads = True
    optimizer.add_param_group({"params": [second]})
    assert grad_slot(second) is not None
    optimizer.direct_grads = False
    assert grad_slot(first) is None
    assert grad_slot(second) is None

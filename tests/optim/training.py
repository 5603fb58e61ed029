"""A small network, its training and comparison, for the tests of the optimiser."""

import torch
from torch import nn

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

"""Captured calls on a GPU: memory and device state that outlive a graph, or a capture that failed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ls_train import FusedAdam, GraphedStep, memory
from ls_train.graph import CapturedCalls, CudaGraphs
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_scratch_of_a_graph_stays_after_others_were_dropped() -> None:
    """A graph of a new pool must not use scratch that goes with the old one when a larger shape needs more."""
    device = torch.device("cuda", torch.cuda.current_device())
    layer = LSTransformerEncoderLayer(embed_dim=512, num_heads=8, dropout=0.0, attention_dropout=0.0).to(device)
    layer.eval()
    calls = CapturedCalls(CudaGraphs(device), layer)
    rows = {}
    for count in (256, 4096):
        packing = Packing.from_lengths(torch.full((count // 32,), 32), 32, device)
        rows[count] = torch.randn(count, 512, device=device, requires_grad=True), packing

    def gradient(count: int) -> Tensor:
        x, packing = rows[count]

        def function() -> Tensor:
            return torch.autograd.grad(layer.forward_packed(x, packing).sum(), x)[0]

        return calls("gradient", (count,), function).clone()

    expected = gradient(256)
    gradient(256)
    calls.clear()
    gradient(256)
    gradient(256)
    gradient(4096)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 18,), 7.0, device=device) for _ in range(64)]
    assert torch.equal(gradient(256), expected)
    assert calls.captures == 3
    assert all(bool((other == 7).all()) for other in others)
    stream = calls._graphs._stream
    calls.clear()
    assert (device, stream.cuda_stream) not in memory._by_stream, "scratch of dropped graphs is free"


class Heads(nn.Module):
    """Each call trains one head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 8) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.heads[which](self.body(x).tanh())


@pytest.mark.parametrize("order", [(0, 1, 0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2)], ids=["alternating", "in a row"])
def test_kinds_of_step_that_train_different_parameters(order: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    model = Heads().cuda()
    twin = copy.deepcopy(model)
    step = GraphedStep(model, nn.functional.mse_loss, FusedAdam(model.parameters(), lr=1e-2))
    optimizer = FusedAdam(twin.parameters(), lr=1e-2)
    for number in range(40):
        x, target, which = torch.randn(16, 64).cuda(), torch.randn(16, 8).cuda(), order[number % len(order)]
        step((x, which), target)
        optimizer.zero_grad()
        nn.functional.mse_loss(twin(x, which), target).backward()
        optimizer.step()
    assert step.calls.captures == 3
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_refused_capture_spoils_no_later_one() -> None:
    x = torch.ones(1 << 20, device="cuda")
    calls = CapturedCalls(CudaGraphs(x.device))
    for _ in range(2):
        calls("reads the device", (), lambda: x * x.sum().item())
    for _ in range(3):
        y = calls("does not", (), lambda: (x + 1) * 2)
    assert calls.captures == 1
    assert bool((y == 4).all())

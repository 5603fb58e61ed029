"""Captured calls and the graphed step of plain PyTorch, on the CPU with recorded operators in the place of graphs."""

import logging
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ls_train
from ls_train.graph import CapturedCalls, level
from ls_train.optim import DynamicLossScale
from tests.recorded_graphs import RecordedGraphs


class Doubler:
    """Work on static memory, with a count of its Python runs."""

    def __init__(self, **options):
        self.graphs = RecordedGraphs()
        self.calls = CapturedCalls(self.graphs, **options)
        self.memory = torch.zeros(4)
        self.runs = 0

    def __call__(self, value, shape=(4,), kind="double"):
        def function():
            self.runs += 1
            return self.memory * 2

        self.memory.fill_(value)
        return self.calls(kind, shape, function).tolist()[0]


def test_replays_after_one_eager_call():
    double = Doubler()
    assert [double(value) for value in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert (double.runs, double.calls.captures, double.calls.replays, double.calls.calls) == (2, 1, 3, 4)
    # What the eager call left is given back once, before the capture.
    assert double.graphs.released == 1
    assert double.calls.seconds > 0
    assert "1 captured" in double.calls.summary()
    assert "75.0% of 4 calls replayed" in double.calls.summary()


def test_limit_drops_the_least_recently_used():
    double = Doubler(limit=2)
    double(1, (1,))
    for size in (1, 2, 1):
        double(1, (size,))
    assert double.calls.captures == 2
    double(1, (3,))  # full: the first time eagerly
    assert double.calls.captures == 2
    double(1, (3,))  # takes the place of 2
    assert double.calls.captures == 3
    runs = double.runs
    double(1, (1,))
    assert double.runs == runs
    double(1, (2,))
    assert double.runs == runs + 1


def test_failures_run_eagerly_and_end(caplog):
    double = Doubler()
    double(1)
    for value in range(5):
        double.graphs.fail = RuntimeError("operation not permitted when stream is capturing\nmore")
        assert double(value) == 2 * value
    assert double.calls.captures == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].endswith("this call runs eagerly: operation not permitted when stream is capturing")
    assert "no more graphs" in lines[-1]


def test_out_of_memory_drops_everything():
    double = Doubler()
    double(1)
    double(1)
    double.graphs.fail = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        double(1, (5,))
    assert double.graphs.renewed == 1
    runs = double.runs
    assert double(3) == 6
    assert double.runs == runs + 1


@pytest.mark.parametrize("change", ["double", "replace", "buffer"])
def test_moved_memory_drops_the_graphs(change):
    model = nn.BatchNorm1d(3)
    calls = CapturedCalls(RecordedGraphs(), model)
    for _ in range(3):
        calls("sum", (), lambda: model.weight.sum())
    assert calls.replays == 2
    if change == "double":
        model.double()
    elif change == "replace":
        model.weight = nn.Parameter(torch.zeros(3))
    else:
        model.running_mean = torch.zeros(3)
    result = calls("sum", (), lambda: model.weight.sum())
    assert (result.dtype, calls.replays) == (model.weight.dtype, 2)
    assert calls("sum", (), lambda: model.weight.sum()) == model.weight.sum()


def test_levels():
    levels = [level(count, 2, 8) for count in range(1, 5000)]
    assert all(count <= rounded <= max(8, 1.25 * count + 8) for count, rounded in enumerate(levels, 1))
    assert levels == sorted(levels)


class Training:
    def __init__(self, graphs=None, fused=True, more=(), **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), *more)
        kind = ls_train.FusedAdam if fused else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.step = ls_train.GraphedStep(
            self.model, nn.functional.cross_entropy, self.optimizer, graphs=graphs, **options
        )

    def run(self, count, first=0):
        losses = []
        for update in range(first, first + count):
            generator = torch.Generator().manual_seed(update)
            rows = (4, 7)[update % 2]
            inputs = torch.randn(rows, 5, generator=generator)
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + update)
            losses.append(float(self.step(inputs, torch.randint(3, (rows,), generator=generator))))
        return losses

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@pytest.mark.parametrize("fused", [True, False])
def test_replays_equal_eager_steps(fused):
    """Two shapes in turn, a learning rate that changes every step."""
    eager, graphed = Training(fused=fused), Training(RecordedGraphs(), fused=fused)
    assert graphed.run(12) == eager.run(12)
    assert torch.equal(graphed.weights(), eager.weights())
    assert (eager.step.calls, graphed.step.calls.captures, graphed.step.calls.replays) == (None, 2, 10)


def test_overflow_skips_the_update_in_a_replay():
    scale = DynamicLossScale("cpu", init_scale=4.0)
    training = Training(RecordedGraphs(), loss_scale=scale, max_norm=1.0)
    training.run(4)
    before = training.weights()
    scale.scale.fill_(float("inf"))
    training.run(2, first=4)
    assert torch.equal(training.weights(), before)
    scale.scale.fill_(4.0)
    training.run(2, first=6)
    assert not torch.equal(training.weights(), before)
    assert training.step.calls.replays == 6


def test_loading_is_seen():
    """A loaded optimiser state and parameters that were written in place count in the next step."""
    eager, graphed = Training(), Training(RecordedGraphs())
    for training in (eager, graphed):
        training.run(6)
        state = training.optimizer.state_dict()
        with torch.no_grad():
            training.model[0].weight.mul_(0.5)
        training.optimizer.load_state_dict(state)
        training.run(6, first=6)
    assert torch.equal(graphed.weights(), eager.weights())


def test_nested_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, batch, factor, packing):
            return self.linear(batch["rows"]) * factor * packing.rows

    model = Model()
    optimizer = ls_train.FusedAdam(model.parameters(), lr=0.0)
    step = ls_train.GraphedStep(model, lambda out, target: (out * target).sum(), optimizer, graphs=RecordedGraphs())
    for count in range(1, 5):
        packing = ls_train.Packing.from_lengths(torch.tensor([2, 1]), 2, torch.device("cpu"))
        packing.cu_seqlens[-1] = count
        rows = torch.full((3, 2), float(count))
        loss = step(({"rows": rows}, 2.0, packing), torch.ones(3, 1))
        assert loss.item() == pytest.approx((model.linear(rows) * 2 * count).sum().item())
    assert step.calls.replays == 3


@pytest.mark.parametrize("change", ["a module's mode", "the model's mode", "a frozen parameter"])
def test_a_change_of_the_model_is_seen(change):
    """By a graph as by an eager step."""
    weights = []
    for graphs in (None, RecordedGraphs()):
        training = Training(graphs, more=[nn.BatchNorm1d(3)])
        training.run(5)
        if change == "a frozen parameter":
            training.model[2].weight.requires_grad_(False)
        else:
            (training.model[3] if change == "a module's mode" else training.model).eval()
        training.run(5, first=5)
        weights.append(torch.cat([training.weights(), training.model[3].running_mean]))
    assert torch.equal(*weights)
    assert training.step.calls.replays > 5


class Hiding:
    def __init__(self, rows):
        self.rows = rows


@pytest.mark.parametrize("value", [np.ones(2), {1}, SimpleNamespace(), Hiding(torch.ones(2))])
def test_inputs_that_no_graph_can_follow_are_refused(value):
    """Also inside of others."""
    with pytest.raises(TypeError, match=f"an input of type {type(value).__name__} (is not hashable|holds tensors)"):
        Training(RecordedGraphs()).step((torch.ones(4, 5), [{"more": value}]), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda **items: defaultdict(list, items)])
def test_dictionaries_keep_their_type(make):
    seen = []

    class Model(nn.Linear):
        def forward(self, batch):
            seen.append((type(batch), list(batch)))
            return super().forward(batch["x"])

    model = Model(3, 1)
    optimizer = ls_train.FusedAdam(model.parameters(), lr=0.0)
    step = ls_train.GraphedStep(model, nn.functional.mse_loss, optimizer, graphs=RecordedGraphs())
    for number in range(4):
        batch = make(y=1, x=torch.full((2, 3), float(number)))
        expected = nn.functional.mse_loss(nn.Linear.forward(model, batch["x"]), torch.zeros(2, 1))
        torch.testing.assert_close(step(batch, torch.zeros(2, 1)), expected.detach())
    assert seen == [(type(batch), ["y", "x"])] * len(seen)
    assert step.calls.replays == 3


def test_reasons_are_logged_once(caplog):
    caplog.set_level(logging.WARNING)
    Training().run(3)
    assert [record.getMessage() for record in caplog.records] == [
        "GraphedStep: steps run without CUDA graphs because of parameters on the device cpu"
    ]
    caplog.clear()
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    ls_train.GraphedStep(model, nn.functional.mse_loss, ls_train.FusedAdam(model.parameters()), graphs=RecordedGraphs())
    assert "because of hooks on modules" in caplog.text


def test_bad_arguments():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"max_norm = 1.0 and loss_scale need ls_train.FusedAdam, got SGD"):
        ls_train.GraphedStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), max_norm=1.0)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        ls_train.GraphedStep(nn.Tanh(), nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))


def test_inputs_of_shapes_without_a_graph_are_not_kept() -> None:
    """Data with ever new shapes must not fill the memory; what a graph reads stays where it is."""
    model = nn.Linear(3, 1)
    optimizer = ls_train.FusedAdam(model.parameters(), lr=0.0)
    step = ls_train.GraphedStep(model, nn.functional.mse_loss, optimizer, limit=3, graphs=RecordedGraphs())
    for number in range(60):
        for rows in (1, 2 + number % 3, 5 + number):
            x, target = torch.randn(rows, 3), torch.randn(rows, 1)
            expected = nn.functional.mse_loss(model(x), target).detach()
            torch.testing.assert_close(step(x, target), expected)
        assert len(step._static) <= 2 * 3
    assert step.calls.replays > 60

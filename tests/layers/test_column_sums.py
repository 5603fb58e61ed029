"""The column sums of a layer's backward are added up in one launch, whatever becomes of the gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from ls_train import _library
from ls_train.layers import call, column_sums
from ls_train.layers.column_sums import ColumnSums
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.layers.gradients import GradientWriter
from ls_train.packing import Packing
from ls_train.params import FlatParameters
from ls_train.testing import gpus
from tests.layers.comparison import gradient_errors, gradients
from tests.layers.test_autograd import SEED
from tests.operator_calls import OperatorCalls

SIZE = 16
every_kind = pytest.mark.parametrize("kind", [LSTransformerEncoderLayer, LSTransformerDecoderLayer])
every_order = pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])


def build(kind, device="cpu", size=SIZE, **options):
    torch.manual_seed(3)
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    return kind(embed_dim=size, num_heads=4, **rates, **options).to(device)


def output(layer, rows=7):
    """Return the layer's output; a decoder layer's keys and values are given."""
    parameter = next(layer.parameters())
    device, dtype = parameter.device, parameter.dtype
    packing = Packing.from_lengths(torch.tensor([rows - 2, 2]), rows - 2, device)
    x = torch.linspace(-1, 1, rows * layer.embed_dim).view(rows, -1).to(device, dtype).requires_grad_()
    if isinstance(layer, LSTransformerDecoderLayer):
        kv = cross_kv(x, packing, [layer]).detach().requires_grad_()
        return layer.forward_packed(x, packing, kv, packing, 0, SEED.to(device))[0]
    return layer.forward_packed(x, packing, SEED.to(device))


def loss_of(layer, rows=7):
    y = output(layer, rows)
    return (y * torch.linspace(0, 1, y.numel(), device=y.device).view_as(y)).sum()


@every_order
@every_kind
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "fresh"])
@pytest.mark.parametrize("frozen", [None, "fc1.bias", "self_attn.k_proj.bias", "final_layer_norm", "bias"])
def test_one_launch_a_layer(frozen, direct, kind, normalize_before):
    layer = build(kind, normalize_before=normalize_before)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    flat = FlatParameters([parameter for parameter in layer.parameters() if parameter.requires_grad])
    flat.direct_grads = direct
    for written in (False, True):
        y = output(layer)
        with OperatorCalls() as operators:
            y.backward(torch.ones_like(y))
        names = [name for name, _ in operators.calls]
        # What has no slot because it is not wanted is not added to anything.
        some_slots = frozen in ("self_attn.k_proj.bias", "final_layer_norm")
        launches = 2 if direct and written and some_slots else 1
        assert names[-launches:] == ["column_sum"] * launches
        assert "column_sum" not in names[:-launches]
        for name, arguments in operators.calls[:-launches]:
            if arguments.get("workspace") is not None and "partial_rows" in arguments:
                assert arguments["partial_rows"] is not None, f"{name} adds up its own sums"
    assert flat.intact()


@every_order
@every_kind
def test_parts_of_a_backward_fill_what_is_reserved(kind, normalize_before, monkeypatch):
    made, sizes = [], []

    class Watched(ColumnSums):
        def finish(self):
            made.append((self._used, sum(len(begun.sums) for begun in self._begun.values())))
            super().finish()

    monkeypatch.setattr(call, "ColumnSums", Watched)

    def remember(*arguments):
        sizes.append(arguments[-1])
        return call.backward_pass(*arguments)

    module = LSTransformerEncoderLayer if kind is LSTransformerEncoderLayer else LSTransformerDecoderLayer
    monkeypatch.setattr(f"{module.__module__}.backward_pass", remember)
    loss_of(build(kind, normalize_before=normalize_before, size=12, ffn_dim=5)).backward()
    assert [used for used, _ in made] == sizes
    assert made[0][1] <= column_sums.MAX_PARTS


@every_order
@every_kind
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "fresh"])
def test_parameters_shared_inside_a_layer(direct, kind, normalize_before):
    """Two places write one gradient: their sums must not go into one launch."""
    layer = build(kind, normalize_before=normalize_before)
    layer.final_layer_norm.weight = layer.self_attn_layer_norm.weight
    layer.fc2.bias = layer.self_attn.out_proj.bias
    shared = copy.deepcopy(layer)
    flat = FlatParameters(shared.parameters())
    flat.direct_grads = direct
    for _ in range(2):
        for built in (layer, shared):
            loss_of(built).backward()
        errors = gradient_errors(gradients(shared), gradients(layer))
        assert max(errors.values()) < 1e-6, errors
    apart = copy.deepcopy(layer)
    apart.final_layer_norm.weight = torch.nn.Parameter(layer.final_layer_norm.weight.detach().clone())
    apart.fc2.bias = torch.nn.Parameter(layer.fc2.bias.detach().clone())
    apart.zero_grad()
    for _ in range(2):
        loss_of(apart).backward()
    for one, other, whole in (
        (apart.final_layer_norm.weight, apart.self_attn_layer_norm.weight, shared.final_layer_norm.weight),
        (apart.fc2.bias, apart.self_attn.out_proj.bias, shared.fc2.bias),
    ):
        torch.testing.assert_close(whole.grad, one.grad + other.grad)


def test_a_layer_that_shares_parameters_is_not_for_the_operator():
    """The operator adds everything up at the end, and writes each gradient once."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))

    def complete(leaves):
        return GradientWriter({"a": 0, "b": 1}, (first, second), leaves, (True, True)).complete

    assert complete((first, second))
    assert complete((None, None)), "not the module's own, so without slots"
    assert not complete((first, first))


def test_gradients_that_hold_something_and_those_that_do_not():
    """Two launches where one flag does not serve all."""
    sums = ColumnSums(torch.zeros(1000))
    first, second = torch.full((3,), 5.0), torch.full((2,), float("nan"))
    for gradient, accumulate, value in ((first, True, 1.0), (second, False, 2.0)):
        workspace, count = sums.part((gradient,), accumulate, 2 * gradient.numel())
        workspace.fill_(value)
        count.fill_(2)
    assert sums.part((None,), False, 10) == (None, None)
    sums.finish()
    sums.finish()
    assert first.tolist() == [7.0] * 3
    assert second.tolist() == [4.0] * 2


def kernels_of(function) -> list[str]:
    """Return the names of our kernels that ``function`` launches, in order."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [
        event.name for event in sorted(events, key=lambda event: event.time_range.start) if "ls_train" in event.name
    ]


@pytest.mark.skipif(not gpus(), reason="needs a CUDA device")
@every_order
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_launches_of_a_backward(dtype, kind, normalize_before, monkeypatch):
    """As many of the compiled operator as of the Python code, in the same order, and one that adds up."""
    layer = build(kind, gpus()[0], size=64, normalize_before=normalize_before).to(dtype)
    flat = FlatParameters(layer.named_parameters())
    flat.direct_grads = True
    launched: dict[str, list[str]] = {}
    results: dict[str, list[Tensor]] = {}
    for way, find in (("operators", _library.compiled), ("python", lambda name, like: None)):
        monkeypatch.setattr("ls_train.layers.compiled.compiled", find)
        flat.zero_grad()
        loss = loss_of(layer, 300)
        launched[way] = kernels_of(lambda loss=loss: loss.backward(retain_graph=True))
        results[way] = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    assert launched["operators"] == launched["python"]
    assert sum("column_sum_kernel" in name for name in launched["operators"]) == 1
    assert "column_sum_kernel" in launched["operators"][-1]
    for compiled, python in zip(*results.values(), strict=True):
        assert torch.equal(compiled, python)

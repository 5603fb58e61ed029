"""What layers remember from call to call is never stale: whatever is changed, a call does what a fresh copy does."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing
from ls_train.params import FlatParameters
from tests.layers.operator_stand_ins import stand_in

SIZE = 16
SEED = torch.tensor([7])
PACKING = Packing.from_lengths(torch.tensor([5, 1, 3]), 5, torch.device("cpu"))


def layers(decoders=2, **options):
    torch.manual_seed(4)
    kinds = (LSTransformerEncoderLayer, *[LSTransformerDecoderLayer] * decoders)
    return nn.ModuleList(kind(embed_dim=SIZE, num_heads=4, ffn_dim=24, **options) for kind in kinds)


def flatten(modules):
    flat = FlatParameters(modules.named_parameters())
    flat.direct_grads = True
    return flat


def forward(modules):
    encoder, *decoders = modules
    dtype = encoder.fc1.weight.dtype
    torch.manual_seed(5)
    x, memory = (torch.randn(9, SIZE, dtype=dtype).requires_grad_() for _ in range(2))
    encoded = encoder.forward_packed(memory, PACKING, SEED, 3)
    y, kv = x, cross_kv(encoded, PACKING, decoders)
    for i, layer in enumerate(decoders):
        y, kv = layer.forward_packed(y, PACKING, kv, PACKING, i, SEED, 8 * i + 16)
    return y, x, memory


def results(modules, between=lambda: None, clear=True):
    """Return output and gradients of one forward and backward, by name; ``clear``: the parameters keep none."""
    y, x, memory = forward(modules)
    between()
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in modules.named_parameters()}
    if clear:
        modules.zero_grad()
    return {"y": y.detach(), "x": x.grad, "memory": memory.grad, **grads}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def differ(first, second):
    return any(
        (first[name] is None) != (value is None)
        or (value is not None and (first[name].dtype != value.dtype or not torch.allclose(first[name], value)))
        for name, value in second.items()
    )


@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_operators_get_what_the_python_code_uses(normalize_before, activation, monkeypatch):
    """First gradients and added ones, parameters with slots and without."""
    modules = layers(normalize_before=normalize_before, activation=activation)
    twin = copy.deepcopy(modules)
    expected = results(twin)
    for direct in (True, False):
        flat = flatten(modules)
        flat.direct_grads = direct
        with monkeypatch.context() as patch:
            names = stand_in(patch)
            for _ in range(2):
                assert_same(results(modules), expected)
            forward(modules)[0].sum().backward()
            added = results(modules)
        assert names == ["layer_fwd"] * 3 + ["layer_bwd"] * 3 + names[6:]
        assert len(names) == 24
        forward(twin)[0].sum().backward()
        assert_same(added, results(twin))


def test_operators_get_scratch_for_what_is_not_saved(monkeypatch):
    modules = layers()
    flat = flatten(modules)
    names = stand_in(monkeypatch)
    expected = forward(modules)[0]
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(forward(modules)[0], expected)
    assert names == ["layer_fwd"] * 9
    assert flat.intact()


def replace_data(parameter):
    parameter.data = parameter.data * 2 + 0.5


def freeze(parameter):
    parameter.requires_grad_(False)


def triple(parameter):
    parameter.grad.mul_(3)


def hook(parameter):
    parameter.register_post_accumulate_grad_hook(triple)


@pytest.mark.parametrize("change", [replace_data, freeze, hook])
def test_each_parameter_changed(change, monkeypatch):
    """One after another, so that what changed before stays changed."""
    modules = layers(1, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    twin = copy.deepcopy(modules)
    flat = flatten(modules)
    stand_in(monkeypatch)
    before = results(modules)
    for name, parameter in modules.named_parameters():
        change(parameter)
        change(twin.get_parameter(name))
        after, expected = results(modules), results(twin)
        assert_same(after, expected)
        # A key's bias alone changes nothing: it adds the same to all scores of a row.
        assert differ(after, before) or "k_proj.bias" in name, name
        before = after
    assert flat.direct_grads


def each_layer(function):
    def change(modules):
        for layer in modules:
            function(layer)

    return change


def set_to(name, value):
    return each_layer(lambda layer: setattr(layer, name, value))


def replace_parameters(layer):
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 2 + 0.5))


def replace_modules(layer):
    layer.fc1 = copy.deepcopy(layer.fc2)
    layer.fc1.weight = nn.Parameter(layer.fc2.weight.detach().t().contiguous())
    layer.fc1.bias = nn.Parameter(torch.ones(layer.fc2.in_features))
    layer.self_attn = copy.deepcopy(layer.self_attn)
    replace_parameters(layer.self_attn)


def load(assign):
    def change(modules):
        state = {name: value.detach() * 2 + 0.5 for name, value in modules.state_dict().items()}
        modules.load_state_dict(state, assign=assign)

    return change


def tie(modules):
    modules[1].fc1.weight = modules[2].fc1.weight


SETTINGS = {
    "evaluation": lambda modules: modules.eval(),
    "dropout": set_to("dropout", 0.5),
    "attention_dropout": set_to("attention_dropout", 0.5),
    "activation_dropout": set_to("activation_dropout", 0.5),
    "no dropout": each_layer(
        lambda layer: layer.__dict__.update(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    ),
    "eps": set_to("eps", 0.1),
    "heads": set_to("heads", 2),
    "activation": set_to("activation", "gelu"),
    "normalize_before": set_to("normalize_before", True),
    "causal": lambda modules: setattr(modules[0], "causal", True),
    "parameters": each_layer(replace_parameters),
    "modules": each_layer(replace_modules),
    "state": load(False),
    "state assigned": load(True),
    "type": lambda modules: modules.double(),
    "tied": tie,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_changed(setting, monkeypatch):
    modules = layers()
    twin = copy.deepcopy(modules)
    flat = flatten(modules)
    with monkeypatch.context() as patch:
        stand_in(patch)
        before = results(modules)
        SETTINGS[setting](modules)
        after = results(modules)
    SETTINGS[setting](twin)
    assert_same(after, results(twin))
    assert differ(after, before)
    assert flat.direct_grads


def unrelated(modules, flat):
    return flatten(nn.Linear(3, 3))


def flattened_again(modules, flat):
    return flatten(modules)


def flattened_again_in_part(modules, flat):
    return flatten(nn.ModuleList(layer.fc2 for layer in modules))


def switched_off(modules, flat):
    flat.direct_grads = False


def gone(modules, flat):
    flat.buffers.clear()


def moved(modules, flat):
    for parameter in modules.parameters():
        parameter.data = parameter.data.clone()


def moved_in_part(modules, flat):
    for layer in modules:
        layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data.clone()


@pytest.mark.parametrize("between", [True, False], ids=["in between", "before"])
@pytest.mark.parametrize(
    "change", [unrelated, flattened_again, flattened_again_in_part, switched_off, gone, moved, moved_in_part]
)
def test_buffers_changed(change, between, monkeypatch):
    """The gradients are the same, before the forward or between it and the backward, and lie where they belong."""
    modules = layers()
    expected = results(copy.deepcopy(modules))
    flat = flatten(modules)
    stand_in(monkeypatch)
    results(modules)
    made = []

    def change_now():
        made.append(change(modules, flat))

    if not between:
        change_now()
    assert_same(results(modules, change_now if between else lambda: None, clear=False), expected)
    owner = made[-1] if "again" in change.__name__ else flat
    params = [param for buffer in owner.buffers for param in buffer.params]
    slots = [buffer.slot(param).tensor for buffer in owner.buffers for param in buffer.params]
    lie = [param.grad is tensor for param, tensor in zip(params, slots, strict=True)]
    assert not any(lie) if change is switched_off else all(lie)


@pytest.mark.parametrize("operators", [True, False], ids=["operators", "Python"])
@pytest.mark.parametrize("written", [True, False], ids=["added", "first"])
def test_frozen_between_forward_and_backward(written, operators, monkeypatch):
    """One parameter after another gets nothing any more, as under autograd, which drops its gradient."""
    modules = layers(1)
    twin = copy.deepcopy(modules)
    flat = flatten(modules)
    if operators:
        stand_in(monkeypatch)
    for name, parameter in modules.named_parameters():
        same = twin.get_parameter(name)
        actual, expected = (
            results(built, lambda frozen=frozen: frozen.requires_grad_(False), clear=False)
            for built, frozen in ((modules, parameter), (twin, same))
        )
        assert_same(actual, expected)
        parameter.requires_grad_(True)
        same.requires_grad_(True)
        if not written:
            modules.zero_grad()
            twin.zero_grad()
    assert flat.direct_grads


def test_converted_between_forward_and_backward_is_an_error(monkeypatch):
    modules = layers()
    flat = flatten(modules)
    stand_in(monkeypatch)
    results(modules)
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "fc1.weight", "fc2.bias", "final_layer_norm.bias"):
        parameter = modules[0].get_parameter(name)
        y, *_ = forward(modules)
        data = parameter.data
        parameter.data = data.double()
        with pytest.raises((RuntimeError, TypeError)):
            y.sum().backward()
        parameter.data = data
        flat.zero_grad()
    assert flat.intact()


def test_copies_remember_nothing_of_the_original(monkeypatch):
    modules = layers()
    flatten_kept = flatten(modules)
    stand_in(monkeypatch)
    expected = results(modules)
    twin = copy.deepcopy(modules)
    each_layer(lambda layer: [replace_data(parameter) for parameter in layer.parameters()])(modules)
    assert_same(results(twin), expected)
    assert flatten_kept.direct_grads


def test_what_is_remembered_goes_with_the_buffer(monkeypatch):
    """Without waiting for the garbage collector, which would keep the gradients of a whole model."""
    modules = layers()
    flat = flatten(modules)
    stand_in(monkeypatch)
    results(modules)
    gradient = weakref.ref(flat.buffers[0].slot(modules[0].fc1.weight).tensor)
    assert gradient() is not None
    gc.disable()
    try:
        del flat
        assert gradient() is None
    finally:
        gc.enable()

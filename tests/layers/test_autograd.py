"""Layers under everything autograd offers: nothing is kept outside the graph."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.layers.transformer import LSTransformer
from ls_train.packing import Packing
from ls_train.testing import devices
from tests.layers.comparison import gradients
from tests.layers.fairseq_models import batch

SEED = torch.tensor([11])


def transformer(device="cpu", **overrides):
    settings = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "nhead": 4}
    layers = {"num_encoder_layer": 2, "num_decoder_layer": 2, "share_all_embeddings": True}
    torch.manual_seed(4)
    return LSTransformer(LSTransformer.get_config(**{**settings, **layers, **overrides})).to(device)


def loss_of(model, seed=SEED, scale=1.0):
    device = next(model.parameters()).device
    source, _, target = (x.to(device) for x in batch())
    return model(source, target, seed.to(device)).mul(scale).tanh().sum()


def assert_equal_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("device", devices())
def test_two_forwards_before_a_backward(device):
    model = transformer(device)
    (loss_of(model) + loss_of(model, torch.tensor([12]), 2.0)).backward()
    together = gradients(model)
    model.zero_grad()
    loss_of(model).backward()
    loss_of(model, torch.tensor([12]), 2.0).backward()
    assert_equal_gradients(together, gradients(model))


@pytest.mark.parametrize("device", devices())
def test_retain_graph_twice(device):
    model = transformer(device)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_equal_gradients(gradients(model), {name: 2 * value for name, value in once.items()})


@pytest.mark.parametrize("device", devices())
def test_evaluation_between_forward_and_backward(device):
    model = transformer(device)
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = loss_of(model)
    model.eval()
    with torch.no_grad():
        loss_of(model, scale=3.0)
    model.train()
    loss.backward()
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("own_seed", [True, False], ids=["seed", "generator"])
def test_activation_checkpointing(use_reentrant, own_seed):
    """Encoder layers, and decoder layers with the chain of cross keys and values."""
    config = {"embed_dim": 16, "num_heads": 4, "ffn_dim": 24}
    encoder = LSTransformerEncoderLayer(**config)
    decoders = torch.nn.ModuleList(LSTransformerDecoderLayer(**config) for _ in range(2))
    modules = torch.nn.ModuleList([encoder, *decoders])
    packing = Packing.from_lengths(torch.tensor([4, 2, 5]), 5, torch.device("cpu"))
    x = torch.randn(11, 16, requires_grad=True)
    y = torch.randn(11, 16, requires_grad=True)

    def run(call):
        torch.manual_seed(5)
        seed = SEED if own_seed else None
        memory = call(lambda rows: encoder.forward_packed(rows, packing, seed, 8), x)
        kv = cross_kv(memory, packing, decoders)
        rows = y
        for i, layer in enumerate(decoders):

            def step(rows, kv, i=i, layer=layer):
                return layer.forward_packed(rows, packing, kv, packing, i, seed, 16 + 8 * i)

            rows, kv = call(step, rows, kv)
        modules.zero_grad()
        x.grad = y.grad = None
        rows.tanh().sum().backward()
        return {**gradients(modules), "x": x.grad, "y": y.grad}

    expected = run(lambda function, *tensors: function(*tensors))
    actual = run(lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=use_reentrant))
    assert_equal_gradients(actual, expected)


def test_checkpoint_activations_option():
    model = transformer()
    loss_of(model).backward()
    checkpointed = transformer(checkpoint_activations=True)
    loss_of(checkpointed).backward()
    assert_equal_gradients(gradients(checkpointed), gradients(model))


def test_saved_tensors_hooks():
    """What is saved goes through the hooks and may come back as another tensor."""
    model = transformer()
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.clone(), tensor.requires_grad

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0].clone()):
        loss = loss_of(model)
    loss.backward()
    assert len(packed) > 10
    assert_equal_gradients(gradients(model), expected)


def test_saves_nothing_without_gradients():
    model = transformer()
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.no_grad():
        loss_of(model)
    assert packed == []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert not loss_of(model).requires_grad
    assert packed == []


def test_parameter_used_twice():
    """The same layer twice in one graph, as in weight sharing across layers."""
    torch.manual_seed(0)
    layer = LSTransformerEncoderLayer(embed_dim=16, num_heads=4, ffn_dim=24)
    twin = copy.deepcopy(layer)
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    x = torch.randn(6, 16)

    def run(first, second):
        y = first.forward_packed(x, packing, SEED, 0)
        second.forward_packed(y, packing, SEED, 8).tanh().sum().backward()

    run(layer, layer)
    run(twin, other := copy.deepcopy(twin))
    separate = gradients(other)
    assert_equal_gradients(gradients(layer), {name: value + separate[name] for name, value in gradients(twin).items()})


@pytest.mark.parametrize(
    "frozen", ["encoder", "self_attn.k_proj", "norm", "embed_tokens", "fc1.bias", "encoder_attn.v"]
)
def test_frozen_parameters(frozen):
    model = transformer()
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (frozen in name), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-5)


def test_only_the_input_needs_a_gradient():
    layer = LSTransformerDecoderLayer(embed_dim=16, num_heads=4, dropout=0.0).eval()
    x, memory = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 4, 16, requires_grad=True)
    layer(x, memory).tanh().sum().backward()
    expected = x.grad, memory.grad
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    inputs = [t.detach().requires_grad_() for t in (x, memory)]
    layer(*inputs).tanh().sum().backward()
    for tensor, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_in_place_change_of_a_parameter_is_noticed():
    model = transformer()
    loss = loss_of(model)
    with torch.no_grad():
        model.encoder.layers[0].fc1.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_two_models_in_one_process():
    a, b = transformer(), transformer(hidden_size=32, nhead=2)
    losses = loss_of(a), loss_of(b)
    losses[1].backward()
    losses[0].backward()
    interleaved = gradients(a), gradients(b)
    for model, expected in zip((a, b), interleaved, strict=True):
        model.zero_grad()
        loss_of(model).backward()
        assert_equal_gradients(gradients(model), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are the GPU's")
def test_two_models_on_two_streams():
    """Their kernels overlap, so scratch that both used would show in the gradients."""
    models = [transformer("cuda", pre_layer_norm=pre, hidden_size=256) for pre in (True, False)]
    expected = []
    for model in models:
        loss_of(model).backward()
        expected.append(gradients(model))
        model.zero_grad()
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    for _ in range(5):
        for model, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                model.zero_grad()
                torch.cuda._sleep(1_000_000)
                loss_of(model).backward()
    torch.cuda.synchronize()
    for model, values in zip(models, expected, strict=True):
        for name, value in gradients(model).items():
            assert torch.equal(value, values[name]), name


@pytest.mark.parametrize("device", devices())
def test_gradient_of_the_kv_chain_is_not_copied(device):
    """Layers of one chain write their slices of one buffer; a gradient from elsewhere is added, not overwritten."""
    layers = [LSTransformerDecoderLayer(embed_dim=16, num_heads=4, dropout=0.0).eval().to(device) for _ in range(3)]
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device(device))
    x, memory = torch.randn(6, 16, device=device), torch.randn(6, 16, device=device, requires_grad=True)

    def run(use_kv_elsewhere):
        rows, kv = x, cross_kv(memory, packing, layers)
        kv.retain_grad()
        first, buffers = kv, []
        for i, layer in enumerate(layers):
            rows, kv = layer.forward_packed(rows, packing, kv, packing, i)
            if i < 2:
                kv.register_hook(lambda gradient: buffers.append(gradient.data_ptr()))
        loss = rows.tanh().sum()
        if use_kv_elsewhere:
            loss = loss + kv.sum() + 2 * first.sum()
        loss.backward()
        return first.grad, buffers

    gradient, buffers = run(False)
    assert len(buffers) == 2
    assert len(set(buffers)) == 1
    torch.testing.assert_close(run(True)[0], gradient + 3)


def test_keys_and_values_in_branches():
    """One slice used twice, keys and values handed to two branches: their gradients add up."""
    layers = [LSTransformerDecoderLayer(embed_dim=16, num_heads=4, dropout=0.0).eval() for _ in range(2)]
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    x, memory = torch.randn(6, 16), torch.randn(6, 16)
    kv = cross_kv(memory, packing, layers).detach().requires_grad_()

    def run(first, second, third):
        rows, handed_on = layers[0].forward_packed(x, packing, first, packing, 0)
        one = first is second is third
        a, _ = layers[1].forward_packed(rows, packing, handed_on if one else second, packing, 1)
        b, _ = layers[0].forward_packed(rows, packing, handed_on if one else third, packing, 0)
        (a.tanh() + b.tanh()).sum().backward()

    run(kv, kv, kv)
    copies = [kv.detach().requires_grad_() for _ in range(3)]
    run(*copies)
    torch.testing.assert_close(kv.grad, sum(copy.grad for copy in copies))


def test_gradient_of_keys_and_values_changed_by_a_hook():
    """A hook that adds to the buffer in place is not overwritten by the layers before it."""
    layers = [LSTransformerDecoderLayer(embed_dim=16, num_heads=4, dropout=0.0).eval() for _ in range(2)]
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    x, memory = torch.randn(6, 16), torch.randn(6, 16)
    kv = cross_kv(memory, packing, layers).detach().requires_grad_()

    def run(*hooks):
        kv.grad = None
        rows, handed_on = layers[0].forward_packed(x, packing, kv, packing, 0)
        for hook in hooks:
            handed_on.register_hook(hook)
        layers[1].forward_packed(rows, packing, handed_on, packing, 1)[0].tanh().sum().backward()
        return kv.grad

    expected = run() + 1

    def add_one(gradient):
        gradient.add_(1)

    torch.testing.assert_close(run(add_one), expected)


def test_only_the_keys_and_values_are_used():
    layer = LSTransformerDecoderLayer(embed_dim=16, num_heads=4)
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    kv = torch.randn(6, 32, requires_grad=True)
    layer.forward_packed(torch.randn(6, 16), packing, kv, packing)[1].sum().backward()
    assert torch.equal(kv.grad, torch.ones(6, 32))
    assert layer.fc1.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Parameters and inputs are cast; gradients come back in the parameters' type."""
    model = transformer().eval()
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    source, _, target = batch()
    with torch.autocast("cpu", dtype):
        logits = model(source, target)
    assert logits.dtype == dtype
    logits.float().tanh().sum().backward()
    total = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in gradients(model).items():
        assert value.dtype == torch.float32
        assert (value - expected[name]).norm() < 40 * torch.finfo(dtype).eps * total, name


def test_transforms_of_functions_are_refused_and_leave_nothing_behind():
    """torch.func needs what layers do not offer, and says so; a tensor that escaped from it is one like any other."""
    layer = LSTransformerEncoderLayer(embed_dim=16, num_heads=4)
    packing = Packing.from_lengths(torch.tensor([3, 2]), 3, torch.device("cpu"))
    x, escaped = torch.randn(5, 16), []
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda rows: layer.forward_packed(rows, packing, SEED).sum())(x)

    def escape(rows):
        escaped.append(rows * 1)
        return rows.sum()

    torch.func.grad(escape)(x)
    results = []
    for rows in (x, escaped[0]):
        layer.zero_grad()
        y = layer.forward_packed(rows, packing, SEED)
        y.tanh().sum().backward()
        results.append({"y": y.detach(), **gradients(layer)})
    assert_equal_gradients(results[1], results[0])

"""Encoder and decoder layers against plain PyTorch, with and without dropout, at every type."""

import pytest
import torch
import torch.nn.functional as F

from ls_train import rng
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing
from ls_train.testing import device_types, devices
from tests.layers.comparison import assert_matches
from tests.layers.plain import ACTIVATIONS, plain_layer

OFFSET = 24


def packings(device):
    """Return packings of a target and a source; one target and one source sentence are empty."""
    target = Packing.from_lengths(torch.tensor([3, 5, 0, 1, 2]), 5, torch.device(device))
    source = Packing.from_lengths(torch.tensor([4, 0, 2, 7, 1]), 7, torch.device(device))
    return target, source


def build(kind, device, dtype, **settings):
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    layer = kind(embed_dim=12, num_heads=3, ffn_dim=20, **{**rates, **settings}).to(device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def compare(layer, x, memory, seed, target, source):
    """Compare outputs and all gradients of ``layer`` with those of the plain layer."""
    names = [name for name, _ in layer.named_parameters()]
    inputs = [x] if memory is None else [x, memory]

    def ours(*tensors):
        activations, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        return torch.func.functional_call(Run(layer), prefixed(names, parameters), (activations, target, source, seed))

    def theirs(*tensors):
        activations, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        named = dict(zip(names, parameters, strict=True))
        extra = () if memory is None else (activations[1], source)
        return plain_layer(layer, named, activations[0], target, seed, OFFSET, *extra)

    labels = ["x", "memory"][: len(inputs)] + names
    assert_matches(ours, theirs, [*inputs, *layer.parameters()], labels)


def clear_the_kink(layer, x, memory, seed, target, source):
    """Shift fc1's biases so that relu's inputs, in float64, leave a gap around zero.

    An input within a rounding error of zero opens its gate at one type and not at another, and each such row moves the
    gradients by a whole row's share: the error of native torch, which the comparison allows twice, is then a matter of
    chance and of the machine's matrix instructions. The gap is the widest that leaves each unit two or more rows on
    either side, so every unit still has open and closed gates.
    """
    seen = []
    named = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    extra = () if memory is None else (memory.double(), source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACTIVATIONS, "relu", lambda inner: seen.append(inner) or F.relu(inner))
        plain_layer(layer, named, x.double(), target, seed, OFFSET, *extra)
    inner = seen[0].sort(0).values
    gap, at = inner.diff(dim=0)[1:-1].max(0)
    with torch.no_grad():
        layer.fc1.bias -= inner[1:].gather(0, at[None])[0] + gap / 2
    eps = torch.finfo(x.dtype).eps
    assert float(gap.min()) / 2 > 4 * eps, "the seed no longer keeps relu's inputs several rounding errors from zero"


def prefixed(names, parameters):
    return {f"layer.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}


class Run(torch.nn.Module):
    """Calls a layer's packed forward, so that ``functional_call`` can exchange its parameters."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, activations, target, source, seed):
        if len(activations) == 1:
            y = self.layer.forward_packed(activations[0], target, seed=seed, rng_offset=OFFSET)
            return y if isinstance(y, torch.Tensor) else y[0]
        kv = cross_kv(activations[1], source, [self.layer])
        return self.layer.forward_packed(activations[0], target, kv, source, 0, seed, OFFSET)[0]


@pytest.mark.parametrize("device, dtype", device_types())
@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("kind", [LSTransformerEncoderLayer, LSTransformerDecoderLayer])
@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.3, 0.2, 0.4), (0.0, 0.2, 0.0)], ids=["plain", "dropout", "attn"])
def test_matches_plain_layer(kind, normalize_before, rates, device, dtype):
    dropout, attention_dropout, activation_dropout = rates
    layer = build(
        kind,
        device,
        dtype,
        normalize_before=normalize_before,
        dropout=dropout,
        attention_dropout=attention_dropout,
        activation_dropout=activation_dropout,
    )
    target, source = packings(device)
    x = torch.randn(11, 12, device=device, dtype=dtype)
    memory = torch.randn(14, 12, device=device, dtype=dtype) if kind is LSTransformerDecoderLayer else None
    seed = torch.tensor([77], device=device) if any(rates) else None
    clear_the_kink(layer, x, memory, seed, target, source)
    compare(layer, x, memory, seed, target, source)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "swish"])
@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
def test_activations(activation, normalize_before):
    layer = build(
        LSTransformerEncoderLayer,
        "cpu",
        torch.float32,
        activation=activation,
        normalize_before=normalize_before,
        activation_dropout=0.3,
    )
    target, source = packings("cpu")
    compare(layer, torch.randn(11, 12), None, torch.tensor([5]), target, source)


@pytest.mark.parametrize("size, heads", [(15, 3), (14, 7), (7, 1)])
def test_any_size_that_is_a_multiple_of_the_heads(size, heads):
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    layer = LSTransformerDecoderLayer(embed_dim=size, num_heads=heads, ffn_dim=11, **rates)
    target, source = packings("cpu")
    compare(layer, torch.randn(11, size), torch.randn(14, size), torch.tensor([5]), target, source)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_head_dims(head_dim, device):
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    layer = LSTransformerDecoderLayer(embed_dim=2 * head_dim, num_heads=2, ffn_dim=24, **rates).to(device)
    target, source = packings(device)
    x, memory = (torch.randn(rows, 2 * head_dim, device=device) for rows in (11, 14))
    compare(layer, x, memory, torch.tensor([5], device=device), target, source)


@pytest.mark.parametrize("device", devices())
def test_long_sequences(device):
    """On the CPU, which has one path for all lengths, with fewer of the squares that the reference holds."""
    length = 4096 if device == "cuda" else 1025
    layer = build(LSTransformerDecoderLayer, device, torch.float32)
    target, source = (Packing.from_lengths(torch.tensor([n]), n, torch.device(device)) for n in (length, 61))
    x, memory = (torch.randn(packing.max_length, 12, device=device) for packing in (target, source))
    compare(layer, x, memory, None, target, source)


def test_decoder_only_layer_is_causal():
    layer = build(LSTransformerDecoderLayer, "cpu", torch.float32, cross_attention=False, dropout=0.2)
    target, source = packings("cpu")
    compare(layer, torch.randn(11, 12), None, torch.tensor([5]), target, source)


def test_memory_of_another_size():
    layer = build(LSTransformerDecoderLayer, "cpu", torch.float32, memory_dim=7)
    target, source = packings("cpu")
    compare(layer, torch.randn(11, 12), torch.randn(14, 7), None, target, source)


@pytest.mark.parametrize("kind", [LSTransformerEncoderLayer, LSTransformerDecoderLayer])
@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
def test_gradcheck(kind, normalize_before):
    layer = build(kind, "cpu", torch.float64, normalize_before=normalize_before, activation="gelu", dropout=0.3)
    target, source = packings("cpu")
    activations = [torch.randn(11, 12, dtype=torch.float64, requires_grad=True)]
    if kind is LSTransformerDecoderLayer:
        activations.append(torch.randn(14, 12, dtype=torch.float64, requires_grad=True))
    names = [name for name, _ in layer.named_parameters()]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    seed = torch.tensor([9])

    def run(*tensors):
        count = len(activations)
        named = prefixed(names, tensors[count:])
        return torch.func.functional_call(Run(layer), named, (tensors[:count], target, source, seed))

    assert torch.autograd.gradcheck(run, (*activations, *parameters), fast_mode=True)


def test_padded_and_packed_calls_agree():
    layer = build(LSTransformerEncoderLayer, "cpu", torch.float32, dropout=0.3)
    seed = torch.tensor([3])
    mask = torch.tensor([[False, False, True], [True, False, False], [False, False, False]])
    x = torch.randn(3, 3, 12)
    packing = Packing.from_padding_mask(mask, 3, 3, x.device)
    padded = layer(x, mask, seed)
    torch.testing.assert_close(packing.pack(padded), layer.forward_packed(packing.pack(x), packing, seed))
    assert padded[mask].eq(0).all()


def test_dropout_follows_seed_offset_and_generator():
    layer = build(LSTransformerEncoderLayer, "cpu", torch.float32, dropout=0.3)
    x = torch.randn(2, 4, 12)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(first, layer(x))
    assert not torch.equal(first, second)
    packing = Packing.from_padding_mask(None, 2, 4, x.device)
    seed = rng.draw_seed("cpu")
    rows = packing.pack(x)
    a, b = (layer.forward_packed(rows, packing, seed, offset) for offset in (0, 8))
    assert not torch.equal(a, b)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("left", [True, False])
def test_dropout_does_not_depend_on_padding(left):
    layer = build(LSTransformerEncoderLayer, "cpu", torch.float32, dropout=0.3, attention_dropout=0.3)
    seed = torch.tensor([3])
    x = torch.randn(2, 4, 12)
    wide = torch.cat([torch.randn(2, 3, 12), x] if left else [x, torch.randn(2, 3, 12)], 1)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, slice(0, 3) if left else slice(4, 7)] = True
    torch.testing.assert_close(layer(wide, mask, seed)[~mask].view(2, 4, 12), layer(x, None, seed))


@pytest.mark.parametrize(
    "backend, lengths", [("eager", (4,)), pytest.param("aot_eager", (4, 5, 9), marks=pytest.mark.soak)]
)
def test_inside_torch_compile(backend, lengths):
    layer = build(LSTransformerEncoderLayer, "cpu", torch.float32, dropout=0.3)
    seed = torch.tensor([3])

    def run(x):
        return layer(torch.sin(x), None, seed).tanh()

    compiled = torch.compile(run, backend=backend)
    for length in lengths:
        inputs = [torch.randn(2, length, 12).requires_grad_()]
        inputs.append(inputs[0].detach().requires_grad_())
        outputs = [function(x) for function, x in zip((run, compiled), inputs, strict=True)]
        torch.testing.assert_close(*outputs)
        for y in outputs:
            y.sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)

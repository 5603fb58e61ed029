"""A layer as one operator of the compiled library does what the layer's Python code does, bit for bit."""

import pytest
import torch

from ls_train import _library
from ls_train.layers import decoder_layer, encoder_layer
from ls_train.layers.call import FIELDS, Call, forward_scratch
from ls_train.layers.compiled import parameter_groups
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import DecoderParameters, LSTransformerDecoderLayer, decoder_block
from ls_train.layers.encoder_layer import EncoderParameters, LSTransformerEncoderLayer, encoder_block
from ls_train.memory import Workspace, workspace
from ls_train.packing import Packing
from ls_train.params import FlatParameters
from ls_train.testing import gpus

SIZE = 64
needs_gpu = pytest.mark.skipif(not gpus(), reason="the operators exist only in the compiled library")


def gradients_of_three_layers(modules, flat, dtype, seed, times):
    """Return the outputs and gradients of an encoder layer and two decoder layers after ``times`` backwards."""
    encoder, *decoders = modules
    flat.zero_grad()
    device = flat.buffers[0].data.device
    target = Packing.from_lengths(torch.tensor([5, 33, 1]), 33, device)
    source = Packing.from_lengths(torch.tensor([20, 7, 40]), 40, device)
    torch.manual_seed(5)
    x, memory = (torch.randn(rows, SIZE).to(device, dtype).requires_grad_() for rows in (39, 67))
    for _ in range(times):
        encoded = encoder.forward_packed(memory, source, seed, 3)
        y, kv = x, cross_kv(encoded, source, decoders)
        for i, layer in enumerate(decoders):
            y, kv = layer.forward_packed(y, target, kv, source, i, seed, 8 * i)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(dtype))
    with torch.no_grad():
        assert torch.equal(encoder.forward_packed(memory, source, seed, 3), encoded)
    return [encoded, y, x.grad, memory.grad, *(parameter.grad.clone() for parameter in modules.parameters())]


@needs_gpu
@pytest.mark.parametrize("direct_grads", [False, True], ids=["fresh", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
def test_same_bits_as_the_python_code(normalize_before, activation, rate, dtype, direct_grads, monkeypatch):
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), rate)
    arguments = {"embed_dim": SIZE, "num_heads": 4, "normalize_before": normalize_before, "activation": activation}
    torch.manual_seed(4)
    layers = [kind(**arguments, **rates) for kind in (LSTransformerEncoderLayer, *[LSTransformerDecoderLayer] * 2)]
    modules = torch.nn.ModuleList(layers).to(gpus()[0], dtype)
    flat = FlatParameters(modules.named_parameters())
    flat.direct_grads = direct_grads
    seed = torch.tensor([7], device=gpus()[0])
    for times in (1, 2):
        results = []
        for find in (_library.compiled, lambda name, like: None):
            monkeypatch.setattr("ls_train.layers.compiled.compiled", find)
            results.append(gradients_of_three_layers(modules, flat, dtype, seed, times))
        for compiled, python in zip(*results, strict=True):
            assert compiled.abs().sum() > 0
            assert torch.equal(compiled, python)


@needs_gpu
def test_one_operator_call_a_pass(monkeypatch):
    """With flat parameters the operators are used; without, q, k and v lie apart and the Python code serves."""
    layer = LSTransformerEncoderLayer(embed_dim=SIZE, num_heads=4).to(gpus()[0])
    packing = Packing.from_lengths(torch.tensor([5]), 5, torch.device(gpus()[0]))
    x = torch.randn(5, SIZE, device=gpus()[0])
    names = []
    monkeypatch.setattr(
        "ls_train.layers.compiled.compiled",
        lambda name, like: lambda *arguments: names.append(name) or _library.compiled(name, like)(*arguments),
    )
    layer.forward_packed(x, packing).sum().backward()
    assert names == []
    flat = FlatParameters(layer.named_parameters())
    assert flat.intact()
    layer.forward_packed(x, packing).sum().backward()
    assert names == ["layer_fwd", "layer_bwd"]


@needs_gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda x: x.half()}, "qkv_weight has dtype"),
        ({"y": lambda y: y[:-1]}, "argument y has shape"),
        ({"scratch": lambda s: s[:100]}, "argument scratch of 400 bytes"),
        ({"block": lambda b: b[:100]}, "argument block of 400 bytes"),
        ({"parameters": lambda p: p[:-1]}, "argument parameters has 11 tensors"),
        ({"parameters": lambda p: [p[2], *p[1:]]}, r"qkv_weight has shape \(64, 64\); it needs \(A = 192, C = 64\)"),
        ({"parameters": lambda p: [p[0], p[3], *p[2:]]}, r"qkv_bias has shape \(64,\); it needs \(A = 192\)"),
        ({"heads": lambda h: 7}, "argument heads = 7 must divide"),
        ({"seed": lambda s: None}, "argument seed is missing"),
        ({"cu": lambda cu: cu.long()}, "argument cu has dtype int64"),
        ({"fields": lambda f: f[:-1]}, "argument fields has 15 numbers"),
        ({"fields": lambda f: [1 << 40, *f[1:]]}, "argument block of"),
        ({"activation": lambda a: "tanh"}, "argument activation = 'tanh' is unknown"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    """Whatever does not fit is an error before anything is launched."""
    layer = LSTransformerEncoderLayer(embed_dim=SIZE, num_heads=4).to(gpus()[0])
    parameters = [layer.self_attn.q_proj.weight.repeat(3, 1), layer.self_attn.q_proj.bias.repeat(3)]
    for module in (layer.self_attn.out_proj, layer.self_attn_layer_norm, layer.fc1, layer.fc2, layer.final_layer_norm):
        parameters += [module.weight, module.bias]
    layout = encoder_block(5, SIZE, 4 * SIZE, 4, False, torch.float32)
    x = torch.randn(5, SIZE, device=gpus()[0])
    packing = Packing.from_lengths(torch.tensor([5]), 5, x.device)
    arguments = {
        "y": torch.empty_like(x),
        "block": layout.allocate(x),
        "scratch": x.new_empty(forward_scratch(5, SIZE, 4 * SIZE, 4) // 4),
        "x": x,
        "kv": None,
        "parameters": [parameter.detach() for parameter in parameters],
        "cu": packing.cu_seqlens,
        "rows": packing.rows,
        "seed": torch.tensor([1], device=x.device),
        "memory_cu": None,
        "heads": 4,
        "max_length": 5,
        "memory_max_length": 0,
        "layer": 0,
        "offset": 0,
        "normalize_before": False,
        "causal": False,
        "eps": 1e-5,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "activation": "relu",
        "fields": layout.begins(FIELDS),
    }
    torch.ops.ls_train.layer_fwd(**arguments)
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ls_train.layer_fwd(**arguments)


def test_operators_are_not_called_without_a_compiled_library():
    assert _library.compiled("layer_fwd", torch.empty(1)) is None
    assert _library.compiled("layer_fwd", torch.empty(1, device="meta")) is None


@pytest.mark.parametrize("name", ["layer_fwd", "layer_bwd"])
def test_operators_take_a_call_in_its_order(name):
    arguments = [argument.name for argument in getattr(torch.ops.ls_train, name).default._schema.arguments]
    first = arguments.index("parameters") + 1
    assert tuple(arguments[first : first + len(Call._fields) + 1]) == (*Call._fields, "fields")


@pytest.mark.parametrize("parameters", [EncoderParameters, DecoderParameters])
def test_groups_hold_every_parameter_once_and_in_order(parameters):
    groups = parameter_groups(parameters._fields)
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(parameters._fields)
    assert [group[0] for group in groups[2:]] == [
        name for name in parameters._fields if name[:2] not in ("q_", "k_", "v_")
    ]


@pytest.mark.parametrize("layout", [encoder_block, decoder_block])
@pytest.mark.parametrize("normalize_before", [True, False])
def test_places_of_saved_tensors(layout, normalize_before):
    """The operators cut the block where the Python code does."""
    block = layout(7, 24, 40, 4, normalize_before, torch.bfloat16)
    memory = block.allocate(torch.empty(0, dtype=torch.bfloat16))
    views = vars(block.views(memory))
    assert set(views) <= set(FIELDS)
    for name, begin in zip(FIELDS, block.begins(FIELDS), strict=True):
        if name in views:
            assert views[name].data_ptr() - memory.data_ptr() == begin, name
        else:
            assert begin == -1


@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize(("rows", "size", "ffn_dim"), [(65, 1, 1), (65, 2, 1), (3, 8, 2), (129, 4, 64), (1, 16, 16)])
def test_what_a_layer_reserves_is_what_it_takes(rows, size, ffn_dim, normalize_before, monkeypatch):
    """The operators cannot grow the scratch; the Python code takes the same tensors in the same order."""
    reserved = []
    take = Workspace.take

    def reserve(like, needed=0):
        reserved.append(needed)
        return workspace(like, needed)

    def checked(self, shape, dtype):
        tensor = take(self, shape, dtype)
        assert self._used <= reserved[-1], (shape, dtype)
        return tensor

    for module in (encoder_layer, decoder_layer):
        monkeypatch.setattr(module, "workspace", reserve)
    arguments = {"embed_dim": size, "num_heads": 1, "ffn_dim": ffn_dim, "normalize_before": normalize_before}
    encoder, decoder = (
        LSTransformerEncoderLayer(**arguments).bfloat16(),
        LSTransformerDecoderLayer(**arguments).bfloat16(),
    )
    packing = Packing.from_lengths(torch.tensor([rows]), rows, torch.device("cpu"))
    x = torch.randn(rows, size, dtype=torch.bfloat16, requires_grad=True)
    kv = cross_kv(encoder.forward_packed(x, packing), packing, [decoder]).detach().requires_grad_()
    monkeypatch.setattr(Workspace, "take", checked)
    with torch.no_grad():
        encoder.forward_packed(x, packing)
    encoder.forward_packed(x, packing).sum().backward()
    decoder.forward_packed(x, packing, kv, packing)[0].sum().backward()
    assert len(reserved) == 6

"""Layer modules as modules: configuration, copies, state, initial values, and errors that say what to do."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import ls_train
from ls_train import (
    LSAdam,
    LSCrossEntropyLayer,
    LSTransformer,
    LSTransformerDecoderLayer,
    LSTransformerEmbeddingLayer,
    LSTransformerEncoderLayer,
)
from ls_train.layers.call import SITES
from ls_train.layers.cross_kv import cross_kv
from ls_train.packing import Packing
from tests.layers.comparison import gradients
from tests.layers.test_autograd import SEED, assert_equal_gradients, loss_of, transformer

LIGHTSEQ_FIELDS = {
    "max_batch_tokens": 4096,
    "max_seq_len": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "nhead": 4,
    "attn_prob_dropout_ratio": 0.1,
    "activation_dropout_ratio": 0.1,
    "hidden_dropout_ratio": 0.1,
    "pre_layer_norm": True,
    "fp16": False,
    "local_rank": 0,
    "activation_fn": "relu",
}


def test_lightseq_configurations():
    encoder = LSTransformerEncoderLayer(LSTransformerEncoderLayer.get_config(**LIGHTSEQ_FIELDS))
    assert encoder.normalize_before
    decoder = LSTransformerDecoderLayer(LSTransformerDecoderLayer.get_config(**LIGHTSEQ_FIELDS, nlayer=6))
    x = torch.randn(2, 300, 16)  # longer than the hint, more tokens than the hint
    decoder(encoder(x.repeat(10, 1, 1)), x.repeat(10, 1, 1))
    big = LSTransformerEncoderLayer.get_config(model="transformer-big", hidden_dropout_ratio=0.3)
    assert (big.hidden_size, big.intermediate_size, big.nhead, big.hidden_dropout_ratio) == (1024, 4096, 16, 0.3)
    assert LSTransformerEncoderLayer.get_config(model="bert-base").activation_fn == "gelu"
    embedding = LSTransformerEmbeddingLayer.get_config(
        vocab_size=40, embedding_dim=16, max_batch_tokens=9, max_seq_len=8, padding_idx=1, dropout=0.1, fp16=True
    )
    assert LSTransformerEmbeddingLayer(embedding).embed_tokens.weight.dtype == torch.float16
    LSCrossEntropyLayer(LSCrossEntropyLayer.get_config(max_batch_tokens=9, padding_idx=1, epsilon=0.1, fp16=False))
    model = LSTransformer.get_config(model="transformer-base", vocab_size=40, num_encoder_layer=1, num_decoder_layer=1)
    assert model.encoder.hidden_size == 512


def test_lightseq_adam():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = LSAdam([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.9))
    with pytest.raises(ValueError, match="amsgrad"):
        LSAdam([parameter], amsgrad=True)
    with pytest.raises(ValueError, match="max_grad_norm"):
        LSAdam([parameter], max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 18}, "hidden_size = 18 must be a multiple of nhead = 4"),
        ({"nhead": 0}, "nhead = 0"),
        ({"nhead": True}, "nhead = True must be a positive integer"),
        ({"intermediate_size": -1}, "intermediate_size = -1"),
        ({"hidden_dropout_ratio": None}, "hidden_dropout_ratio = None must be a number"),
        ({"hidden_dropout_ratio": 1.5}, "hidden_dropout_ratio = 1.5"),
        ({"attn_prob_dropout_ratio": -0.1}, "attn_prob_dropout_ratio = -0.1"),
        ({"activation_dropout_ratio": float("nan")}, "activation_dropout_ratio = nan"),
        ({"activation_fn": "tanh"}, "activation_fn = 'tanh' is unknown; use one of relu"),
        ({"hiden_size": 3}, "'hiden_size'; known are"),
        ({"model": "transformer-huge"}, "'transformer-huge' is unknown; use one of transformer-base"),
    ],
    ids=str,
)
def test_bad_configuration(change, message):
    with pytest.raises(ValueError, match=message):
        LSTransformerEncoderLayer.get_config(**{**LIGHTSEQ_FIELDS, **change})


@pytest.mark.parametrize("kind", [LSTransformerEncoderLayer, LSTransformerDecoderLayer])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "embed_dim = 16 must be a multiple of num_heads = 5"),
        ({"ffn_dim": 0}, "ffn_dim = 0"),
        ({"dropout": 2.0}, "dropout = 2.0"),
        ({"attention_dropout": -1.0}, "attention_dropout = -1.0"),
        ({"activation_dropout": 2.0}, "activation_dropout = 2.0"),
        ({"activation": "tanh"}, "activation = 'tanh'"),
        ({"eps": 0}, "eps = 0 must be a positive number"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_as_given(kind, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**{"embed_dim": 16, "num_heads": 4, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padding_idx": 9}, "padding_idx = 9 must be a token id, 0 to 8"),
        ({"padding_idx": None}, "padding_idx = None"),
        ({"num_encoder_layer": -1}, "num_encoder_layer = -1"),
        ({"num_decoder_layer": 1.5}, "num_decoder_layer = 1.5"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps = -1.0"),
        ({"encoder_layer": {"silly": 1}}, "encoder_layer has the unknown field 'silly'"),
    ],
    ids=str,
)
def test_bad_model_configuration(change, message):
    with pytest.raises(ValueError, match=message):
        LSTransformer.get_config(**{"vocab_size": 9, **change})


def test_padding_of_the_criterion_is_a_number():
    with pytest.raises(ValueError, match="padding_idx = None must be an integer"):
        LSCrossEntropyLayer(padding_idx=None)


def test_incomplete_configuration():
    with pytest.raises(ValueError, match="nhead"):
        LSTransformerEncoderLayer.get_config(hidden_size=8, intermediate_size=8)
    with pytest.raises(ValueError, match="embed_dim= and num_heads="):
        LSTransformerEncoderLayer(embed_dim=8)
    with pytest.raises(ValueError, match="source_vocab_size = 3"):
        LSTransformer.get_config(vocab_size=9, share_all_embeddings=True, source_vocab_size=3)


def test_configuration_changed_after_get_config_is_checked():
    config = LSTransformerEncoderLayer.get_config(**LIGHTSEQ_FIELDS)
    config.nhead = 5
    with pytest.raises(ValueError, match="nhead = 5"):
        LSTransformerEncoderLayer(config)


ENCODER_ORDER = ["q_proj", "k_proj", "v_proj", "out_proj", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"]


def test_initial_weights_and_biases():
    config = LSTransformerEncoderLayer.get_config(**LIGHTSEQ_FIELDS)
    source = LSTransformerEncoderLayer(config)
    order = [
        source.get_submodule(name if "norm" in name or name[:2] == "fc" else f"self_attn.{name}")
        for name in ENCODER_ORDER
    ]
    layer = LSTransformerEncoderLayer(config, [m.weight + 1 for m in order], [m.bias + 2 for m in order])
    for name, value in source.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value + (1 if name.endswith("weight") else 2))
    untouched = LSTransformerEncoderLayer(config, [None] * 8, [None] * 8)
    assert untouched.self_attn.out_proj.bias.eq(0).all()
    with pytest.raises(ValueError, match="initial_weights must have 8 entries, got 7"):
        LSTransformerEncoderLayer(config, [None] * 7)
    with pytest.raises(ValueError, match=r"initial_biases\[5\] must have shape \(24,\), got \(3,\)"):
        LSTransformerEncoderLayer(config, None, [None] * 5 + [torch.zeros(3), None, None])
    decoder = LSTransformerDecoderLayer(config, [None] * 5 + [torch.zeros(16, 16)] + [None] * 7)
    assert decoder.encoder_attn.q_proj.weight.eq(0).all()


def test_two_layers_from_one_config_train_separately():
    config = LSTransformerEncoderLayer.get_config(**LIGHTSEQ_FIELDS)
    layers = [LSTransformerEncoderLayer(config) for _ in range(2)]
    x = torch.randn(2, 5, 16)
    before = copy.deepcopy(layers[1].state_dict())
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    layers[0](layers[1](x)).sum().backward()
    assert all(parameter.grad is not None for layer in layers for parameter in layer.parameters())
    optimizer.step()
    for name, value in layers[1].state_dict().items():
        assert torch.equal(value, before[name])
    assert not torch.equal(layers[0].fc1.weight, layers[1].fc1.weight)
    assert layers[0].fc1.weight.data_ptr() != layers[1].fc1.weight.data_ptr()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state_dict"])
def test_copies(how):
    model = transformer()
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif how == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = transformer()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        twin.load_state_dict(model.state_dict(), strict=True)
    loss_of(twin).backward()
    assert_equal_gradients(gradients(twin), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert twin.decoder.output_projection.weight is twin.encoder.embed_tokens.weight


def test_half_and_back():
    model = transformer()
    layer = model.encoder.layers[0]
    with pytest.raises(TypeError, match="float16 but a parameter or second input is torch.float32"):
        layer(torch.randn(1, 2, 16, dtype=torch.float16))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        loss_of(model.to(dtype)).backward()
        assert model.encoder.layers[0].fc1.weight.grad.dtype == dtype
        model.zero_grad()


def test_bad_inputs():
    layer = LSTransformerEncoderLayer(embed_dim=16, num_heads=4)
    decoder = LSTransformerDecoderLayer(embed_dim=16, num_heads=4)
    x = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match=r"shape \(batch, length, 16\), got \(2, 3, 8\)"):
        layer(x[..., :8])
    with pytest.raises(ValueError, match=r"padding_mask must be bool of shape \(2, 3\)"):
        layer(x, torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="padding_mask must be bool"):
        layer(x, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="encoder_out is missing"):
        decoder(x)
    with pytest.raises(ValueError, match="encoder_out has batch 1, x has 2"):
        decoder(x, x[:1])
    packing = Packing.from_lengths(torch.tensor([3, 3]), 3, x.device)
    rows = x.view(6, 16)
    with pytest.raises(ValueError, match=r"packed x must have shape \(rows, 16\)"):
        layer.forward_packed(x, packing)
    with pytest.raises(ValueError, match="kv and memory are missing"):
        decoder.forward_packed(rows, packing)
    kv = cross_kv(rows, packing, [decoder])
    with pytest.raises(ValueError, match="has no slice for layer 1"):
        decoder.forward_packed(rows, packing, kv, packing, 1)
    with pytest.raises(ValueError, match="source has batch 1, target has 2"):
        transformer()(torch.tensor([[4]]), torch.tensor([[4], [5]]))


def test_dropout_sites_of_a_model_are_all_different(monkeypatch):
    model = transformer(num_encoder_layer=3, num_decoder_layer=3)
    offsets, seeds = [model.encoder.rng_offset, model.decoder.rng_offset], []
    for layer in (*model.encoder.layers, *model.decoder.layers):
        call = layer._call

        def record(packing, seed, rng_offset, *memory, call=call):
            offsets.append(rng_offset)
            seeds.append(seed)
            return call(packing, seed, rng_offset, *memory)

        monkeypatch.setattr(layer, "_call", record)
    loss_of(model)
    sites = {offset + site for offset in offsets for site in range(SITES)}
    assert len(sites) == len(offsets) * SITES == 8 * SITES
    assert all(seed is seeds[0] for seed in seeds)


def test_layerdrop():
    model = transformer(encoder_layerdrop=0.5, decoder_layerdrop=0.5, num_encoder_layer=6, num_decoder_layer=6)
    model.eval()
    assert torch.equal(loss_of(model), loss_of(model))
    model.train()
    losses = {float(loss_of(model).detach()) for _ in range(8)}
    assert len(losses) > 1
    loss_of(model).backward()
    alone = transformer(decoder_layerdrop=1.0)
    loss_of(alone, SEED).backward()
    assert alone.decoder.layers[0].fc1.weight.grad is None
    assert alone.decoder.embed_tokens.weight.grad is not None


def test_public_names_load_lazily():
    code = "import sys, ls_train; assert 'torch' not in sys.modules; assert 'LSTransformer' in dir(ls_train)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ls_train.__all__:
        assert getattr(ls_train, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LSTransformers'"):
        ls_train.LSTransformers  # noqa: B018

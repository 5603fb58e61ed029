"""Tensors of another dtype, on another device or not contiguous, given to every public layer."""

import pytest
import torch

from ls_train import (
    LSCrossEntropyLayer,
    LSTransformer,
    LSTransformerDecoderLayer,
    LSTransformerEmbeddingLayer,
    LSTransformerEncoderLayer,
)
from ls_train.layers.decoder_layer import cross_kv
from ls_train.packing import Packing

BATCH, LENGTH, SIZE, WORDS = 2, 3, 8, 11


def case(name):
    """Return a call, inputs that it takes, the one to spoil first, and a function that moves the parameters."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, SIZE)
    tokens = torch.randint(2, WORDS, (BATCH, LENGTH))
    packing = Packing.from_lengths(torch.tensor([3, 3]), LENGTH, x.device)
    encoder = LSTransformerEncoderLayer(embed_dim=SIZE, num_heads=2).eval()
    decoder = LSTransformerDecoderLayer(embed_dim=SIZE, num_heads=2).eval()
    if name == "encoder layer":
        return encoder, (x,), encoder.to
    if name == "packed encoder layer":
        return lambda x: encoder.forward_packed(x, packing), (x.view(-1, SIZE),), encoder.to
    if name == "decoder layer":
        return decoder, (x, x.clone()), decoder.to
    if name == "memory of the decoder layer":
        return lambda memory, x: decoder(x, memory), (x, x.clone()), decoder.to
    if name == "packed decoder layer":
        kv = cross_kv(x.view(-1, SIZE), packing, [decoder])
        return lambda x: decoder.forward_packed(x, packing, kv, packing), (x.view(-1, SIZE),), decoder.to
    if name == "loss":
        return lambda x: LSCrossEntropyLayer(epsilon=0.1)(x, tokens), (torch.randn(BATCH, LENGTH, WORDS),), None
    if name == "loss with a projection":
        table = torch.nn.Embedding(WORDS, SIZE)
        return lambda x: LSCrossEntropyLayer(epsilon=0.1)(x, tokens, table.weight), (x,), table.to
    if name == "embedding":
        config = LSTransformerEmbeddingLayer.get_config(vocab_size=WORDS, embedding_dim=SIZE, padding_idx=1)
        embedding = LSTransformerEmbeddingLayer(config).eval()
        return embedding, (tokens,), embedding.to
    config = LSTransformer.get_config(
        vocab_size=WORDS, hidden_size=SIZE, intermediate_size=16, nhead=2, num_encoder_layer=1, num_decoder_layer=1
    )
    model = LSTransformer(config).eval()
    call = model if name == "model" else lambda target, source: model(source, target)
    return call, (tokens, tokens.clone()), model.to


FLOATS = (
    *("encoder layer", "packed encoder layer", "decoder layer", "memory of the decoder layer", "packed decoder layer"),
    *("loss with a projection",),
)
TOKENS = ("embedding", "model", "model's target")


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [part for part in result if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("name", FLOATS)
def test_other_float_type(name):
    layer, (x, *rest), _ = case(name)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match=f"{dtype}|{torch.float32}"):
            layer(x.to(dtype), *rest)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_are_not_int64(name):
    layer, (tokens, *rest), _ = case(name)
    for dtype in (torch.int32, torch.float32):
        with pytest.raises((TypeError, ValueError), match="int64.*got torch"):
            layer(tokens.to(dtype), *rest)


@pytest.mark.parametrize("name", [*FLOATS, *TOKENS])
def test_other_device(name):
    """Parameters and inputs lie on two devices; the message names one of them."""
    layer, inputs, move = case(name)
    move("meta")
    with pytest.raises((ValueError, TypeError, RuntimeError), match="meta"):
        layer(*inputs)


@pytest.mark.parametrize("name", [*FLOATS, *TOKENS])
def test_not_contiguous(name):
    """They are taken and give the bits of the same values side by side."""
    layer, (x, *rest), _ = case(name)
    scattered = torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    assert not scattered.is_contiguous()
    for found, expected in zip(tensors(layer(scattered, *rest)), tensors(layer(x, *rest)), strict=True):
        assert torch.equal(found, expected)


def test_logits_that_are_not_contiguous():
    """A copy of them would be the largest tensor of a step, so they are refused."""
    layer, (x,), _ = case("loss")
    with pytest.raises(ValueError, match=r"argument logits has strides .* call .contiguous\(\) on it first"):
        layer(torch.stack([x, x], -1)[..., 0])

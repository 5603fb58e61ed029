"""Embedding layer: positions for any padding, learned tables, gradients, errors."""

import pytest
import torch
import torch.nn.functional as F

from ls_train import rng
from ls_train.layers.embedding import LSTransformerEmbeddingLayer, SinusoidalPositionalEmbedding
from ls_train.packing import Packing, TokenOrder
from ls_train.testing import devices

PAD = 1
TOKENS = torch.tensor(
    [
        [PAD, PAD, 4, 5, 6],
        [7, 8, 9, PAD, PAD],
        [PAD, 10, PAD, 11, 4],  # padding in the middle counts no position either
        [PAD] * 5,
        [4, 4, 4, 4, 4],
    ]
)
POSITIONS = torch.tensor([[1, 1, 2, 3, 4], [2, 3, 4, 1, 1], [1, 2, 1, 3, 4], [1] * 5, [2, 3, 4, 5, 6]])


def build(device="cpu", **settings):
    fields = {"vocab_size": 13, "embedding_dim": 8, "padding_idx": PAD, "max_seq_len": 6, "dropout": 0.0}
    return LSTransformerEmbeddingLayer(LSTransformerEmbeddingLayer.get_config(**{**fields, **settings})).to(device)


def plain(layer, tokens, positions):
    table = layer.embed_positions.table(6)
    x = F.embedding(tokens, layer.embed_tokens.weight, PAD) * layer.scale + F.embedding(positions, table, PAD)
    if layer.layernorm_embedding is not None:
        x = layer.layernorm_embedding(x)
    return x * tokens.ne(PAD)[:, :, None]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_matches_plain_embedding(learned, layer_norm, device):
    layer = build(device, learned_positions=learned, layer_norm=layer_norm)
    tokens, positions = TOKENS.to(device), POSITIONS.to(device)
    expected, actual = plain(layer, tokens, positions), layer(tokens)
    torch.testing.assert_close(actual, expected)
    assert layer.scale == pytest.approx(8**0.5)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * direction).sum(), list(layer.parameters()))
    for gradient, reference in zip(torch.autograd.grad((actual * direction).sum(), list(layer.parameters())), wanted):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layer_norm", [False, True])
def test_dropout_keeps_what_the_seed_says(layer_norm, device):
    layer = build(device, dropout=0.4, layer_norm=layer_norm)
    tokens, seed = TOKENS.to(device), torch.tensor([6], device=device)
    kept = layer(tokens, seed)[TOKENS.ne(PAD).to(device)]
    mask = rng.keep_mask(seed.cpu(), 0, *kept.shape, 0.4).to(device)
    layer.eval()
    torch.testing.assert_close(kept, layer(tokens)[TOKENS.ne(PAD).to(device)] * mask * rng.keep_scale(0.4))
    layer.train()
    assert not torch.equal(layer(tokens), layer(tokens))


@pytest.mark.parametrize("device", devices())
def test_gradient_twice_the_same_bits(device):
    layer = build(device, vocab_size=5, learned_positions=True, max_seq_len=400)
    tokens = torch.randint(2, 5, (8, 400), device=device)
    direction = torch.randn(8, 400, 8, device=device)
    first, second = (torch.autograd.grad((layer(tokens) * direction).sum(), list(layer.parameters())) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("learned", [False, True])
def test_a_given_order_spares_the_sort(learned, device, monkeypatch):
    """The same bits, without a sort of the tokens; positions of a learned table are sorted still."""
    layer = build(device, learned_positions=learned, dropout=0.3)
    packing = Packing.from_padding_mask(TOKENS.eq(PAD), *TOKENS.shape, torch.device(device))
    tokens, seed = packing.pack(TOKENS.to(device)), torch.tensor([6], device=device)
    expected = torch.autograd.grad(layer.forward_packed(tokens, packing, seed).sum(), list(layer.parameters()))
    order, sort, sorts = TokenOrder(*tokens.sort(stable=True)), torch.Tensor.sort, []
    monkeypatch.setattr(torch.Tensor, "sort", lambda ids, **options: sorts.append(ids) or sort(ids, **options))
    y = layer.forward_packed(tokens, packing, seed, order=order)
    for gradient, wanted in zip(torch.autograd.grad(y.sum(), list(layer.parameters())), expected, strict=True):
        assert torch.equal(gradient, wanted)
    assert len(sorts) == learned


def test_sinusoidal_table_is_not_saved_and_grows():
    layer = build(max_seq_len=3)
    assert list(layer.state_dict()) == ["embed_tokens.weight"]
    expected = SinusoidalPositionalEmbedding(40, 8, PAD).weights
    assert layer(torch.randint(2, 13, (1, 40))).isfinite().all()
    torch.testing.assert_close(layer.embed_positions.weights[: expected.shape[0]], expected)
    layer.load_state_dict({**layer.state_dict(), "embed_positions._float_tensor": torch.zeros(1)})


def test_without_positions_and_with_own_scale():
    layer = build(positions=False, scale=2.0)
    torch.testing.assert_close(layer(TOKENS[4:]), layer.embed_tokens.weight[TOKENS[4:]] * 2)


def test_initial_tables():
    table, positions = torch.randn(13, 8), torch.randn(8, 8)
    config = LSTransformerEmbeddingLayer.get_config(
        vocab_size=13, embedding_dim=8, max_seq_len=6, learned_positions=True
    )
    layer = LSTransformerEmbeddingLayer(config, table, positions)
    assert torch.equal(layer.embed_tokens.weight, table)
    assert torch.equal(layer.embed_positions.weight, positions)
    config.learned_positions = False
    with pytest.raises(ValueError, match="learned_positions=True"):
        LSTransformerEmbeddingLayer(config, table, positions)


def test_errors():
    layer = build(learned_positions=True)
    with pytest.raises(ValueError, match="7 tokens but there are 6 learned positions"):
        layer(torch.randint(2, 13, (1, 7)))
    with pytest.raises(IndexError, match="holds 13; ids must be between 0 and 12"):
        layer(torch.tensor([[4, 13]]))
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\)"):
        layer(torch.tensor([4]))
    with pytest.raises(ValueError, match="padding_idx = 13"):
        build(padding_idx=13)
    with pytest.raises(ValueError, match="dropout = 2"):
        build(dropout=2)
    with pytest.raises(ValueError, match="embedding_dim = 2"):
        build(embedding_dim=2)

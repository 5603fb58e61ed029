"""The optimiser under our own transformer: neighbours in the buffer, direct gradients, layers that an update drops."""

import copy

import pytest
import torch

from ls_train.layers.transformer import LSTransformer
from ls_train.ops.linear_cross_entropy import linear_cross_entropy
from ls_train.optim import FusedAdam
from ls_train.params import joined

VOCABULARY = 13


def build(**options) -> LSTransformer:
    torch.manual_seed(1)
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 16,
        "nhead": 2,
        "num_encoder_layer": 2,
        "num_decoder_layer": 2,
        "max_seq_len": 16,
        "share_all_embeddings": True,
        **options,
    }
    return LSTransformer(LSTransformer.get_config(**values))


def loss_of(model: LSTransformer, update: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(update)
    source, target = (torch.randint(2, VOCABULARY, (3, 6), generator=generator) for _ in range(2))
    source[1, :2], target[1, 4:] = 1, 1
    features, packing = model.features(source, target, torch.tensor([update]))
    labels = packing.pack(target.roll(1, 1))
    return linear_cross_entropy(features, model.decoder.output_projection.weight, labels, 0.1, 1).loss / 15


def train(model: LSTransformer, direct: bool, micro_batches: int = 1, **options) -> FusedAdam:
    optimizer = FusedAdam(model.parameters(), lr=1e-3, **options)
    optimizer.direct_grads = direct
    for update in range(4):
        optimizer.zero_grad()
        for part in range(micro_batches):
            loss_of(model, update * micro_batches + part).backward()
        optimizer.step(max_norm=1.0)
    return optimizer


def assert_same(ours: LSTransformer, theirs: LSTransformer) -> None:
    """Compare all parameters but those whose gradient is zero in exact arithmetic: Adam makes steps of its noise."""
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, a), b in pairs:
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def projections(model: LSTransformer, kind: str) -> list[list[torch.Tensor]]:
    groups = []
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        groups.append([getattr(getattr(layer.self_attn, f"{p}_proj"), kind) for p in "qkv"])
    cross = [layer.encoder_attn for layer in model.decoder.layers]
    groups.append([getattr(getattr(attention, f"{p}_proj"), kind) for attention in cross for p in "kv"])
    return groups


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_what_the_layers_multiply_together_is_joined(kind):
    model = build()
    optimizer = FusedAdam(model.parameters())
    assert all(joined(group) is not None for group in projections(model, kind))
    twin = copy.deepcopy(model)
    named = FusedAdam(twin.named_parameters())
    assert all(joined(group) is not None for group in projections(twin, kind))
    assert optimizer.buffers[0].data.numel() == named.buffers[0].data.numel()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_direct_gradients_equal_ordinary_ones(shared, micro_batches):
    ordinary, direct = build(share_all_embeddings=shared), build(share_all_embeddings=shared)
    train(ordinary, False, micro_batches)
    optimizer = train(direct, True, micro_batches)
    assert_same(direct, ordinary)
    storage = optimizer.buffers[0].grad.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == storage for p in direct.parameters())


def test_flattening_changes_no_update():
    flat, apart = build(), build()
    train(flat, False), train(apart, False, flatten=False)
    assert_same(flat, apart)


@pytest.mark.parametrize("direct", [False, True])
def test_dropped_layers_keep_weights_moments_and_count(direct):
    """LayerDrop: what took no part in an update is not decayed, not moved and not counted."""
    model = build(decoder_layerdrop=0.5)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.direct_grads = direct
    used = []
    for update in range(8):
        torch.manual_seed(update)
        optimizer.zero_grad()
        loss_of(model, update).backward()
        before = copy.deepcopy([layer.state_dict() for layer in model.decoder.layers])
        used.append([layer.fc1.weight.grad is not None for layer in model.decoder.layers])
        optimizer.step()
        for layer, old, was_used in zip(model.decoder.layers, before, used[-1], strict=True):
            assert torch.equal(layer.fc1.weight, old["fc1.weight"]) != was_used
    assert {True, False} <= {flag for flags in used for flag in flags}
    for index, layer in enumerate(model.decoder.layers):
        assert int(optimizer.state[layer.fc1.weight]["step"]) == sum(flags[index] for flags in used)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion_after_building_the_optimiser_gives_ordinary_gradients(dtype):
    model = build()
    optimizer = train(model, direct=True)
    model.to(dtype)
    optimizer.zero_grad()
    expected = copy.deepcopy(model)
    for each in (model, expected):
        loss_of(each, 0).backward()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert param.grad.dtype == dtype, name
        assert torch.equal(param.grad, other.grad), name
    weight = model.encoder.layers[0].fc1.weight
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)

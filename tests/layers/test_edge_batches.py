"""Batches at the edge: one sentence, one token, a sentence of padding only, no sentence at all."""

import dataclasses

import pytest
import torch

from ls_train.layers.criterion import LSCrossEntropyLayer
from ls_train.ops.bias_activation_dropout import ACTIVATIONS
from ls_train.testing import devices
from tests.layers.comparison import gradients
from tests.layers.fairseq_models import PAD
from tests.layers.test_autograd import transformer


def padded(rows, length):
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], dtype=torch.int64).view(len(rows), length)


BATCHES = {
    "one sentence": ([[5, 6, 7]], [[2, 8]]),
    "one token": ([[5]], [[2]]),
    "one target token": ([[5, 6, 7], [8, 9]], [[2], [2]]),
    "an empty source": ([[5, 6], []], [[2, 8], [2, 9, 10]]),
    "an empty target": ([[5, 6], [7]], [[], [2, 9, 10]]),
    "both empty": ([[5, 6], []], [[2, 8], []]),
    "only padding": ([[], []], [[], []]),
    "no sentence": ([], []),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pre_layer_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("name", BATCHES)
def test_edge_batch(name, pre_layer_norm, device):
    model = transformer(device, pre_layer_norm=pre_layer_norm)
    source, target = (padded(rows, 3).to(device) for rows in BATCHES[name])
    logits = model(source, target)
    assert logits.shape == (*target.shape, 37)
    assert logits.isfinite().all()
    features, packing = model.features(source, target)
    weight = model.decoder.output_projection.weight
    loss, nll = LSCrossEntropyLayer()(features, packing.pack(target), weight)
    (loss + logits.sum()).backward()
    assert loss.isfinite()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), parameter_name
    if not features.numel():
        assert loss == nll == 0


@pytest.mark.parametrize("device", devices())
def test_decoding_from_an_empty_source(device):
    model = transformer(device).eval()
    source, target = (padded(rows, 3).to(device) for rows in BATCHES["an empty source"])
    with torch.no_grad():
        rows, packing = model.encoder.pack(source)
        state = model.decoder.start(2, model.encoder.forward_packed(rows, packing), packing)
        steps = [model.decoder.step(target[:, t : t + 1], state)[0] for t in range(2)]
        logits = model.decoder.output_layer(torch.cat(steps, 1))
        torch.testing.assert_close(logits, model(source, target)[:, :2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_decoding_uses_the_activation_of_training(activation):
    model = transformer(activation_fn=activation).eval()
    source, target = (padded(rows, 3) for rows in BATCHES["an empty source"])
    with torch.no_grad():
        rows, packing = model.encoder.pack(source)
        state = model.decoder.start(2, model.encoder.forward_packed(rows, packing), packing)
        logits = model.decoder.output_layer(model.decoder.step(target[:, :1], state)[0])
        torch.testing.assert_close(logits, model(source, target)[:, :1], atol=1e-5, rtol=1e-5)


def test_other_sentences_do_not_matter():
    """A sentence gives the same alone, beside others, and beside a sentence of padding only."""
    model = transformer().eval()
    source, target = padded([[5, 6, 7], [], [8]], 3), padded([[2, 8], [2], [2, 9, 9]], 3)
    with torch.no_grad():
        together = model(source, target)
        for b in (0, 2):
            torch.testing.assert_close(model(source[b : b + 1], target[b : b + 1])[0], together[b])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pre_layer_norm", [True, False], ids=["pre", "post"])
def test_rows_beyond_the_used_ones(pre_layer_norm, device):
    """A fixed row count, as a captured graph has it: unused rows hold anything finite and change nothing."""
    model = transformer(device, pre_layer_norm=pre_layer_norm)
    source, target = padded([[5, 6, 7], [8, 9]], 3).to(device), padded([[2, 8], [2, 9, 10]], 3).to(device)
    seed = torch.tensor([4], device=device)
    results = []
    for extra in (0, 3):
        tokens, sides = [], []
        for side, batch in ((model.encoder, source), (model.decoder, target)):
            rows, packing = side.pack(batch)
            tokens.append(torch.cat([rows, rows.new_full((extra,), 11)]))
            positions = torch.cat([packing.positions, packing.positions.new_full((extra,), 2)])
            sides.append(dataclasses.replace(packing, positions=positions))
        memory = model.encoder.forward_packed(tokens[0], sides[0], seed)
        features = model.decoder.forward_packed(tokens[1], sides[1], memory, sides[0], seed)
        used = int(sides[1].rows)
        assert features.shape[0] == used + extra
        assert features[used:].eq(0).all()
        model.zero_grad()
        features.tanh().sum().backward()
        results.append((features[:used], gradients(model)))
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], value, atol=1e-6, rtol=1e-5)

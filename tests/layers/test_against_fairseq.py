"""Layers and the whole model against fairseq's own modules with the same weights, dropout 0, float32."""

import pytest
import torch

pytest.importorskip("fairseq")

from tests.layers.comparison import gradient_errors, gradients
from tests.layers.fairseq_models import PAD, batch, fairseq_transformer, our_transformer

MODELS = {
    "untied": {},
    "tied": {"share_all_embeddings": True},
    "learned": {"share_decoder_input_output_embed": True, "encoder_learned_pos": True, "decoder_learned_pos": True},
    "gelu": {"activation_fn": "gelu", "layernorm_embedding": True},
}
NORMS = {"post": False, "pre": True}


def pair(model, norm):
    """Return fairseq's and our model with equal weights, each initialised by itself from one seed."""
    settings = {"encoder_normalize_before": NORMS[norm], "decoder_normalize_before": NORMS[norm], **MODELS[model]}
    models = []
    for build in (fairseq_transformer, our_transformer):
        torch.manual_seed(3)
        models.append(build(**settings))
    return models


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_names_shapes_and_initialisation(model, norm):
    theirs, ours = (built.state_dict() for built in pair(model, norm))
    assert list(theirs) == list(ours)
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_outputs_and_gradients(model, norm, left):
    theirs, ours = pair(model, norm)
    source, lengths, target = batch(left)
    real = target.ne(PAD)
    expected, actual = theirs(source, lengths, target)[0][real], ours(source, target)[real]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    errors = gradient_errors(gradients(ours), gradients(theirs))
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("norm", NORMS)
def test_weights_travel_both_ways(norm):
    theirs, ours = pair("tied", norm)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    source, lengths, target = batch()
    real = target.ne(PAD)
    torch.testing.assert_close(
        ours(source, target)[real], theirs(source, lengths, target)[0][real], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("norm", NORMS)
def test_incremental_decoding(norm):
    """Step by step, reordered and shrunk on the way, features and alignment equal fairseq's whole forward."""
    theirs, ours = (model.eval() for model in pair("learned", norm))
    source, lengths, target = batch()
    target = torch.where(target.eq(PAD), 7, target)
    order = torch.tensor([3, 1, 1, 0])
    with torch.no_grad():
        rows, packing = ours.encoder.pack(source)
        state = ours.decoder.start(5, ours.encoder.forward_packed(rows, packing), packing)
        features, weights = ours.decoder.step(target[:, :2], state, alignment_layer=1)
        parts, alignments = [features[order]], [weights[:, order]]
        state.reorder(order)
        for t in range(2, target.shape[1]):
            features, weights = ours.decoder.step(target[order, t : t + 1], state, alignment_layer=1)
            parts.append(features)
            alignments.append(weights)
        logits = ours.decoder.output_layer(torch.cat(parts, 1))
        encoder_out = theirs.encoder(source[order], lengths[order])
        expected, extra = theirs.decoder(target[order], encoder_out, alignment_layer=1)
        whole = ours(source[order], target[order])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(alignments, 2).mean(0), extra["attn"][0], atol=1e-5, rtol=1e-5)


def test_cache_outgrows_its_first_capacity():
    theirs, ours = (model.eval() for model in pair("untied", "pre"))
    source, lengths, _ = batch()
    target = torch.randint(4, 37, (5, 60))
    with torch.no_grad():
        rows, packing = ours.encoder.pack(source)
        state = ours.decoder.start(5, ours.encoder.forward_packed(rows, packing), packing)
        steps = [ours.decoder.step(target[:, t : t + 1], state)[0] for t in range(60)]
        expected = theirs(source, lengths, target)[0]
    torch.testing.assert_close(ours.decoder.output_layer(torch.cat(steps, 1)), expected, atol=1e-5, rtol=1e-5)


def test_sinusoidal_positions_reach_beyond_the_table():
    theirs, ours = pair("untied", "pre")
    source = torch.randint(4, 37, (2, 100))
    expected = theirs.encoder(source, torch.tensor([100, 100]))["encoder_out"][0].transpose(0, 1)
    torch.testing.assert_close(ours.encoder(source), expected, atol=1e-5, rtol=1e-5)

"""Batches packed on the host: equal to packing on the device, and unused rows change nothing."""

import numpy as np
import pytest
import torch

from fairseq_plugin.packed import StaticBatches, pack_batch, packed_features
from ls_train.graph import level
from ls_train.packing import Packing

PAD = 1


def sample(lengths, targets, seed=0):
    """A batch as fairseq collates it: source padded left, target right."""
    generator = torch.Generator().manual_seed(seed)

    def padded(sizes, left):
        tokens = torch.full((len(sizes), max(sizes)), PAD)
        for row, size in enumerate(sizes):
            words = torch.randint(4, 60, (size,), generator=generator)
            tokens[row, slice(max(sizes) - size, None) if left else slice(0, size)] = words
        return tokens

    inputs = {"src_tokens": padded(lengths, True), "src_lengths": torch.tensor(lengths)}
    target = padded(targets, False)
    previous = torch.where(target == PAD, PAD, torch.roll(target, 1, 1).clamp(min=2))
    return {"net_input": {**inputs, "prev_output_tokens": previous}, "target": target, "ntokens": sum(targets)}


@pytest.mark.parametrize("targets", [[4, 7, 1], [5, 5, 5]])
def test_equals_packing_on_the_device(targets):
    batch = sample([3, 9, 2], targets)
    packed = pack_batch(batch, PAD, torch.device("cpu"))
    for tokens, packing, padded in (
        (packed.source_tokens, packed.source, batch["net_input"]["src_tokens"]),
        (packed.tokens, packed.packing, batch["net_input"]["prev_output_tokens"]),
        (packed.target, packed.packing, batch["target"]),
    ):
        expected = Packing.from_padding_mask(padded == PAD, *padded.shape, padded.device)
        assert torch.equal(tokens, expected.pack(padded))
        for name in ("cu_seqlens", "positions"):
            assert torch.equal(getattr(packing, name), getattr(expected, name))
            assert getattr(packing, name).dtype == getattr(expected, name).dtype
        assert (packing.max_length, packing.batch, packing.length) == (expected.max_length, 3, padded.shape[1])
        assert torch.equal(packing.unpack(tokens), torch.where(padded == PAD, 0, padded))
    assert packed.counted == sum(targets)


def test_prefix_does_not_count():
    batch = sample([3, 9, 2], [4, 7, 1])
    packed = pack_batch(batch, PAD, torch.device("cpu"), prefix=2)
    assert packed.counted == 2 + 5
    assert torch.equal(packed.packing.unpack(packed.target)[:, :2] > PAD, torch.zeros(3, 2, dtype=torch.bool))


def test_language_model_has_no_source():
    batch = sample([3], [4])
    batch["net_input"] = {"src_tokens": batch["target"], "src_lengths": torch.tensor([4])}
    packed = pack_batch(batch, PAD, torch.device("cpu"))
    assert packed.source is None
    assert torch.equal(packed.tokens, batch["target"][0])


def test_unknown_input_is_named():
    batch = sample([3], [4])
    batch["net_input"]["lang_id"] = torch.tensor([0])
    with pytest.raises(ValueError, match=r"the batch has the inputs \['lang_id'\]"):
        pack_batch(batch, PAD, torch.device("cpu"))


def test_levels():
    counts = np.arange(1, 5000)
    levels = np.array([level(int(count), 3, 32) for count in counts])
    assert (levels >= counts).all()
    assert (np.diff(levels) >= 0).all()
    large = counts > 256
    assert (levels[large] <= counts[large] * 1.125 + 1).all()
    assert (levels[large] / counts[large]).mean() < 1.07
    assert len(set(levels)) < 45


@pytest.fixture
def model():
    from ls_train import LSTransformer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "nhead": 2, "num_encoder_layer": 2, "num_decoder_layer": 2}
    config = LSTransformer.get_config(vocab_size=60, padding_idx=PAD, max_seq_len=64, **sizes)
    model = LSTransformer(config)
    model.decoder.no_encoder_attn = False
    return model


def gradients(model, batch):
    from ls_train.ops import linear_cross_entropy

    model.zero_grad()
    features = packed_features(model, batch, torch.tensor([11]))
    rows = batch.packing.rows if batch.is_padded else None
    outputs = linear_cross_entropy(features, model.decoder.output_projection.weight, batch.target, 0.1, PAD, rows)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_unused_rows_change_nothing(model):
    """Loss and gradients, dropout on: masks depend on the row, not on the number of rows."""
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64))
    for seed, (lengths, targets) in enumerate([([3, 9, 20], [14, 7, 25]), ([21, 5, 6], [9, 19, 19])]):
        batch = sample(lengths, targets, seed)
        shape, padded, counted = batches.load(batch)
        assert shape == (32, 64, 17, 64, 64, 0, 17, 32, 32, 0) if seed == 0 else shape[0] == 32
        assert counted == sum(targets)
        assert padded.is_padded
        assert padded.packing.cu_seqlens.tolist()[3:] == [sum(targets)] * 14
        found, expected = gradients(model, padded), gradients(model, pack_batch(batch, PAD, torch.device("cpu")))
        torch.testing.assert_close(found[0].loss, expected[0].loss)
        assert found[1].keys() == expected[1].keys()
        scale = max(float(value.norm()) for value in expected[1].values())
        for name, value in expected[1].items():
            assert (found[1][name] - value).norm() < 1e-5 * scale, name


def test_batches_of_one_shape_share_memory(model):
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64))
    first = batches.load(sample([20, 9, 20], [20, 17, 25], 0))
    second = batches.load(sample([19, 8, 20], [21, 18, 25], 1))
    assert first[0] == second[0]
    assert first[1] is second[1]
    assert first[1].tokens.data_ptr() == second[1].tokens.data_ptr()


def test_positions_limit_the_level():
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (20, 30))
    _, batch, _ = batches.load(sample([25], [18]))
    assert (batch.packing.max_length, batch.source.max_length) == (20, 30)

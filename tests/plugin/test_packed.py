"""Batches packed on the host: equal to packing on the device, and unused rows change nothing."""

import numpy as np
import pytest
import torch

from fairseq_plugin.packed import Buckets, Plan, StaticBatches, pack_batch, packed_features
from ls_train.graph import CapturedCalls
from ls_train.packing import Packing
from tests.recorded_graphs import RecordedGraphs

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
    packed, counted = pack_batch(batch, PAD, torch.device("cpu"))
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
    for tokens, order in ((packed.tokens, packed.order), (packed.source_tokens, packed.source_order)):
        assert all(map(torch.equal, order, tokens.sort(stable=True)))
    assert counted == sum(targets)


@pytest.mark.parametrize("word", [60, 65535, 65536, 1 << 40])
def test_tokens_are_sorted_on_the_host(word):
    """Equal to the device's stable sort, whether or not ids fit into 16 bits."""
    batch = sample([30, 9, 2], [4, 70, 1])
    for padded in (batch["net_input"]["src_tokens"], batch["net_input"]["prev_output_tokens"]):
        padded[padded == 7] = word
        padded[0, -1] = word
    packed, _ = pack_batch(batch, PAD, torch.device("cpu"))
    assert packed.tokens.max() == packed.source_tokens.max() == word
    for tokens, order in ((packed.tokens, packed.order), (packed.source_tokens, packed.source_order)):
        assert all(map(torch.equal, order, tokens.sort(stable=True)))


def test_prefix_does_not_count():
    batch = sample([3, 9, 2], [4, 7, 1])
    packed, counted = pack_batch(batch, PAD, torch.device("cpu"), prefix=2)
    assert counted == 2 + 5
    assert torch.equal(packed.packing.unpack(packed.target)[:, :2] > PAD, torch.zeros(3, 2, dtype=torch.bool))


def test_language_model_has_no_source():
    batch = sample([3], [4])
    batch["net_input"] = {"src_tokens": batch["target"], "src_lengths": torch.tensor([4])}
    packed, _ = pack_batch(batch, PAD, torch.device("cpu"))
    assert packed.source is None
    assert packed.source_order is None
    assert packed.order.sorted_ids.tolist() == packed.tokens.sort().values.tolist()
    assert torch.equal(packed.tokens, batch["target"][0])


def test_unknown_input_is_named():
    batch = sample([3], [4])
    batch["net_input"]["lang_id"] = torch.tensor([0])
    with pytest.raises(ValueError, match=r"the batch has the inputs \['lang_id'\]"):
        pack_batch(batch, PAD, torch.device("cpu"))


def wmt_batches(max_tokens, count):
    """Lengths of ``count`` batches as fairseq makes them, of sentences as in WMT14 English-German."""
    rng = np.random.default_rng(1)
    source = np.exp(rng.normal(3.22, 0.62, 60000))
    target = (source * np.exp(rng.normal(0.02, 0.17, len(source)))).clip(3, 220).astype(int) + 1
    source = source.clip(3, 200).astype(int) + 1
    order = np.lexsort((target, source))
    longest = np.maximum(source, target)
    batches, start = [], 0
    while start < len(order):
        end, most = start, 0
        while end < len(order) and max(most, longest[order[end]]) * (end + 1 - start) <= max_tokens:
            most = max(most, longest[order[end]])
            end += 1
        if end - start > 8:
            end -= (end - start) % 8
        batches.append(order[start:end])
        start = end
    rng.shuffle(batches)
    return [(target[batch], source[batch]) for batch in batches[:count]]


@pytest.mark.parametrize("max_tokens", [512, 4096])
def test_few_shapes_serve_nearly_all_batches(max_tokens):
    """At most 8 % of the rows are unused, and after 200 updates 19 of 20 find a graph."""
    batches = wmt_batches(max_tokens, 500)
    buckets, calls = Buckets(max_tokens), CapturedCalls(RecordedGraphs())
    used = rounded = 0
    for update, (target, source) in enumerate(batches):
        rows = int(target.sum()), int(source.sum())
        shape = buckets.shape(*rows, int(max(target.max(), source.max())), len(target))
        assert all(here <= there for here, there in zip((*rows, 0, len(target)), shape))
        if update == 200:
            captured = calls.captures
        calls("update", shape, lambda: None)
        used, rounded = used + sum(rows), rounded + sum(shape[:2])
    assert used / rounded > 0.92
    assert calls.captures - captured <= 0.05 * (len(batches) - 200)
    assert calls.captures <= 64


def test_buckets_hold_any_batch():
    for max_tokens in (None, 100):
        shape = Buckets(max_tokens).shape(333, 0, 70, 300)
        assert shape[0] >= 333
        assert shape[1] == 0
        assert shape[2:] == (128, 512)


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
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64), 512)
    for seed, (lengths, targets) in enumerate([([3, 9, 20], [14, 7, 25]), ([21, 5, 6], [9, 19, 19])]):
        batch = sample(lengths, targets, seed)
        shape, padded, counted = batches.load(batch)
        assert shape == (64, 64, 32, 64)
        assert counted == sum(targets)
        assert padded.is_padded
        for tokens, order in ((padded.tokens, padded.order), (padded.source_tokens, padded.source_order)):
            assert all(map(torch.equal, order, tokens.sort(stable=True)))
        assert padded.packing.cu_seqlens.tolist()[3:] == [sum(targets)] * 62
        found, expected = gradients(model, padded), gradients(model, pack_batch(batch, PAD, torch.device("cpu"))[0])
        torch.testing.assert_close(found[0].loss, expected[0].loss)
        assert found[1].keys() == expected[1].keys()
        scale = max(float(value.norm()) for value in expected[1].values())
        for name, value in expected[1].items():
            assert (found[1][name] - value).norm() < 1e-5 * scale, name


def test_no_backward_sorts(model, monkeypatch):
    def sort(*_, **__):
        raise AssertionError("tokens are sorted on the device")

    batch = sample([3, 9, 20], [14, 7, 25])
    static = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64), 512).load(batch)[1]
    monkeypatch.setattr(torch.Tensor, "sort", sort)
    for given in (static, pack_batch(batch, PAD, torch.device("cpu"))[0]):
        assert gradients(model, given)[1]["encoder.embed_tokens.weight"].any()


def test_batches_of_one_shape_share_memory(model):
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64), 512)
    first = batches.load(sample([20, 9, 20], [20, 17, 25], 0))
    second = batches.load(sample([19, 8, 20], [21, 18, 25], 1))
    assert first[0] == second[0]
    assert first[1] is second[1]
    assert first[1].tokens.data_ptr() == second[1].tokens.data_ptr()


def test_positions_limit_the_level():
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (20, 30))
    _, batch, _ = batches.load(sample([25], [18]))
    assert (batch.packing.max_length, batch.source.max_length) == (20, 30)


def test_a_plan_travels_with_its_batch():
    batches = StaticBatches(torch.device("cpu"), PAD, 0, (64, 64), 512)
    batch = sample([20, 9], [20, 17])
    for plan in (Plan(1 << 40, 0.25, 1.0), Plan(7, 1 / 3, 0.0)):
        for packed in (pack_batch(batch, PAD, torch.device("cpu"), 0, plan)[0], batches.load(batch, plan)[1]):
            numbers = packed.seed.item(), packed.inverse.item(), packed.weight.item()
            assert numbers == (plan.seed, np.float32(plan.inverse), plan.weight)

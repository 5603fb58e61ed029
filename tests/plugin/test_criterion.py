"""The fused criteria against fairseq's: losses, gradients, logging outputs and metrics, on both of their paths."""

import copy
import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.distributed import ModuleProxyWrapper
from fairseq.logging import metrics
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from torch import nn

from ls_train.packing import Packing

PAD, VOCABULARY, WIDTH = 1, 29, 6
TASK = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))
PAIRS = {
    "label_smoothed": (LabelSmoothedCrossEntropyCriterion, "LSLabelSmoothedCrossEntropyCriterion"),
    "plain": (CrossEntropyCriterion, "LSCrossEntropyCriterion"),
}


@pytest.fixture(scope="module")
def plugin():
    return importlib.import_module("fairseq_plugin.criterion")


class Decoder(FairseqDecoder):
    def __init__(self) -> None:
        super().__init__(None)
        self.adaptive_softmax = None
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embedding(tokens) * 2)

    def forward(self, src_tokens, **_):
        return self.project(self.features(src_tokens)), {}


class Padded(FairseqLanguageModel):
    """A model as any of fairseq's: logits (B, T, V)."""


class PackedModel(Padded):
    """A model that offers packed features, with unused rows after the real ones."""

    supports_packed_features = True

    def forward(self, src_tokens, src_lengths=None, packed_features=False):
        assert packed_features
        packing = Packing.from_padding_mask(src_tokens.eq(PAD), *src_tokens.shape, src_tokens.device)
        return self.decoder.features(packing.pack(src_tokens)), packing, self.decoder.project.weight


class OwnSoftmax(Padded):
    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return super().get_normalized_probs((net_output[0] * 3, None), log_probs, sample)


def batch(left_pad: bool = False) -> dict:
    lengths = [7, 1, 5, 3]
    tokens = torch.full((4, 7), PAD)
    for row, length in enumerate(lengths):
        values = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))
        tokens[row, 7 - length :] = values if left_pad else tokens[row, 7 - length :]
        if not left_pad:
            tokens[row, :length] = values
    return {
        "target": torch.where(tokens.eq(PAD), PAD, (tokens * 5) % (VOCABULARY - 2) + 2),
        "net_input": {"src_tokens": tokens},
        "ntokens": sum(lengths),
        "nsentences": 4,
    }


def run(criterion, model, sample, reduce=True):
    model.zero_grad()
    loss, sample_size, log = criterion(model, sample, reduce=reduce)
    loss.sum().backward()
    return loss.detach(), sample_size, log, {name: p.grad.clone() for name, p in model.named_parameters()}


def build(plugin, kind, **options):
    theirs, name = PAIRS[kind]
    arguments = {"task": TASK, "sentence_avg": False, **options}
    if kind == "label_smoothed":
        arguments.setdefault("label_smoothing", 0.1)
    return theirs(**arguments), getattr(plugin, name)(**arguments)


def models(cls) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    reference = Padded(Decoder())
    model = cls(copy.deepcopy(reference.decoder))
    return reference, model


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


CONFIGURATIONS = [
    ("plain", {}),
    ("plain", {"sentence_avg": True}),
    ("label_smoothed", {}),
    ("label_smoothed", {"label_smoothing": 0.0}),
    ("label_smoothed", {"sentence_avg": True}),
    ("label_smoothed", {"report_accuracy": True}),
    ("label_smoothed", {"report_accuracy": True, "ignore_prefix_size": 2}),
]


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("cls", [Padded, PackedModel])
@pytest.mark.parametrize("kind, options", CONFIGURATIONS)
def test_values_gradients_and_logs_equal_fairseq(plugin, kind, options, cls, reduce):
    theirs, ours = build(plugin, kind, **options)
    reference, model = models(cls)
    expected = run(theirs, reference, batch(), reduce)
    actual = run(ours, model, batch(), reduce)
    assert actual[0].shape == expected[0].shape
    assert_same((actual[0], actual[3]), (expected[0], expected[3]))
    assert actual[1] == expected[1]
    assert actual[2].keys() == expected[2].keys()
    for key, value in expected[2].items():
        torch.testing.assert_close(torch.as_tensor(actual[2][key]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)
    if options.get("report_accuracy"):
        assert isinstance(actual[2]["n_correct"], torch.Tensor), "counts stay on the device"


@pytest.mark.parametrize("kind, options", CONFIGURATIONS[:5])
def test_what_the_host_knows_equals_what_a_forward_logs(plugin, kind, options):
    _, ours = build(plugin, kind, **options)
    log = run(ours, models(PackedModel)[1], batch())[2]
    counts = ours.host_counts(batch(), 16)
    assert counts == {name: log[name] for name in ("ntokens", "nsentences", "sample_size")}


def test_left_padded_target(plugin):
    theirs, ours = build(plugin, "label_smoothed")
    reference, model = models(PackedModel)
    expected, actual = run(theirs, reference, batch(True)), run(ours, model, batch(True))
    assert_same((actual[0], actual[3]), (expected[0], expected[3]))


def test_a_padding_target_inside_the_rows_does_not_count(plugin):
    theirs, ours = build(plugin, "label_smoothed", report_accuracy=True)
    sample = batch()
    sample["target"][0, 3] = PAD
    for cls in (Padded, PackedModel):
        reference, model = models(cls)
        expected, actual = run(theirs, reference, sample), run(ours, model, sample)
        assert_same((actual[0], actual[3]), (expected[0], expected[3]))
        assert int(actual[2]["total"]) == int(expected[2]["total"]) == 15


def test_accuracy_counts_right_predictions(plugin):
    theirs, ours = build(plugin, "label_smoothed", report_accuracy=True)
    reference, model = models(PackedModel)
    sample = batch()
    with torch.no_grad():
        predicted = reference(sample["net_input"]["src_tokens"])[0].argmax(-1)
    sample["target"] = torch.where(sample["target"].eq(PAD), PAD, predicted)
    sample["target"][0, 0] = (predicted[0, 0] + 1 - 2) % (VOCABULARY - 2) + 2
    expected, actual = run(theirs, reference, sample)[2], run(ours, model, sample)[2]
    assert int(actual["n_correct"]) == int(expected["n_correct"]) > 10


@pytest.mark.parametrize("kind", PAIRS)
def test_reduce_metrics_logs_the_same(plugin, kind):
    values = []
    for criterion in build(plugin, kind, **({"report_accuracy": True} if kind == "label_smoothed" else {})):
        reference, _ = models(Padded)
        logs = [run(criterion, reference, batch())[2] for _ in range(2)]
        with metrics.aggregate(new_root=True) as aggregator:
            type(criterion).reduce_metrics(logs)
        values.append(aggregator.get_smoothed_values())
        assert criterion.logging_outputs_can_be_summed()
    assert values[0] == values[1]
    assert {"loss", "ppl"} <= values[1].keys()


def test_packed_features_go_through_a_distributed_wrapper(plugin):
    _, ours = build(plugin, "label_smoothed")
    _, model = models(PackedModel)

    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return self.module(*args, **kwargs)

    inner = Wrapped(model)
    direct, wrapped = run(ours, model, batch()), run(ours, ModuleProxyWrapper(inner), batch())
    assert inner.calls == 1
    assert torch.equal(direct[0], wrapped[0])


def test_own_probabilities_are_left_to_fairseq_with_one_line(plugin, caplog):
    theirs, ours = build(plugin, "label_smoothed")
    _, model = models(OwnSoftmax)
    with caplog.at_level(logging.WARNING):
        actual = [run(ours, model, batch()) for _ in range(2)][-1]
    expected = run(theirs, model, batch())
    assert [record.message.count("OwnSoftmax") for record in caplog.records] == [1]
    assert_same((actual[0], actual[3]), (expected[0], expected[3]))


def test_the_plain_path_logs_nothing(plugin, caplog):
    _, ours = build(plugin, "label_smoothed")
    with caplog.at_level(logging.INFO):
        for cls in (Padded, PackedModel):
            run(ours, models(cls)[1], batch())
    assert not caplog.records


def test_loss_times_zero_and_evaluation(plugin):
    """A dummy batch multiplies the loss by zero; validation runs without gradients."""
    _, ours = build(plugin, "label_smoothed")
    for cls in (Padded, PackedModel):
        _, model = models(cls)
        loss, _, _ = ours(model, batch())
        (loss * 0).backward()
        assert all(not p.grad.any() for p in model.parameters())
        with torch.no_grad():
            again, _, log = ours(model, batch())
        assert not again.requires_grad
        torch.testing.assert_close(again, loss.detach())
        assert not log["loss"].requires_grad


@pytest.mark.parametrize("frozen", [None, "embedding", "project"])
@pytest.mark.parametrize("kind, options", CONFIGURATIONS)
def test_packed_backward_is_the_backward_of_the_loss(plugin, kind, options, frozen):
    """Twice: the second one's gradients are added. With a part frozen the other one gets the same gradients."""
    _, ours = build(plugin, kind, **options)
    sample, (_, model), (_, stepped) = batch(), models(PackedModel), models(PackedModel)
    loss, _, log = ours(model, sample)
    (loss * 4).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in stepped.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    for times in (1, 2):
        features, packing, weight = stepped(**sample["net_input"], packed_features=True)
        target = sample["target"].clone()
        target[:, : ours.loss_options.prefix] = PAD
        sums = ours.packed_backward(features, weight, packing.pack(target), torch.tensor([4.0]), packing.rows)
        assert list(sums)[0] == "loss"
        assert_same(sums.values(), [log[name] for name in sums])
        for name, parameter in stepped.named_parameters():
            if parameter.requires_grad:
                assert_same([parameter.grad], [expected[name] * times])
            else:
                assert parameter.grad is None


def test_class_names_are_fairseqs_after_the_prefix(plugin):
    """Resuming from and to fairseq's criteria matches class names this way."""
    for theirs, name in PAIRS.values():
        assert name == "LS" + theirs.__name__
        assert issubclass(getattr(plugin, name), theirs)

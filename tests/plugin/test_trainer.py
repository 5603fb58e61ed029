"""The plugin's training step in one process: against fairseq's, under overflow, and what it must not do."""

import logging

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq import tasks
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_plugin.errors import UserError
from fairseq_plugin.trainer import FairseqTrainer, LSTrainer

UPDATES = 20
PLAIN = {
    "--arch": ("ls_transformer_tiny", "transformer_tiny"),
    "--criterion": ("ls_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"),
    "--optimizer": ("ls_adam", "adam"),
}
"""Options of the plugin and what plain fairseq has for them."""


@pytest.fixture(autouse=True)
def precise_metrics(monkeypatch):
    """Fresh meters that do not round to three digits."""
    metrics.reset()
    rounded = metrics.log_scalar
    monkeypatch.setattr(
        metrics,
        "log_scalar",
        lambda key, value, weight=1, priority=10, round=None: rounded(key, value, weight, priority),
    )
    yield
    metrics.reset()


class Run:
    """A training in this process."""

    def __init__(self, kind, arguments):
        parser = fairseq_options.get_training_parser()
        args = fairseq_options.parse_args_and_arch(parser, [str(argument) for argument in arguments])
        self.cfg = convert_namespace_to_omegaconf(args)
        torch.manual_seed(self.cfg.common.seed)
        task = tasks.setup_task(self.cfg.task)
        task.load_dataset("train")
        model = task.build_model(self.cfg.model)
        self.trainer = kind(self.cfg, task, model, task.build_criterion(self.cfg.criterion))
        self.epoch = self.trainer.get_train_iterator(1, load_dataset=False)
        self.groups = iter(())

    def step(self):
        """Do one update as fairseq's loop does; return what train_step returned."""
        group = next(self.groups, None)
        if group is None:
            batches = self.epoch.next_epoch_itr(shuffle=False)
            self.groups = iterators.GroupedIterator(batches, self.cfg.optimization.update_freq[0])
            self.trainer.begin_epoch(self.epoch.epoch)
            group = next(self.groups)
        with metrics.aggregate("train_inner"):
            return self.trainer.train_step(group)

    def steps(self, count=UPDATES):
        return [self.step() for _ in range(count)]

    def state(self):
        """Model and optimizer as they would be saved."""
        self.trainer.consolidate_optimizer()
        state = self.trainer.state_dict()
        optimizer = state["last_optimizer_state"]
        tensors = {f"{key}.{name}": value for key, entry in optimizer["state"].items() for name, value in entry.items()}
        return {**state["model"], **{name: torch.as_tensor(value) for name, value in tensors.items()}}


@pytest.fixture
def start(train_arguments):
    def start(*extra, kind=LSTrainer, plain=False, gpu=False):
        fixed = ["--dropout", 0, "--log-interval", 1, "--seed", 3, *extra]
        arguments = [*train_arguments, *fixed]
        if gpu:
            arguments.remove("--cpu")
        if plain:
            twins = dict(pair for pair in PLAIN.values())
            twins["ls_cross_entropy"] = "cross_entropy"
            arguments = [twins.get(argument, argument) for argument in arguments]
        if "ls_cross_entropy" in extra:
            at = arguments.index("--label-smoothing")
            del arguments[at : at + 2]
        return Run(kind, arguments)

    return start


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_a_load_is_exact(whole, resumed, folder, before, after):
    """Save ``whole`` after some steps, load that into the running ``resumed``: both go on with the same bits."""
    whole.steps(before)
    path = str(folder / "checkpoint.pt")
    whole.trainer.consolidate_optimizer()
    whole.trainer.save_checkpoint(path, {"train_iterator": whole.epoch.state_dict()})
    resumed.steps(3)
    resumed.trainer.load_checkpoint(path)
    for run in (whole, resumed):
        run.groups = iter(())
        run.epoch = run.trainer.get_train_iterator(1, load_dataset=False)
        run.steps(after)
    assert_same_bits(resumed.state(), whole.state())


OPTIONS = {
    "defaults": [],
    "update-freq, clip": ["--update-freq", 3, "--clip-norm", 0.5, "--weight-decay", 1e-2],
    "sentence-avg, accuracy": ["--sentence-avg", "--report-accuracy", "--clip-norm", 1],
    "cross entropy": ["--criterion", "ls_cross_entropy"],
    "ignored prefix": ["--ignore-prefix-size", 1, "--report-accuracy"],
    "pre-norm, learned": ["--encoder-normalize-before", "--decoder-normalize-before", "--encoder-learned-pos"],
    "unscaled embedding, small batches": ["--no-scale-embedding", "--max-tokens", 100],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_losses_equal_fairseqs(start, options):
    """All numbers that are logged, over twenty updates; fairseq's side knows nothing of the plugin."""
    options = ["--max-tokens", 200, *options]
    ours, theirs = start(*options), start(*options, kind=FairseqTrainer, plain=True)
    theirs.trainer.get_model().load_state_dict(ours.trainer.get_model().state_dict())
    losses = []
    for _ in range(UPDATES):
        found, expected = ours.step(), theirs.step()
        assert found.keys() == expected.keys()
        numbers = [{name: float(value) for name, value in output.items()} for output in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-5)
        losses.append(numbers[1]["loss"])
    # A sum over the sentence, or one without its first tokens over a count with them, depends on the batch's lengths.
    assert losses[-1] < 0.95 * losses[0] or {"--sentence-avg", "--ignore-prefix-size"} & set(options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--bf16"], marks=pytest.mark.soak),
        ["--bf16", "--update-freq", 2, "--clip-norm", 0.5, "--max-tokens", 200],
    ],
)
def test_bf16_losses_are_near_fairseqs(start, options):
    ours, theirs = start(*options), start(*options, kind=FairseqTrainer, plain=True)
    theirs.trainer.get_model().load_state_dict(ours.trainer.get_model().state_dict())
    found, expected = ([float(output["loss"]) for output in run.steps()] for run in (ours, theirs))
    assert found == pytest.approx(expected, rel=2e-2)
    assert expected[-1] < expected[0] - 0.5


FP16 = ["--fp16", "--fp16-scale-window", 3, "--warmup-updates", 50, "--clip-norm", 1]


def flagged(run, count):
    """Do updates and return for each whether it was skipped."""
    return [output is None for output in run.steps(count)]


@pytest.mark.parametrize("form", ["--fp16", "--memory-efficient-fp16"])
def test_overflow_touches_nothing(start, caplog, form):
    """Update 3 meets an absurd loss scale: it changes no weight, moment, step or counter, and the log says so."""
    caplog.set_level(logging.INFO)
    run = start(form, *FP16[1:])
    run.steps(3)
    trainer = run.trainer
    before, rate = {name: value.clone() for name, value in run.state().items()}, trainer.get_lr()
    trainer.optimizer.scaler.loss_scale = 2.0**30
    trainer._scale.scale.fill_(2.0**30)
    assert run.step() is None
    assert trainer.get_num_updates() == 3
    assert trainer.get_lr() == rate
    assert_same_bits(run.state(), before)
    assert "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 536870912.0" in caplog.text


def test_overflows_as_fairseq(start, monkeypatch):
    """fairseq's step with the same parts skips the same updates, and ends with the same weights and scale."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # fairseq sends a norm there, also without a GPU
    options = [*FP16, "--memory-efficient-fp16", "--fp16-init-scale", 2**22, "--max-tokens", 200]
    ours, theirs = start(*options), start(*options, kind=FairseqTrainer)
    theirs.trainer.get_model().load_state_dict(ours.trainer.get_model().state_dict())
    skipped = flagged(ours, UPDATES)
    assert skipped == flagged(theirs, UPDATES)
    assert any(skipped[:3])
    assert any(skipped[6:])
    assert skipped.count(False) >= 5
    assert vars(ours.trainer.optimizer.scaler) == vars(theirs.trainer.optimizer.scaler)
    assert ours.trainer.get_num_updates() == theirs.trainer.get_num_updates()
    assert ours.trainer.get_lr() == theirs.trainer.get_lr()
    found, expected = ours.state(), theirs.state()
    assert found.keys() == expected.keys()
    for name in ("exp_avg", "exp_avg_sq", "weight", "bias"):
        keys = [key for key in expected if key.endswith(name)]
        one, other = (torch.cat([state[key].flatten().double() for key in keys]) for state in (found, expected))
        assert (one - other).norm() < 1e-3 * other.norm()


def test_late_reading_changes_nothing(start):
    """Whether every update is waited for or none, dropout, overflows and learning rates end in the same bits."""
    options = [*FP16, "--fp16-init-scale", 2**14, "--dropout", 0.2, "--attention-dropout", 0.1, "--max-tokens", 200]
    waiting, late = start(*options), start(*options, "--log-interval", 1000)
    skipped = flagged(waiting, 12)
    assert any(skipped[6:])
    assert skipped.count(False) >= 3
    late.steps(12)
    assert_same_bits(late.state(), waiting.state())
    assert late.trainer.get_num_updates() == waiting.trainer.get_num_updates()
    assert vars(late.trainer.optimizer.scaler) == vars(waiting.trainer.optimizer.scaler)


def test_statistics_come_one_step_later(start):
    """Without a boundary an update's log is that of the one before; what asks for the state gets exact values."""
    waiting, late = start(), start("--log-interval", 1000)
    expected = [output["loss"] for output in waiting.steps(5)]
    outputs = late.steps(5)
    # The first update is waited for, the second has nothing to report yet.
    assert [outputs[i].get("loss") for i in range(5)] == [expected[0], None, *expected[1:4]]
    with metrics.aggregate("flushed") as meters:
        late.state()
    assert meters["loss"].val == expected[4]
    assert late.trainer.get_num_updates() == 5


def test_end_of_epoch_is_waited_for(start):
    run = start("--log-interval", 1000, "--max-tokens", 2000, "--update-freq", 2)
    run.step()
    while run.epoch._cur_epoch_itr.has_next():
        run.step()
    assert run.trainer._pending is None
    assert run.trainer.get_num_updates() == -(-run.epoch._cur_epoch_itr.total // 2)


class DeviceReads(TorchDispatchMode):
    """Counts operators that would make the host wait for a GPU."""

    waiting = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique", "_unique2")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.waiting:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [[], ["--bf16", "--report-accuracy"], [*FP16, "--update-freq", 2, "--fp16-init-scale", 2**22]]
)
def test_no_device_reads(start, options, monkeypatch):
    """The operators' CPU references read flags as the kernels do; everything around them must read nothing."""
    run = start(*options, "--log-interval", 1000, "--dropout", 0.1)
    run.steps(2)
    with DeviceReads() as reads:
        run.steps(4)
    assert reads.found == []


def test_the_counter_counts(start):
    run = start(kind=FairseqTrainer)
    run.step()
    with DeviceReads() as reads:
        run.step()
    assert len(reads.found) > 3


def test_not_finite_ends_training(start, tmp_path):
    run = start("--save-dir", tmp_path)
    run.steps(2)
    with torch.no_grad():
        run.trainer.get_model().decoder.layers[0].fc1.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        run.step()
    assert (tmp_path / "crash.pt").exists()
    assert run.trainer.get_num_updates() == 2


def test_a_crash_that_cannot_be_saved_keeps_its_reason(start, tmp_path, caplog):
    run = start("--save-dir", tmp_path / "missing" / "folder")
    run.step()
    with torch.no_grad():
        run.trainer.get_model().decoder.layers[0].fc1.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        run.step()
    assert "the state that failed was not saved" in caplog.text


def test_minimum_loss_scale_ends_training(start, tmp_path):
    run = start(*FP16, "--min-loss-scale", 2**20, "--fp16-init-scale", 2**22, "--save-dir", tmp_path)
    with pytest.raises(FloatingPointError, match="Minimum loss scale reached"):
        run.steps(5)
    assert (tmp_path / "crash.pt").exists()


@pytest.mark.parametrize("aside", [[], ["--use-bmuf"]])
def test_an_epoch_without_an_update(start, aside):
    run = start("--skip-remainder-batch", "--max-tokens", 100_000, *aside)
    with pytest.raises(UserError, match="--skip-remainder-batch: leaves out the only batches of an epoch"):
        run.step()


ASIDE = {
    "--encoder-layerdrop 0.5": ["--encoder-layerdrop", 0.5],
    "--optimizer adam": ["--optimizer", "adam"],
    "--store-ema": ["--store-ema"],
    "criterion LabelSmoothedCrossEntropyCriterion": ["--criterion", "label_smoothed_cross_entropy"],
    "model TransformerModel": ["--arch", "transformer_tiny"],
    "fairseq's encoder (--activation-fn tanh), fairseq's decoder (--activation-fn tanh)": ["--activation-fn", "tanh"],
}


@pytest.mark.parametrize("reason", ASIDE)
def test_steps_aside(start, caplog, reason):
    """fairseq's step runs, and one line says why."""
    caplog.set_level(logging.INFO)
    run = start(*ASIDE[reason])
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("training step:")]
    assert line == f"training step: fairseq's own runs because of {reason}"
    run.steps(2)
    assert run.trainer.get_num_updates() == 2


def test_hooks_are_seen(start):
    run = start()
    run.trainer.get_model().encoder.layers[0].register_forward_hook(lambda *_: None)
    from fairseq_plugin.step_options import obstacles

    trainer = run.trainer
    assert obstacles(run.cfg, trainer.task, trainer.get_model(), trainer.get_criterion()) == ["hooks on modules"]


@pytest.mark.parametrize("precision", [[], ["--fp16"], ["--bf16"]])
@pytest.mark.parametrize(
    "arch", ["ls_transformer", "ls_transformer_iwslt_de_en", "ls_transformer_vaswani_wmt_en_de_big"]
)
def test_default_recipes_log_no_fallback(start, caplog, arch, precision):
    caplog.set_level(logging.INFO)
    small = [f"--{side}-{name}" for side in ("encoder", "decoder") for name in ("layers", "embed-dim", "ffn-embed-dim")]
    sizes = [value for name in small for value in (name, 1 if name.endswith("layers") else 32)]
    run = start("--arch", arch, *precision, *sizes)
    assert run.trainer.is_lean
    assert [r.getMessage() for r in caplog.records if "because of" in r.getMessage()] == []


def test_fairseqs_commands_build_it():
    import fairseq.trainer
    import fairseq_cli.train

    assert fairseq_cli.train.Trainer is fairseq.trainer.Trainer is LSTrainer

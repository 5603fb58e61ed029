"""Exact resume: a run that stops and is started again ends with the bits of a run that did not stop.

Every comparison covers the model, the optimizer's state with float32 masters, and all counters of the loss scaler.
"""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import ListDataset
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator

from fairseq_plugin import checkpoint_io, cli, export, resume
from fairseq_plugin.errors import UserError, report
from ls_train.compact_master import split_master
from tests.plugin.checkpoint_bits import assert_same_bits
from tests.plugin.test_trainer import precise_metrics, start  # noqa: F401

UPDATES = 9
STOP = 5  # within the first epoch


def arguments(train_arguments, *extra):
    return [
        *train_arguments,
        "--seed",
        5,
        "--dropout",
        0.2,
        "--attention-dropout",
        0.1,
        "--no-epoch-checkpoints",
        "--max-tokens",
        200,
        *extra,
    ]


# The scale starts so high that updates are skipped before and after the stop, and grows every 2 updates.
OVERFLOWING = ["--fp16-init-scale", 2**18, "--fp16-scale-window", 2, "--fp16-scale-tolerance", 0.25]
# EMA and fairseq's own Adam run under fairseq's training step, the others under the plugin's.
FORMS = {
    "fp32-ema": ["--update-freq", 2, "--clip-norm", 0.5, "--store-ema", "--ema-decay", 0.9, "--ema-update-freq", 4],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", *OVERFLOWING],
    "fp16-flat": ["--fp16", "--optimizer", "adam", *OVERFLOWING],
}


def on_cpu(main):
    """fairseq sends the norm of a skipped update to the GPU and asks for the current one to lay out flat masters."""

    def run():
        torch.cuda.current_device = lambda: None
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        from fairseq_plugin import guards

        guards.check_precision.__defaults__ = (True,)
        return main()

    return run


@pytest.mark.parametrize("form", FORMS)
def test_continued_equals_uninterrupted(form, run_cli, train_arguments, tmp_path):
    """A run that starts from the checkpoint of update 5, dropout on and within the epoch, ends as the whole one did."""
    command = arguments(train_arguments, *FORMS[form], "--max-update", UPDATES)
    whole, part = tmp_path / "whole", tmp_path / "part"
    log = run_cli(on_cpu(cli.train), *command, "--save-dir", whole, "--save-interval-updates", STOP).check().out
    part.mkdir()
    shutil.copy(whole / f"checkpoint_1_{STOP}.pt", part / "checkpoint_last.pt")
    again = run_cli(on_cpu(cli.train), *command, "--save-dir", part).check().out
    assert f"@ {STOP} updates)" in again
    assert_same_bits(whole / "checkpoint_last.pt", part / "checkpoint_last.pt")
    state = checkpoint_io.read(str(part / "checkpoint_last.pt"))["last_optimizer_state"]
    if "fp16" in form:
        assert log.count("gradient overflow detected") > again.count("gradient overflow detected") > 0
        assert set(state[resume.KEY]["scaler"]) == set(resume.SCALER_COUNTERS)
    if form != "fp32-ema":
        kind = torch.bfloat16 if form == "bf16" else torch.float16
        assert any(not torch.equal(master, master.to(kind).float()) for master in masters(state))
    if form == "fp16":
        check_export(whole / "checkpoint_last.pt", tmp_path / "exported.pt")


@pytest.mark.parametrize("skips", [False, True])
def test_batches_that_are_left_come_once_with_another_update_freq(skips):
    """And the epoch is at its end then, wherever in it the run was stopped."""
    for length, done, chunk in itertools.product(range(1, 8), range(7), range(1, 5)):
        if done >= length:
            continue
        batches = [[index] for index in range(length)]
        epoch = EpochBatchIterator(ListDataset(list(range(length))), lambda batch: batch[0], batches)
        state = {"version": 2, "epoch": 1, "iterations_in_epoch": done, "shuffle": False}
        epoch.load_state_dict(state)
        groups = GroupedIterator(epoch.next_epoch_itr(shuffle=False), chunk, skip_remainder_batch=skips)
        left = list(range(done, length // chunk * chunk if skips else length))
        if skips:
            left = left[: len(left) // chunk * chunk]
        assert [number for group in groups for number in group] == left
        assert epoch.end_of_epoch()
        assert groups.n == groups.total


def test_position_in_the_epoch_with_other_ranks():
    """The batches that all ranks had, in batches of each rank; a file of plain fairseq does not say how many had."""
    for saved, now, done, expected in ((1, 1, 7, 7), (1, 2, 7, 3), (2, 1, 7, 14), (8, 3, 4, 10), (None, 2, 7, 7)):
        extra = {"train_iterator": {"epoch": 2, "iterations_in_epoch": done}}
        if saved is not None:
            extra[resume.KEY] = {"ranks": saved}
        resume.restore_position(SimpleNamespace(data_parallel_world_size=now), extra)
        assert extra["train_iterator"] == {"epoch": 2, "iterations_in_epoch": expected}
    resume.restore_position(SimpleNamespace(data_parallel_world_size=2), {})


def test_state_of_another_schedule(start, tmp_path):  # noqa: F811
    path = str(tmp_path / "checkpoint.pt")
    before = start("--lr-scheduler", "fixed")
    before.step()
    before.trainer.consolidate_optimizer()
    before.trainer.save_checkpoint(path, {"train_iterator": before.epoch.state_dict()})
    after = start().trainer
    with pytest.raises(UserError, match="its --lr-scheduler was another one.* --reset-lr-scheduler"):
        after.load_checkpoint(path)
    after.load_checkpoint(path, reset_lr_scheduler=True)
    assert after.get_num_updates() == 1


def test_place_beyond_the_end_of_the_epoch(capsys):
    epoch = EpochBatchIterator(ListDataset([0, 1]), None, [[0], [1]])
    with pytest.raises(RuntimeError) as caught:
        epoch.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 3, "shuffle": False})
    assert report(caught.value) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the checkpoint's place in its epoch is beyond the end")


def masters(state):
    """Return the float32 masters in an optimizer's state, which fairseq's wrapper and the plugin's Adam place each."""
    return state[resume.KEY].get(resume.MASTERS) or [entry["master"] for entry in state["state"].values()]


def check_export(path, out):
    """Exported, the state of a run with ``--fp16`` is that of fairseq's FP16Optimizer: one flat entry."""
    assert export.main(["--to", "fairseq", str(path), str(out)]) == 0
    state = checkpoint_io.read(str(out))
    assert state["optimizer_history"][-1]["optimizer_name"] == "FP16Optimizer"
    (entry,) = state["last_optimizer_state"]["state"].values()
    saved = checkpoint_io.read(str(path))["last_optimizer_state"]
    assert entry["exp_avg"].dim() == 1
    assert entry["exp_avg"].numel() == sum(e["exp_avg"].numel() for e in saved["state"].values())
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["last_optimizer_state"]["loss_scale"] == saved["loss_scale"]


def test_run_counters(monkeypatch):
    """Early stopping, the plateau schedule, the EMA interval and AMP's retries survive; fairseq forgets them."""

    def trainer():
        parameter = torch.nn.Parameter(torch.zeros(1))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([parameter], lr=1.0))
        return SimpleNamespace(
            lr_scheduler=SimpleNamespace(lr_scheduler=plateau),
            cfg=SimpleNamespace(ema=SimpleNamespace(store_ema=True)),
            ema=SimpleNamespace(update_freq_counter=0),
            _amp_retries=0,
            data_parallel_world_size=1,
        )

    before, after = trainer(), trainer()
    before.lr_scheduler.lr_scheduler.num_bad_epochs = 4
    before.lr_scheduler.lr_scheduler.cooldown_counter = 3
    before.ema.update_freq_counter = 2
    before._amp_retries = 1
    stopped, fresh = SimpleNamespace(best=3.5, num_runs=2), SimpleNamespace()
    monkeypatch.setattr(resume, "_early_stopping", lambda: stopped)
    extras = resume.run_extras(before)
    monkeypatch.setattr(resume, "_early_stopping", lambda: fresh)
    resume.restore_run_extras(after, extras, reset_lr_scheduler=False)
    assert resume.run_extras(after) == extras
    assert vars(fresh) == vars(stopped)
    kept = trainer()
    resume.restore_run_extras(kept, extras, reset_lr_scheduler=True)
    assert kept.lr_scheduler.lr_scheduler.num_bad_epochs == 0


def test_masters_of_another_model_are_not_taken():
    """After averaging or editing, the model in the file wins over masters that do not round to it."""
    half = torch.tensor([1.0, 2.0], dtype=torch.float16)
    optimizer = SimpleNamespace(fp16_params=[half], fp32_params=[torch.nn.Parameter(half.float())], scaler=None)
    resume.restore_optimizer_extras(optimizer, {resume.MASTERS: [torch.tensor([1.0001, 2.5])]})
    assert optimizer.fp32_params[0].tolist() == pytest.approx([1.0001, 2.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compact", [False, True])
def test_masters_halfway_between_two_weights_are_taken(compact, dtype):
    """Whichever of the two the run before rounded to, with float32 masters or compact ones."""
    weights = torch.tensor([1.0, 1.5, 2.0, -1.0, -3.0]).to(dtype)
    above = torch.nextafter(weights, torch.full_like(weights, float("inf")))
    masters = (weights.float() + above.float()) / 2
    half = split_master(masters, dtype)[0] if compact else masters.to(dtype)
    optimizer = SimpleNamespace(fp16_params=[half], fp32_params=[torch.nn.Parameter(half.float())], scaler=None)
    resume.restore_optimizer_extras(optimizer, {resume.MASTERS: [masters]})
    assert torch.equal(optimizer.fp32_params[0], masters)

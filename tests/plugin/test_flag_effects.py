"""Flags that fairseq itself handles, under the plugin: each does what it is for, and the same as without the plugin."""

import json
import re
import shutil
import sys

import pytest
from fairseq import options, tasks
from fairseq.data import ListDataset, iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_plugin import checkpoint_io, cli
from tests.plugin.flag_data import FAIRSEQS, OURS, copy_split, train_words
from tests.plugin.test_bad_input import assert_refused
from tests.plugin.test_trainer_loop import without_gpu
from tests.plugin.training_log import losses, precise

PAD = 1
ORDER = "--update-ordered-indices-seed"


def batches(monkeypatch, data, *flags, split="train", task=(), epoch=1):
    """Return the batches of an epoch, as the command line's options make them."""
    monkeypatch.setattr(sys, "argv", ["command"])
    words = train_words(data, *OURS, *task, *flags)
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    made = tasks.setup_task(cfg.task)
    made.load_dataset(split, combine=True)
    iterator = made.get_batch_iterator(
        dataset=made.dataset(split),
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=(cfg.task.get("max_source_positions"), cfg.task.get("max_target_positions"))
        if not task
        else cfg.task.tokens_per_sample,
        ignore_invalid_inputs=True,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        seed=cfg.common.seed,
        epoch=epoch,
        update_epoch_batch_itr=cfg.dataset.update_epoch_batch_itr,
        disable_iterator_cache=False,
    )
    found = iterator.next_epoch_itr(shuffle=epoch > cfg.dataset.curriculum, fix_batches_to_gpus=False)
    return [batch for batch in found if batch]


def sources(found):
    return [batch["net_input"]["src_tokens"] for batch in found]


def targets(found):
    return [batch["target"] for batch in found]


def sentences(found):
    return sum(batch["nsentences"] for batch in found)


# What a batch must look like with the flags, and not without.
DATA = {
    "--required-seq-len-multiple": ([8], lambda found: all(tokens.shape[1] % 8 == 0 for tokens in sources(found))),
    "--curriculum": (
        [1, "--batch-size", 4],
        lambda found: (widths := [t.shape[1] for t in sources(found)]) == sorted(widths),
    ),
    "--left-pad-target": ([], lambda found: any((t[:, 0] == PAD).any() for t in targets(found))),
    "--truncate-source": (
        ["--max-source-positions", 6],
        lambda found: max(tokens.shape[1] for tokens in sources(found)) == 6 and sentences(found) == 60,
    ),
    "--load-alignments": ([], lambda found: all("alignments" in batch for batch in found)),
}


@pytest.mark.parametrize("flag", DATA)
def test_data(monkeypatch, small, flag):
    values, holds = DATA[flag]
    base = ["--max-source-positions", 6] if flag == "--truncate-source" else ["--batch-size", 4]
    assert holds(batches(monkeypatch, small, flag, *values))
    assert not holds(batches(monkeypatch, small, *base))


def test_curriculum_ends():
    """For a run that goes on, whose data loader is that of the epoch before, as for one that resumes after it."""

    def numbers():
        sentences = ListDataset(list(range(20)))
        batches = [[index] for index in range(20)]
        return iterators.EpochBatchIterator(sentences, lambda batch: batch[0], batches, reuse_dataloader=True)

    whole = numbers()
    first, second = (list(whole.next_epoch_itr(shuffle=shuffle)) for shuffle in (False, True))
    assert first == sorted(second) == list(range(20))
    assert second != first
    resumed = numbers()
    resumed.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 5, "shuffle": True})
    assert list(resumed.next_epoch_itr(shuffle=True)) == second[5:]


def test_upsampling(monkeypatch, small, tmp_path):
    """Of the first of several training sets; fairseq's default of -1 fails where there are several."""
    folder = shutil.copytree(small, tmp_path / "two")
    copy_split(folder, "valid", "train1")
    for ratio in (1, 3):
        assert sentences(batches(monkeypatch, folder, "--upsample-primary", ratio)) == ratio * 60 + 20


def both(run_cli, plain, data, folder, *flags, ours=(), limit=120):
    """Run the same flags with the plugin and with plain fairseq; return the logs, ours first."""
    jobs = [
        run_cli.start(precise(main), *train_words(data, *names, *flags, "--save-dir", folder / side))
        for side, main, names in (("ours", cli.train, [*OURS, *ours]), ("fairseqs", plain["train"], FAIRSEQS))
    ]
    return [job.wait(limit).check().out for job in jobs]


def steps(log, key):
    return [json.loads(line)[key] for line in re.findall(r"\| train_inner \| (\{.*\})", log)]


def validations(log, tag="valid"):
    return [json.loads(line) for line in re.findall(rf"\| {tag} \| (\{{.*\}})", log)]


def same_losses(logs):
    found, expected = (losses(log) for log in logs)
    assert found == pytest.approx(expected, rel=1e-4)
    return found


def test_subsets_and_validation(run_cli, plain, small, tmp_path):
    flags = ["--train-subset", "valid", "--valid-subset", "train,valid1", "--validate-interval", 2, "--max-epoch", 4]
    flags += ["--max-valid-steps", 2, "--batch-size-valid", 3, "--max-tokens-valid", 150, "--no-save"]
    flags += ["--upsample-primary", 1]
    logs = both(run_cli, plain, small, tmp_path, *flags, "--log-file", tmp_path / "log")
    updates = len(same_losses(logs))
    assert updates % 4 == 0
    assert "train_loss" in (tmp_path / "log").read_text()
    found, expected = (validations(log, "valid1") for log in logs)
    assert [line["epoch"] for line in found] == [2, 4]
    losses = [[float(line["valid1_loss"]) for line in lines] for lines in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert all(float(line["valid1_bsz"]) <= 3 for line in found)


def test_joined_validation(run_cli, plain, small, tmp_path):
    """One validation on both sets; fairseq's default --upsample-primary of -1 fails where it joins sets."""
    flags = ["--max-update", 1, "--no-save", "--upsample-primary", 1]
    joined = ["--combine-valid-subsets"]
    lines = [[validations(log)[-1] for log in both(run_cli, plain, small, tmp_path, *flags, *e)] for e in (joined, [])]
    for ours, theirs in lines:
        assert float(ours["valid_loss"]) == pytest.approx(float(theirs["valid_loss"]), rel=1e-4)
    assert lines[0][0]["valid_loss"] != lines[1][0]["valid_loss"]


def test_order_of_an_epoch(run_cli, plain, small, tmp_path):
    flags = ["--batch-size", 8, "--max-epoch", 2, "--no-save", "--disable-validation"]
    runs = [same_losses(both(run_cli, plain, small, tmp_path, *flags, *extra)) for extra in ([], [ORDER])]
    assert runs[0] != runs[1]


def test_no_validation_before(run_cli, plain, small, tmp_path):
    flags = ["--validate-after-updates", 4, "--validate-interval-updates", 2, "--max-update", 7, "--no-save"]
    logs = both(run_cli, plain, small, tmp_path, *flags, "--batch-size", 9)
    same_losses(logs)
    found, expected = ([line["valid_num_updates"] for line in validations(log)] for log in logs)
    assert found == expected
    assert min(map(int, found)) == 4


@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        (
            ["--lr-scheduler", "fixed", "--force-anneal", 2, "--lr-shrink", 0.5, "--max-epoch", 3, "--lr", 0.004],
            lambda rates: (min(rates), max(rates)) == (0.001, 0.004),
        ),
    ],
    ids=["annealing"],
)
def test_rates(run_cli, plain, small, tmp_path, flags, holds):
    logs = both(run_cli, plain, small, tmp_path, "--no-save", "--disable-validation", *flags)
    same_losses(logs)
    found, expected = ([float(rate) for rate in steps(log, "lr")] for log in logs)
    assert found == expected
    assert holds(found), found


def test_smallest_rate_ends_training(run_cli, plain, small, tmp_path):
    """The rate is below the smallest one from the second epoch on."""
    flags = ["--lr-scheduler", "fixed", "--force-anneal", 1, "--lr-shrink", 0.1, "--max-epoch", 9, "--no-save"]
    logs = both(run_cli, plain, small, tmp_path, *flags, "--disable-validation", "--stop-min-lr", 5e-5)
    same_losses(logs)
    for log in logs:
        assert "stopping training because current learning rate" in log
        assert int(float(json.loads(re.findall(r"\| train \| (\{.*\})", log)[-1])["epoch"])) < 9


def test_time_limit(run_cli, plain, small, tmp_path):
    flags = ["--stop-time-hours", 1e-9, "--max-epoch", 3, "--no-save", "--disable-validation"]
    logs = both(run_cli, plain, small, tmp_path, *flags)
    assert len(same_losses(logs)) == 1
    assert all("stop_time_hours" in log for log in logs)


SCALES = {
    "window 3": ["--fp16-scale-window", 3],
    "window 5": ["--fp16-scale-window", 5],
    # 16384 overflows here, 8192 does not.
    "threshold": ["--fp16-scale-window", 3, "--threshold-loss-scale", 9000],
    "start": ["--fp16-scale-window", 3, "--fp16-init-scale", 2**12],
}


def test_loss_scales(run_cli, plain, small, tmp_path):
    """The scale of every update is that of fairseq's own step, and every flag changes it."""
    fixed = ["--memory-efficient-fp16", "--fp16-init-scale", 2**20, "--max-update", 10, "--batch-size", 4, "--no-save"]
    fixed += ["--disable-validation"]
    found = {}
    for name, flags in SCALES.items():
        sides = ((cli.train, OURS), (plain["train"], FAIRSEQS))
        jobs = [
            run_cli.start(
                without_gpu(main), *train_words(small, *names, *fixed, *flags, "--save-dir", tmp_path / names[1])
            )
            for main, names in sides
        ]
        ours, theirs = (steps(job.wait(120).check().out, "loss_scale") for job in jobs)
        assert ours == theirs != []
        found[name] = ours
    assert len({tuple(scales) for scales in found.values()}) == len(SCALES), found


def names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


KEEPING = {
    "updates": (
        ["--save-interval-updates", 1, "--keep-interval-updates", 2, "--keep-interval-updates-pattern", 3]
        + ["--max-update", 7, "--no-epoch-checkpoints"],
        ["checkpoint_best.pt", "checkpoint_last.pt"],
    ),
    "epochs": (
        ["--save-interval", 2, "--keep-last-epochs", 1, "--max-epoch", 6, "--no-save-optimizer-state"],
        ["checkpoint6.pt", "checkpoint_best.pt", "checkpoint_last.pt"],
    ),
    "best": (
        ["--keep-best-checkpoints", 1, "--no-last-checkpoints", "--max-epoch", 3, "--checkpoint-suffix=-x"],
        [],
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_files(run_cli, plain, small, tmp_path, name):
    flags, expected = KEEPING[name]
    same_losses(both(run_cli, plain, small, tmp_path, *flags))
    ours, theirs = names(tmp_path / "ours"), names(tmp_path / "fairseqs")
    assert len(ours) == len(theirs) > 0
    assert [re.sub(r"best_loss_.*", "best_loss", name) for name in ours] == [
        re.sub(r"best_loss_.*", "best_loss", name) for name in theirs
    ]
    assert set(expected) <= set(ours)
    if name == "updates":
        kept = sorted(int(re.findall(r"_(\d+)\.pt", file)[0]) for file in ours if re.search(r"_\d+\.pt", file))
        assert kept == [3, 5, 6, 7]  # multiples of the pattern, and the newest two of the others
    if name == "best":
        assert "checkpoint_last-x.pt" not in ours
        assert all(file.endswith("-x.pt") for file in ours)
    state = checkpoint_io.read(str(tmp_path / "ours" / ours[0]))
    assert (state.get("last_optimizer_state") is None) == ("--no-save-optimizer-state" in flags)


@pytest.fixture(scope="module")
def started(tmp_path_factory, run_cli, plain, small):
    """A checkpoint of plain fairseq after five updates."""
    folder = tmp_path_factory.mktemp("started")
    flags = ["--max-update", 5, "--save-dir", folder, "--no-epoch-checkpoints", "--disable-validation"]
    run_cli(plain["train"], *train_words(small, *FAIRSEQS, *flags)).check()
    return folder / "checkpoint_last.pt"


STARTING = {
    "--restore-file": ([], 6),
    "--reset-optimizer": (["--reset-optimizer"], 1),
    "--reset-dataloader": (["--reset-dataloader", "--reset-meters"], 6),
    "--reset-lr-scheduler": (["--reset-lr-scheduler", "--reset-dataloader"], 6),
    "--optimizer-overrides": (["--optimizer-overrides", "{'lr': [0.02]}"], 6),
    "--finetune-from-model": (None, 1),
    "--continue-once": (None, 6),
}


@pytest.mark.parametrize("flag", STARTING)
def test_starting_from_a_checkpoint(run_cli, plain, small, started, tmp_path, flag):
    """Both start from a checkpoint of plain fairseq and go on alike, from the update that the flag means."""
    flags, first = STARTING[flag]
    flags = [flag, started] if flags is None else ["--restore-file", started, *flags]
    logs = both(run_cli, plain, small, tmp_path, *flags, "--max-update", 8, "--no-save", "--disable-validation")
    same_losses(logs)
    for log in logs:
        assert int(steps(log, "num_updates")[0]) == first


LM = ["--task", "language_modeling"]


@pytest.fixture(scope="module")
def one_language(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("lm")
    shutil.copy(small / "dict.en.txt", folder / "dict.txt")
    for split in ("train", "valid"):
        for suffix in ("bin", "idx"):
            shutil.copy(small / f"{split}.en-de.en.{suffix}", folder / f"{split}.{suffix}")
    return folder


LANGUAGE = {
    "--add-bos-token": ([], lambda found: all((t[:, 0] == 0).all() for t in sources(found))),
    "--shorten-method": (["truncate"], lambda found: sentences(found) == 60),
    "--shorten-data-split-list": (["train", "--shorten-method", "truncate"], lambda found: sentences(found) == 60),
    "--pad-to-fixed-length": ([], lambda found: {t.shape[1] for t in sources(found)} == {8}),
    "--pad-to-fixed-bsz": (["--batch-size", 7], lambda found: {t.shape[0] for t in sources(found)} == {7}),
}


@pytest.mark.parametrize("flag", LANGUAGE)
def test_language_model_data(monkeypatch, one_language, flag):
    values, holds = LANGUAGE[flag]
    task = [*LM, "--tokens-per-sample", 8, "--sample-break-mode", "eos"]
    names = ["--arch", "ls_transformer_lm", "--optimizer", "ls_adam"]
    assert holds(batches(monkeypatch, one_language, *names, flag, *values, task=task))
    other = ["--shorten-data-split-list", "valid", "--shorten-method", "truncate"] if "split" in flag else []
    assert not holds(batches(monkeypatch, one_language, *names, *other, task=task))


def test_output_dictionary(monkeypatch, one_language):
    words = train_words(one_language, *LM, "--arch", "ls_transformer_lm", "--output-dictionary-size", 40)
    monkeypatch.setattr(sys, "argv", ["command"])
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    assert len(task.target_dictionary) == 40 < len(task.source_dictionary)


def test_future_target(monkeypatch, one_language):
    monkeypatch.setattr(sys, "argv", ["command"])
    for flags in ([], ["--future-target"]):
        words = train_words(one_language, *LM, "--arch", "ls_transformer_lm", *flags)
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        assert tasks.setup_task(convert_namespace_to_omegaconf(args).task).targets == ["future"]


@pytest.mark.parametrize("target", ["self", "past"])
def test_other_targets(run_cli, one_language, tmp_path, target):
    words = [*LM, "--arch", "ls_transformer_lm", "--optimizer", "ls_adam", "--tokens-per-sample", 8, "--no-save"]
    result = run_cli(cli.train, *train_words(one_language, *words, f"--{target}-target", "--save-dir", tmp_path))
    assert_refused(result, f"--{target}-target", "drop the flag")

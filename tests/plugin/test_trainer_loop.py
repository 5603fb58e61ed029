"""fairseq's loop around the plugin's training step: what it does at a number of updates happens at exactly that number.

Logging is so rare that nothing but these occasions makes the step wait. fairseq's step, for which another criterion
class is enough, is the reference.
"""

import json
import re

import pytest
import torch

from fairseq_plugin import checkpoint_io, cli

ASIDE = ["--criterion", "label_smoothed_cross_entropy"]


def without_gpu(main):
    """fairseq sends the norm of a skipped update to the GPU."""

    def run():
        torch.Tensor.cuda = lambda tensor: tensor
        return main()

    return run


def validations(log):
    """Return the validation losses by number of updates; fairseq validates again after an overflow there."""
    lines = [json.loads(line) for line in re.findall(r"\| valid \| (\{.*\})", log)]
    return {int(line["valid_num_updates"]): float(line["valid_loss"]) for line in lines}


@pytest.fixture
def both(run_cli, train_arguments, tmp_path):
    """Run the same options with both steps; return logs and folders, ours first."""

    def both(*options):
        common = [
            *train_arguments,
            "--log-format",
            "json",
            "--log-interval",
            1000,
            "--dropout",
            0,
            "--seed",
            3,
            *options,
        ]
        folders = [tmp_path / "ours", tmp_path / "theirs"]
        jobs = [
            run_cli.start(without_gpu(cli.train), *common, *extra, "--save-dir", folder)
            for extra, folder in zip(([], ASIDE), folders)
        ]
        return [job.wait(150).check().out for job in jobs], folders

    return both


@pytest.mark.parametrize(
    "options",
    [
        ["--save-interval-updates", 4, "--update-freq", 2, "--max-epoch", 2, "--train-subset", "test"],
        ["--save-interval-updates", 4, "--max-update", 13, "--memory-efficient-fp16", "--fp16-init-scale", 2**20]
        + ["--fp16-scale-window", 3, "--max-tokens", 200],
        ["--validate-interval-updates", 2, "--patience", 2, "--lr", 0.5, "--warmup-updates", 1, "--max-epoch", 3],
    ],
    ids=["saving", "overflows", "patience"],
)
def test_loop_sees_exact_numbers(both, options):
    logs, folders = both(*options)
    assert ["training step: fairseq's own runs" in log for log in logs] == [False, True]
    ours, theirs = map(validations, logs)
    assert len(theirs) > 2
    assert ours == pytest.approx(theirs, rel=2e-3)
    files, expected = (sorted(path.name for path in folder.glob("*.pt")) for folder in folders)
    assert files == expected
    for name in files:
        one, other = (checkpoint_io.read(str(folder / name)) for folder in folders)
        assert checkpoint_io.updates(one) == checkpoint_io.updates(other)
        schedule, reference = (state["optimizer_history"][-1]["lr_scheduler_state"] for state in (one, other))
        assert schedule == reference
    overflows = [log.count("gradient overflow detected") for log in logs]
    assert overflows[0] == overflows[1]
    assert ("--memory-efficient-fp16" in options) == (overflows[0] > 2)
    assert ["early stop since" in log for log in logs] == ["--patience" in options] * 2

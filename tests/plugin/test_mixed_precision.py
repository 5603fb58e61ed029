"""Mixed precision on the command line: ``ls_adam`` in fairseq's trainer against fairseq's ``adam``, the same model.

``--memory-efficient-*`` with ``ls_adam`` is compared with fairseq's run that keeps float32 copies, because both have
masters; fairseq's own memory-efficient Adam rounds the weights after every update.
"""

import json
import re

import pytest

from fairseq_plugin import cli

UPDATES = 12
KEEPS_COPIES = {"fp16": ["--fp16", "--fp16-no-flatten-grads"], "bf16": ["--bf16"]}
RUNS = {
    "fp16": KEEPS_COPIES["fp16"],
    "memory-efficient-fp16": ["--memory-efficient-fp16"],
    "bf16": KEEPS_COPIES["bf16"],
    "memory-efficient-bf16": ["--memory-efficient-bf16"],
}


def losses(log: str) -> list[float]:
    lines = re.findall(r"\| train_inner \| (\{.*\})", log)
    return [float(json.loads(line)["loss"]) for line in lines]


@pytest.fixture(scope="module")
def start(run_cli, data_bin):
    def start(optimizer, options):
        return run_cli.start(
            cli.train,
            *(data_bin, "--cpu", "--seed", 3, "--arch", "transformer_tiny", "--dropout", 0, "--max-tokens", 200),
            *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1, "--optimizer", optimizer),
            *(
                "--adam-betas",
                "(0.9, 0.98)",
                "--weight-decay",
                1e-2,
                "--lr",
                2e-3,
                "--clip-norm",
                1,
                "--num-workers",
                0,
            ),
            *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 5, "--update-freq", 2, "--max-update", UPDATES),
            *(
                "--fp16-init-scale",
                64,
                "--log-format",
                "json",
                "--log-interval",
                1,
                "--no-save",
                "--disable-validation",
            ),
            *("--num-workers", 0, "--disable-validation", *options),
        )

    return start


@pytest.fixture(scope="module")
def reference(start):
    """Losses of fairseq's adam with float32 copies, by type."""
    jobs = {kind: start("adam", options) for kind, options in KEEPS_COPIES.items()}
    return {kind: losses(job.wait(120).check().out) for kind, job in jobs.items()}


@pytest.mark.parametrize("run", RUNS)
def test_losses_equal_fairseqs(start, reference, run):
    expected = reference[run.removeprefix("memory-efficient-")]
    actual = losses(start("ls_adam", RUNS[run]).wait(120).check().out)
    assert len(actual) == UPDATES
    assert expected[-1] < expected[0] - 0.5
    assert actual == pytest.approx(expected, rel=1e-3)

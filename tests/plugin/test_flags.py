"""Random combinations of the translation recipe's flags: five updates with the losses of plain fairseq.

Number i always is the same combination. ``make test`` runs the first 12, ``make soak`` the others of 200.
"""

import random

import pytest

from fairseq_plugin import cli
from tests.plugin.training_log import losses, precise

UPDATES = 5
NAMES = {
    "ours": ["--arch", "ls_transformer_tiny", "--optimizer", "ls_adam"],
    "fairseqs": ["--arch", "transformer_tiny", "--optimizer", "adam"],
}
CRITERIA = ("label_smoothed_cross_entropy", "cross_entropy")
# Of every group one entry is taken; most of the time its first.
GROUPS = [
    [[], ["--share-all-embeddings"], ["--share-decoder-input-output-embed"]],
    [[], ["--activation-fn", "gelu"], ["--activation-fn", "gelu_accurate"], ["--activation-fn", "tanh"]],
    [[], ["--encoder-layers", 1, "--decoder-layers", 3], ["--encoder-layers", 0]],
    [["--lr-scheduler", "inverse_sqrt", "--warmup-updates", 3], ["--lr-scheduler", "fixed"]],
    [["--max-tokens", 300], ["--batch-size", 6], ["--max-tokens", 500, "--batch-size", 9]],
    [["--update-freq", 1], ["--update-freq", 2], ["--update-freq", 3]],
    [[], ["--clip-norm", 0.5], ["--clip-norm", 5]],
    [[], ["--weight-decay", 0.01], ["--adam-eps", 1e-4, "--adam-betas", "(0.8, 0.95)"]],
    [[], ["--encoder-attention-heads", 4, "--decoder-attention-heads", 1], ["--decoder-ffn-embed-dim", 96]],
    [[], ["--encoder-embed-dim", 96, "--decoder-embed-dim", 64]],
    [[], ["--required-batch-size-multiple", 1], ["--num-batch-buckets", 3, "--max-tokens", 400]],
]
SWITCHES = [
    *("--encoder-normalize-before", "--decoder-normalize-before", "--encoder-learned-pos", "--decoder-learned-pos"),
    *("--layernorm-embedding", "--no-scale-embedding", "--no-token-positional-embeddings", "--checkpoint-activations"),
    *("--no-cross-attention", "--left-pad-source", "--sentence-avg", "--store-ema", "--no-decoder-final-norm"),
    *("--offload-activations", "--skip-remainder-batch", "--no-progress-bar", "--cross-self-attention"),
]
RATES = ["--encoder-layerdrop", "--decoder-layerdrop"]


def combination(number: int) -> list[object]:
    """Return combination ``number`` without the names that differ."""
    draw = random.Random(number)
    flags: list[object] = ["--seed", draw.randint(1, 9)]
    for group in GROUPS:
        flags += group[0] if draw.random() < 0.6 else draw.choice(group)
    flags += [switch for switch in SWITCHES if draw.random() < 0.15]
    for rate in RATES:
        flags += [rate, 0.4] if draw.random() < 0.15 else []
    if "--encoder-embed-dim" in flags:
        # fairseq itself refuses these with two sizes.
        flags = [flag for flag in flags if flag not in ("--share-all-embeddings", "--cross-self-attention")]
    return flags


def criterion(number: int, prefix: str) -> list[object]:
    draw = random.Random(-1 - number)
    name = draw.choice(CRITERIA)
    extra = []
    if name.startswith("label_smoothed"):
        extra = ["--label-smoothing", draw.choice([0, 0.1, 0.3])]
        extra += ["--report-accuracy"] if draw.random() < 0.5 else []
        extra += ["--ignore-prefix-size", 1] if draw.random() < 0.3 else []
    return ["--criterion", prefix + name, *extra]


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(i, marks=pytest.mark.soak) for i in range(12, 200))])
def test_combination(run_cli, plain, data_bin, tmp_path, number):
    flags = [data_bin, "--cpu", "--lr", 1e-3, "--dropout", 0, "--max-update", UPDATES, "--num-workers", 0]
    flags += ["--log-format", "json", "--log-interval", 1, "--disable-validation", "--no-save", *combination(number)]
    jobs = {
        side: run_cli.start(
            precise(main), *flags, *NAMES[side], *criterion(number, prefix), "--save-dir", tmp_path / side
        )
        for side, main, prefix in (("ours", cli.train, "ls_"), ("fairseqs", plain["train"], ""))
    }
    ours, fairseqs = (jobs[side].wait(100) for side in ("ours", "fairseqs"))
    print(*flags)
    assert fairseqs.check().code == ours.check().code
    assert len(losses(fairseqs.out)) == UPDATES
    assert losses(ours.out) == pytest.approx(losses(fairseqs.out), rel=1e-4)

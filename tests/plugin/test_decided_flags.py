"""The flags that were decided one by one: five updates, and what they write, equal to plain fairseq's."""

import re
import shutil

import pytest
import torch

from fairseq_plugin import cli
from tests.plugin.training_log import losses, precise

UPDATES = 5
OURS = ["--arch", "ls_transformer_tiny", "--optimizer", "ls_adam"]
FAIRSEQS = ["--arch", "transformer_tiny", "--optimizer", "adam"]
SMOOTHED = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1]
STEP = "training step: fairseq's own runs because of"
# Flags, and what the one line names that says what runs instead: nothing where the plugin's own step does.
TRAINING = {
    "layerdrop": (
        ["--encoder-layerdrop", 0.4, "--decoder-layerdrop", 0.3],
        "--encoder-layerdrop 0.4, --decoder-layerdrop 0.3",
    ),
    "fused": (["--layernorm-embedding", "--checkpoint-activations", "--encoder-learned-pos"], None),
    "cosine": (
        ["--lr-scheduler", "cosine", "--warmup-updates", 1, "--lr-period-updates", 2, "--min-lr", 1e-5]
        + ["--t-mult", 2, "--lr-shrink", 0.5],
        None,
    ),
    "polynomial": (
        ["--lr-scheduler", "polynomial_decay", "--warmup-updates", 2, "--total-num-update", 5, "--power", 2]
        + ["--end-learning-rate", 1e-4],
        None,
    ),
    "quant noise": (
        ["--quant-noise-pq", 0.2],
        "fairseq's encoder (--quant-noise-pq), fairseq's decoder (--quant-noise-pq)",
    ),
    "adaptive softmax": (
        ["--adaptive-softmax-cutoff", "100,500", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"],
        "fairseq's decoder (--adaptive-softmax-cutoff), criterion AdaptiveLoss",
    ),
    "bmuf": (["--use-bmuf"], "--use-bmuf"),
    "amp": (["--amp"], "--amp"),
}


def start(run_cli, main, data_bin, folder, *flags):
    fixed = [data_bin, "--cpu", "--lr", 1e-3, "--dropout", 0, "--max-update", UPDATES, "--num-workers", 0, "--seed", 4]
    fixed += ["--max-tokens", 300, "--log-format", "json", "--log-interval", 1, "--disable-validation"]
    return run_cli.start(precise(main), *fixed, "--save-dir", folder, *flags)


SOAK = ("bmuf", "amp")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak) if n in SOAK else n for n in TRAINING])
def test_training(run_cli, plain, data_bin, tmp_path, name):
    flags, causes = TRAINING[name]
    ours, theirs = [["--no-save", *SMOOTHED, *flags] for _ in range(2)]
    if "adaptive_loss" not in flags:
        ours = ["ls_label_smoothed_cross_entropy" if flag == SMOOTHED[1] else flag for flag in ours]
    else:
        for side in (ours, theirs):
            del side[1:5]
    jobs = [
        start(run_cli, cli.train, data_bin, tmp_path / "ours", *OURS, *ours),
        start(run_cli, plain["train"], data_bin, tmp_path / "fairseqs", *FAIRSEQS, *theirs),
    ]
    logs = [job.wait(60).check().out for job in jobs]
    found, expected = (losses(log) for log in logs)
    assert len(found) == UPDATES
    assert found == pytest.approx(expected, rel=1e-4)
    logged = [line.split(" | ")[-1] for line in logs[0].splitlines() if "fairseq's" in line]
    assert logged == ([] if causes is None else [f"{STEP} {causes}"])


def test_moving_average(run_cli, plain, data_bin, tmp_path):
    """``--store-ema``: the averaged weights in the checkpoint are those of fairseq's run."""
    flags = ["--store-ema", "--ema-decay", 0.7, "--ema-start-update", 2, "--ema-update-freq", 2, "--ema-fp32"]
    flags += ["--no-epoch-checkpoints"]
    jobs = [
        start(run_cli, cli.train, data_bin, tmp_path / "ours", *OURS, *flags, "--criterion", "ls_cross_entropy"),
        start(
            run_cli, plain["train"], data_bin, tmp_path / "theirs", *FAIRSEQS, *flags, "--criterion", "cross_entropy"
        ),
    ]
    logs = [job.wait(60).check().out for job in jobs]
    assert f"{STEP} --store-ema" in logs[0]
    assert losses(logs[0]) == pytest.approx(losses(logs[1]), rel=1e-4)
    paths = [tmp_path / side / "checkpoint_last.pt" for side in ("ours", "theirs")]
    ours, theirs = (torch.load(path, weights_only=False) for path in paths)
    averages = [state["extra_state"]["ema"] for state in (ours, theirs)]
    assert averages[0].keys() == averages[1].keys()
    moved = 0
    for name, average in averages[0].items():
        torch.testing.assert_close(average, averages[1][name], rtol=1e-3, atol=2e-5)
        moved += not torch.equal(average, ours["model"][name])
    assert moved > 10


@pytest.fixture(scope="module")
def raw_data(tmp_path_factory, data_bin, text_dir):
    """Text that fairseq reads without an index, as ``--replace-unk`` wants it, a checkpoint, and a word list."""
    folder = tmp_path_factory.mktemp("raw")
    for side in ("en", "de"):
        shutil.copy(data_bin / f"dict.{side}.txt", folder)
        shutil.copy(text_dir / f"valid.{side}", folder / f"valid.en-de.{side}")
    (folder / "words.txt").write_text("the THE\nof OF\nis IS\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(run_cli, plain, data_bin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    flags = ["--share-all-embeddings", "--criterion", "cross_entropy", "--no-epoch-checkpoints"]
    start(run_cli, plain["train"], data_bin, folder, *FAIRSEQS, *flags).wait(60).check()
    return folder / "checkpoint_last.pt"


GENERATION = {
    "replace unk": [
        "--replace-unk",
        "{raw}/words.txt",
        "--print-alignment",
        "hard",
        "--unkpen",
        -3,
        "--min-len",
        3,
        "--max-len-a",
        0.2,
    ],
    "diverse groups": ["--diverse-beam-groups", 2, "--diverse-beam-strength", 0.4, "--no-repeat-ngram-size", 2],
    "source length": ["--match-source-len"],
    "top p": ["--sampling", "--sampling-topp", 0.3, "--nbest", 4, "--temperature", 1.3, "--seed", 3],
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation(run_cli, plain, raw_data, checkpoint, name):
    """Both commands print the same sentences with the same scores."""
    flags = [raw_data, "--cpu", "--path", checkpoint, "--dataset-impl", "raw", "--gen-subset", "valid", "--beam", 4]
    flags += ["--source-lang", "en", "--target-lang", "de", "--max-len-b", 5, "--required-batch-size-multiple", 1]
    flags += [str(flag).format(raw=raw_data) for flag in GENERATION[name]]
    by_name = ["--model-overrides", "{'arch': 'ls_transformer_tiny', '_name': 'ls_transformer_tiny'}"]
    jobs = [run_cli.start(cli.generate, *flags, *by_name), run_cli.start(plain["generate"], *flags)]
    ours, theirs = (re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", job.wait(60).check().out, re.MULTILINE) for job in jobs)
    assert len(ours) == len(theirs) == (240 if "--nbest" in flags else 60)
    assert [text for _, _, text in ours] == [text for _, _, text in theirs]
    assert [float(score) for _, score, _ in ours] == pytest.approx([float(s) for _, s, _ in theirs], abs=1e-4)
    if name == "replace unk":
        words = {word for _, _, text in ours for word in text.split()}
        assert words & {"THE", "OF", "IS"}
        assert "<unk>" not in words

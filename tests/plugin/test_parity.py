"""Plain fairseq and the plugin from one command line: the same losses, the same translations.

Both sides run with the same seed and flags, dropout 0, one thread. Only the registered names differ.
"""

import re
from pathlib import Path

import pytest

from fairseq_plugin import cli
from tests.plugin.training_log import losses, precise

OURS = {"arch": "ls_transformer_tiny", "criterion": "ls_label_smoothed_cross_entropy", "optimizer": "ls_adam"}
FAIRSEQS = {"arch": "transformer_tiny", "criterion": "label_smoothed_cross_entropy", "optimizer": "adam"}
UPDATES = 50


def command(data_bin: Path, save_dir: Path, names: dict[str, str], *extra: object) -> list[object]:
    return [
        *(data_bin, "--cpu", "--seed", 3, "--dropout", 0, "--max-tokens", 300, "--save-dir", save_dir),
        *(value for key, name in names.items() for value in (f"--{key}", name)),
        *("--share-all-embeddings", "--label-smoothing", 0.1, "--adam-betas", "(0.9, 0.98)", "--lr", 2e-3),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 20, "--weight-decay", 1e-4, "--num-workers", 0),
        *("--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints"),
        *extra,
    ]


def close(ours: list[float], fairseqs: list[float], tolerance: float = 1e-4) -> bool:
    return len(ours) == len(fairseqs) and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, fairseqs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_cli, plain, data_bin):
    """50 updates of each side, logged with all digits."""
    folder = tmp_path_factory.mktemp("parity")
    extra = ["--update-freq", 2, "--clip-norm", 1, "--max-update", UPDATES, "--encoder-normalize-before"]
    jobs = {}
    for side, main, names in (("ours", cli.train, OURS), ("fairseqs", plain["train"], FAIRSEQS)):
        save_dir = folder / side
        jobs[side] = run_cli.start(precise(main), *command(data_bin, save_dir, names, *extra), cwd=folder)
    return folder, {side: job.wait(150).check() for side, job in jobs.items()}


def test_fifty_updates(runs):
    _, results = runs
    ours, fairseqs = losses(results["ours"].out), losses(results["fairseqs"].out)
    assert len(fairseqs) == UPDATES
    assert fairseqs[-1] < fairseqs[0] - 1
    worst = max(abs(a - b) / b for a, b in zip(ours, fairseqs))
    assert close(ours, fairseqs), f"largest relative difference {worst}"
    assert close(losses(results["ours"].out, "valid"), losses(results["fairseqs"].out, "valid"))
    assert "model: LSTransformerModel" in results["ours"].out
    assert "model: TransformerModel" in results["fairseqs"].out


@pytest.mark.parametrize("arch", [OURS["arch"], FAIRSEQS["arch"]])
@pytest.mark.parametrize("criterion", [OURS["criterion"], FAIRSEQS["criterion"]])
@pytest.mark.parametrize("optimizer", [OURS["optimizer"], FAIRSEQS["optimizer"]])
def test_any_mix(runs, run_cli, data_bin, tmp_path, arch, criterion, optimizer):
    """Each of the 2 x 2 x 2 combinations gives the first five losses of plain fairseq."""
    _, results = runs
    names = {"arch": arch, "criterion": criterion, "optimizer": optimizer}
    extra = ["--update-freq", 2, "--clip-norm", 1, "--max-update", 5, "--encoder-normalize-before", "--no-save"]
    result = run_cli(precise(cli.train), *command(data_bin, tmp_path, names, *extra), "--disable-validation").check()
    assert close(losses(result.out), losses(results["fairseqs"].out)[:5])


def hypotheses(log: str) -> dict[tuple[int, int], tuple[float, str]]:
    """Return score and text of every hypothesis by (sentence, rank)."""
    found: dict[tuple[int, int], tuple[float, str]] = {}
    for number, score, text in re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", log, re.MULTILINE):
        rank = sum(key[0] == int(number) for key in found)
        found[int(number), rank] = (float(score), text)
    return found


GENERATION = {
    "beam": [],
    "right-padded source": ["--left-pad-source"],  # the option switches fairseq's default off
    "prefix": ["--prefix-size", 2],
    "alignment": ["--print-alignment", "hard", "--gen-subset", "valid"],
    "diverse siblings": ["--diversity-rate", 0.5, "--gen-subset", "valid"],
    "sampling": ["--sampling", "--sampling-topk", 5, "--nbest", 5, "--seed", 1, "--gen-subset", "valid"],
    "unnormalised, unk penalty": ["--unnormalized", "--unkpen", 2, "--lenpen", 0.6, "--gen-subset", "valid"],
    "score reference": ["--score-reference", "--gen-subset", "valid"],
}


@pytest.mark.parametrize("extra", GENERATION.values(), ids=GENERATION)
def test_generation(runs, run_cli, plain, data_bin, extra):
    """fairseq-generate with fairseq's model and lightseq-generate with ours, beam 5, from the same checkpoint."""
    folder, _ = runs
    arguments = [data_bin, "--cpu", "--path", folder / "fairseqs" / "checkpoint_last.pt", "--beam", 5]
    arguments += ["--max-len-b", 20, "--required-batch-size-multiple", 1, "--max-tokens", 800, *extra]
    ours_by_name = ["--model-overrides", "{'arch': 'ls_transformer_tiny', '_name': 'ls_transformer_tiny'}"]
    jobs = [
        run_cli.start(plain["generate"], *arguments),
        run_cli.start(cli.generate, *arguments, *ours_by_name),
    ]
    logs = [job.wait(120).check().out for job in jobs]
    fairseqs, ours = (hypotheses(log) for log in logs)
    assert len(fairseqs) == (300 if "--sampling" in extra else 60 if "valid" in extra else 200)
    assert fairseqs.keys() == ours.keys()
    same = [key for key in fairseqs if fairseqs[key][1] == ours[key][1]]
    assert len(same) >= 0.995 * len(fairseqs)
    assert all(abs(fairseqs[key][0] - ours[key][0]) <= 1e-4 for key in fairseqs)
    if "--print-alignment" in extra:
        alignments = [re.findall(r"^A-\d+\t.*$", log, re.MULTILINE) for log in logs]
        assert alignments[0] == alignments[1] != []


def test_constrained_decoding(runs, run_cli, plain, data_bin):
    """Lexical constraints through the interactive command: both find the same translations with the word in them."""
    folder, _ = runs
    arguments = [
        data_bin,
        "--cpu",
        "--path",
        folder / "fairseqs" / "checkpoint_last.pt",
        "--beam",
        5,
        "--max-len-b",
        12,
    ]
    ours_by_name = ["--model-overrides", "{'arch': 'ls_transformer_tiny', '_name': 'ls_transformer_tiny'}"]
    text = "the system\tSystem\nthis is the package\tPaket\n"
    jobs = [
        run_cli.start(plain["interactive"], *arguments, "--constraints", stdin=text),
        run_cli.start(cli.interactive, *arguments, "--constraints", *ours_by_name, stdin=text),
    ]
    fairseqs, ours = (hypotheses(job.wait(60).check().out) for job in jobs)
    assert len(fairseqs) == 2
    assert {key: text for key, (_, text) in ours.items()} == {key: text for key, (_, text) in fairseqs.items()}


def test_bleu_while_training(run_cli, data_bin, tmp_path):
    """``--eval-bleu`` generates with the model that is being trained; the checkpoint with its numpy meters loads."""
    extra = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 5}', "--eval-bleu-detok", "space"]
    extra += ["--eval-bleu-print-samples", "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    arguments = command(data_bin, tmp_path, OURS, *extra)
    result = run_cli(cli.train, *arguments, "--max-update", 2).check()
    assert "example hypothesis" in result.out
    assert re.search(r"\| valid \| \{.*\"valid_bleu\"", result.out)
    again = run_cli(cli.train, *arguments, "--max-update", 3).check()
    assert "Loaded checkpoint" in again.out

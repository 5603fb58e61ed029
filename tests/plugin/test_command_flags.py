"""Flags of the commands around training, under the plugin: each does what it is for, as it does in plain fairseq."""

import re
import shutil

import pytest
import sentencepiece
import torch

from fairseq_plugin import checkpoint_io, cli
from tests.plugin.flag_data import FAIRSEQS, train_words

LM = ["--task", "language_modeling"]


PREPROCESSING = {
    "sizes": ["--nwordssrc", 50, "--nwordstgt", 60, "--thresholdsrc", 2, "--thresholdtgt", 3, "--padding-factor", 1],
    "given dictionaries": ["--srcdict", "{data}/dict.en.txt", "--tgtdict", "{data}/dict.de.txt"],
    "one side": ["--only-source"],
    "dictionaries only": ["--dict-only"],
    "alignments": ["--alignfile", "{text}/train.align", "--align-suffix", "align"],
    "workers": ["--workers", 2, "--joined-dictionary"],
}


@pytest.mark.parametrize("name", PREPROCESSING)
def test_preprocessing(run_cli, plain, small, text_dir, tmp_path, name):
    """The files of ``fairseq-preprocess``, byte for byte, and not those of a run without the flags."""
    for split in ("train", "valid"):
        lines = (text_dir / f"{split}.en").read_text().splitlines()
        (text_dir / f"{split}.align").write_text("0-0\n" * len(lines))
    common = ["--source-lang", "en", "--target-lang", "de"]
    common += ["--trainpref", text_dir / "train", "--validpref", text_dir / "valid"]
    flags = [str(flag).format(data=small, text=text_dir) for flag in PREPROCESSING[name]]
    folders = [tmp_path / side for side in ("ours", "fairseqs", "without")]
    jobs = [
        run_cli.start(main, *common, "--destdir", folder, *extra)
        for main, folder, extra in zip(
            (cli.preprocess, plain["preprocess"], cli.preprocess), folders, (flags, flags, [])
        )
    ]
    for job in jobs:
        job.wait(120).check()
    ours, theirs, without = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".log"} for folder in folders
    )
    assert ours == theirs
    assert ours != without or name == "workers"


@pytest.fixture(scope="module")
def translating(run_cli, plain, data_bin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("translating")
    flags = [*FAIRSEQS, "--share-all-embeddings", "--no-epoch-checkpoints", "--disable-validation"]
    run_cli(plain["train"], *train_words(data_bin, *flags, "--max-update", 3, "--save-dir", folder)).check()
    state = checkpoint_io.read(str(folder / "checkpoint_last.pt"))
    for name in ("arch", "_name"):
        setattr(state["cfg"]["model"], name, "ls_transformer_tiny")
    checkpoint_io.write(state, str(folder / "ours.pt"))
    return folder


def translate(run_cli, plain, data_bin, models, folder, *flags):
    """Return what both commands print with the same flags, and the lines of their result files."""
    common = [data_bin, "--cpu", "--gen-subset", "valid", "--beam", 2, "--max-len-b", 6]
    common += ["--required-batch-size-multiple", 1]
    sides = (("ours", cli.generate, "ours.pt"), ("fairseqs", plain["generate"], "checkpoint_last.pt"))
    jobs = [
        run_cli.start(main, *common, "--path", models / name, *(str(flag).format(side=folder / side) for flag in flags))
        for side, main, name in sides
    ]
    return [job.wait(120).check().out for job in jobs]


def printed(log, kinds="SHPD"):
    return [re.sub(r"\t-?[\d.]+\t", "\t", line) for line in log.splitlines() if re.match(rf"[{kinds}]-\d+\t", line)]


def test_generation_around_the_search(run_cli, plain, data_bin, text_dir, translating, tmp_path):
    flags = ["--results-path", "{side}", "--unkpen", 100]
    flags += ["--no-early-stop", "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "char", "--sacrebleu-lowercase"]
    flags += ["--skip-invalid-size-inputs-valid-test", "--sacrebleu-char-level", "--max-source-positions", 12]
    prefix = tmp_path / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text_dir / "train.de"), model_prefix=str(prefix), vocab_size=200, minloglevel=2
    )
    flags += ["--bpe", "sentencepiece", "--sentencepiece-model", f"{prefix}.model"]
    translate(run_cli, plain, data_bin, translating, tmp_path, *flags)
    ours, theirs = ((tmp_path / side / "generate-valid.txt").read_text() for side in ("ours", "fairseqs"))
    assert printed(ours, "SHD") == printed(theirs, "SHD") != []
    texts = {kind: [line.split("\t")[-1] for line in printed(ours, kind)] for kind in "HD"}
    assert len(texts["D"]) < 60
    assert texts["D"] != texts["H"]
    assert all(" " not in text for text in texts["D"])
    logs = translate(run_cli, plain, data_bin, translating, tmp_path, "--post-process", "letter", "--unkpen", 100)
    assert printed(logs[0], "H") == printed(logs[1], "H")
    assert all(" " not in line for line in printed(logs[0], "H"))
    score = re.findall(r"BLEU.*= [\d.]+", ours)
    assert score == re.findall(r"BLEU.*= [\d.]+", theirs) != []


def test_quiet_generation(run_cli, plain, data_bin, translating, tmp_path):
    ours, theirs = translate(run_cli, plain, data_bin, translating, tmp_path, "--quiet", "--score-reference")
    assert printed(ours) == printed(theirs) == []
    assert "Generate valid with beam" in ours


@pytest.fixture(scope="module")
def language_model(run_cli, plain, data_bin, tmp_path_factory):
    """A folder with the data of ``data_bin`` and its German side as a language model's, and a checkpoint of one."""
    folder = shutil.copytree(data_bin, tmp_path_factory.mktemp("lm") / "data")
    shutil.copy(folder / "dict.de.txt", folder / "dict.txt")
    for split in ("train", "test"):
        for suffix in ("bin", "idx"):
            shutil.copy(folder / f"{split}.en-de.de.{suffix}", folder / f"{split}.{suffix}")
    words = [*LM, "--arch", "transformer_lm", "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32]
    words += ["--decoder-layers", 1, "--decoder-attention-heads", 2, "--optimizer", "adam", "--max-update", 1]
    words += ["--criterion", "cross_entropy", "--tokens-per-sample", 60, "--disable-validation"]
    run_cli(plain["train"], *train_words(folder, *words, "--save-dir", folder)).check()
    return folder


def test_language_model_beside_the_decoder(run_cli, plain, language_model, translating, tmp_path):
    """``--lm-path`` changes the scores as it does in fairseq."""
    folder, model = language_model, language_model / "checkpoint_last.pt"
    logs = translate(run_cli, plain, folder, translating, tmp_path, "--lm-path", model, "--lm-weight", 0.5)
    assert printed(logs[0], "H") == printed(logs[1], "H") != []
    scores = [torch.tensor([float(s) for s in re.findall(r"^H-\d+\t(\S+)", log, re.MULTILINE)]) for log in logs]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    (alone, _) = translate(run_cli, plain, folder, translating, tmp_path)
    assert re.findall(r"^H-\d+\t(\S+)", alone, re.MULTILINE) != re.findall(r"^H-\d+\t(\S+)", logs[0], re.MULTILINE)


def test_input_file(run_cli, plain, data_bin, translating, tmp_path):
    (tmp_path / "text").write_text("the system\nthis is a test\nof the package\n")
    common = [data_bin, "--cpu", "--input", tmp_path / "text", "--buffer-size", 2, "--beam", 2, "--max-len-b", 6]
    sides = ((cli.interactive, "ours.pt"), (plain["interactive"], "checkpoint_last.pt"))
    jobs = [run_cli.start(main, *common, "--path", translating / name) for main, name in sides]
    ours, theirs = (job.wait(120).check().out for job in jobs)
    assert printed(ours, "SHD") == printed(theirs, "SHD")
    assert len(printed(ours, "H")) == 3


def test_words_of_eval_lm(run_cli, language_model):
    """With our model and with fairseq's: the same words, in pieces of the softmax too."""
    common = [language_model, "--cpu", "--path", language_model / "checkpoint_last.pt", "--max-tokens", 400]
    common += ["--required-batch-size-multiple", 1, "--tokens-per-sample", 32, "--output-word-probs"]
    common += ["--output-word-stats", "--softmax-batch", 16]
    overrides = ["--model-overrides", "{'model': {'_name': 'ls_transformer_lm'}}"]
    logs = [run_cli(cli.eval_lm, *common, *extra).check().out for extra in ([], overrides)]
    words = [re.findall(r"(\S+) \[-?[\d.]+\]", log) for log in logs]
    assert words[0] == words[1] != []
    assert all("avg_prob" in log or "WordStat" in log or re.search(r"\d+\t\d", log) for log in logs)


def test_shards(run_cli, language_model):
    """``lightseq-eval-lm`` on halves of the text: together as many words as the whole."""
    common = [language_model, "--cpu", "--path", language_model / "checkpoint_last.pt", "--max-tokens", 400]
    common += ["--required-batch-size-multiple", 1, "--tokens-per-sample", 32]

    def words(*flags):
        log = run_cli(cli.eval_lm, *common, *flags).check().out
        return int(re.findall(r"Evaluated ([\d,]+) tokens", log)[0].replace(",", ""))

    halves = [words("--num-shards", 2, "--shard-id", shard) for shard in (0, 1)]
    assert sum(halves) == words() > max(halves) > 0

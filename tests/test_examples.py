"""The helpers of examples/wmt14, and that the recipe and its plain-fairseq twin use the same flags."""

import importlib.util
import math
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "wmt14"


def load(name):
    spec = importlib.util.spec_from_file_location(f"wmt14_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unigram_entropy(tmp_path):
    text = tmp_path / "text"
    text.write_text("a b\na b\n")  # a, b and the end of sentence: two of each
    assert load("learning").unigram_entropy(text) == pytest.approx(math.log2(3))


def test_curve_is_read_from_both_kinds_of_lines(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "2026 | INFO | train_inner | epoch 001: 125 / 333 loss=9.47, nll_loss=9.157, num_updates=125, lr=1e-05\n"
        "2026 | INFO | valid | epoch 001 | on 'valid' subset | loss 8.637 | nll_loss 8.169 | num_updates 200\n"
        "2026 | INFO | train | epoch 001 | loss 8.8 | nll_loss 8.4 | num_updates 333\n"
    )
    read_curve = load("learning").read_curve
    assert read_curve(log, "train_inner") == [(125, 9.47, 9.157)]
    assert read_curve(log, "valid") == [(200, 8.637, 8.169)]


def test_hypotheses_come_in_the_order_of_the_test_set(tmp_path):
    log = tmp_path / "generate.log"
    log.write_text("S-1\tx\nD-1\t-0.5\tzwei\u2028Teile\nD-0\t-0.1\teins\nD-1\t-0.9\tsecond best\n", encoding="utf-8")
    module = load("hypotheses")
    assert module.read_hypotheses(log) == ["eins", "zwei\u2028Teile"]
    log.write_text("D-2\t-0.5\tdrei\nD-0\t-0.1\teins\n")
    with pytest.raises(ValueError, match=r"lacks sentences \[1\].*required-batch-size-multiple 1"):
        module.read_hypotheses(log)


def test_filter_keeps_pairs_of_similar_length(tmp_path):
    pairs = [("a b c", "x y"), ("a b c d", "x y"), ("", "x"), ("a " * 5, "x " * 5)]
    paths = [tmp_path / name for name in ("en", "de", "en.kept", "de.kept")]
    for side in (0, 1):
        paths[side].write_text("".join(f"{pair[side]}\n" for pair in pairs))
    assert load("clean").filter_pairs(paths[:2], paths[2:], max_ratio=1.5, max_length=4) == (4, 1)
    assert (paths[2].read_text(), paths[3].read_text()) == ("a b c\n", "x y\n")


@pytest.mark.parametrize("command", ["wmt_flags base", "wmt_flags big", "quickstart_flags cpu", "quickstart_flags gpu"])
def test_twin_has_the_same_flags(command):
    def flags(engine):
        script = f'source flags.sh; select_engine {engine}; {command}; printf "%s\\n" "$TRAIN" "${{FLAGS[@]}}"'
        bash = ["bash", "-euc", script]
        return subprocess.run(bash, cwd=EXAMPLE, capture_output=True, text=True, check=True).stdout.split("\n")

    ours, theirs = flags("ls"), flags("fairseq")
    assert len(ours) > 20
    assert (ours[0], theirs[0]) == ("lightseq-train", "fairseq-train")
    named = {flag for flag, other in zip(ours[1:], theirs[1:], strict=True) if flag != other}
    assert {flag.removeprefix("ls_") for flag in named} <= set(theirs)
    assert len(named) == 3, "arch, criterion and optimizer differ, nothing else"


def test_corpus_is_parallel_and_licensed():
    corpus = EXAMPLE / "data" / "handbook"
    for split, count in (("train", 5303), ("valid", 276), ("test", 389)):
        for language in ("en", "de"):
            assert (corpus / f"{split}.{language}").read_text(encoding="utf-8").count("\n") == count
    assert "CC-BY-SA-3.0" in (corpus / "LICENSE").read_text(encoding="utf-8")
    assert "Hertzog" in (corpus / "README.md").read_text(encoding="utf-8")

"""Missing and senseless arguments of every launcher: exit code not 0, and one line that names the argument."""

import argparse
import sys

import pytest
from fairseq.data import plasma_utils

from fairseq_plugin import average, cli, export, option_values
from fairseq_plugin.errors import UserError
from tests.plugin.test_bad_input import assert_refused


def parsed(**values):
    option_values.check([argparse.Namespace(**values)])


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        *((name, 0, "at least 1") for name in ("beam", "nbest", "sampling_topk", "required_batch_size_multiple")),
        *((name, -1, "at least 0") for name in ("max_len_a", "max_len_b", "min_len", "prefix_size", "seed", "lr")),
        *(
            (name, float("nan"), "give a number")
            for name in ("lenpen", "unkpen", "max_len_a", "lm_weight", "clip_norm")
        ),
        ("seed", 1 << 32, "below 4294967296"),
        ("temperature", 0.0, "above 0"),
        ("sampling_topp", 1.5, "at most 1"),
        ("decoder_layerdrop", 2.0, "at most 1"),
        ("update_freq", [2, 0], "at least 1"),
        ("lr", [0.1, float("nan")], "give a number"),
        *(("adam_betas", text, "two numbers") for text in ("", "0.9", "(0.9", "(0.9, 1.5)", "garbage", "(0.9, 'x')")),
        *(("model_overrides", text, "Python dictionary") for text in ("{", "5", "garbage", "[1]")),
        ("eval_bleu_args", "{beam: 4}", "JSON object"),
        ("adaptive_softmax_cutoff", "100,x", "whole numbers"),
    ],
)
def test_value(name, value, part):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"^{flag} .*{part}"):
        parsed(**{name: value})


def test_defaults_pass(plain, train_arguments, data_bin, monkeypatch):
    """And so do fairseq's ways to say "off"."""
    from fairseq import options

    monkeypatch.setattr(sys, "argv", ["command"])
    options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in train_arguments])
    options.parse_args_and_arch(options.get_generation_parser(), [str(data_bin), "--path", "x.pt"])
    options.get_preprocessing_parser().parse_args([])
    parsed(max_tokens=0, clip_norm=-1.0, sampling_topk=-1, sampling_topp=-1.0, keep_last_epochs=-1, patience=-1)
    parsed(use_plasma_view=False)
    monkeypatch.setattr(plasma_utils, "PYARROW_AVAILABLE", True)
    parsed(use_plasma_view=True)
    parsed(adam_betas="[0.9, 0.98]", update_freq=[1, 2], lr=[0.25], beam=None, model_overrides="{}")


MISSING = {
    "train without data": (cli.train, ["--arch", "ls_transformer_tiny", "--max-tokens", 9], "data"),
    "train without arch": (cli.train, ["{data}", "--max-tokens", 9], "--arch"),
    "train without batch size": (cli.train, ["{data}", "--cpu", "--arch", "ls_transformer_tiny"], "--max-tokens"),
    "generate without data": (cli.generate, [], "required: data"),
    "generate without path": (cli.generate, ["{data}"], "--path is missing"),
    "interactive without path": (cli.interactive, ["{data}"], "--path is missing"),
    "validate without task": (cli.validate, ["{data}", "--path", "x.pt"], "--task"),
    "validate without path": (cli.validate, ["{data}", "--task", "translation"], "--path is missing"),
    "eval-lm without path": (cli.eval_lm, ["{data}"], "--path is missing"),
    "preprocess without text": (cli.preprocess, ["--source-lang", "en", "--target-lang", "de"], "--trainpref"),
    "score without reference": (cli.score, [], "required: -r/--ref"),
    "average without inputs": (average.main, [], "required: --inputs"),
    "export without anything": (export.main, [], "required: --to"),
}
SENSELESS = {
    "betas": (cli.train, ["{data}", "--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--adam-betas", "(0.9"]),
    "beam": (cli.generate, ["{data}", "--path", "x.pt", "--beam", 0]),
    "plasma": (cli.train, ["{data}", "--cpu", "--arch", "ls_transformer_tiny", "--use-plasma-view"]),
    "plasma of a language model": (cli.eval_lm, ["{data}", "--cpu", "--path", "x.pt", "--use-plasma-view"]),
    "constraints": (cli.generate, ["{data}", "--path", "x.pt", "--constraints", "ordered"]),
    "workers": (cli.preprocess, ["--source-lang", "en", "--target-lang", "de", "--workers", 0]),
    "reference": (cli.score, ["--ref", "none.txt"]),
    "order": (cli.score, ["--ref", "{full}", "--sys", "{full}", "--order", 5]),
    "empty system": (cli.score, ["--ref", "{full}", "--sys", "{empty}"]),
    "empty reference": (cli.score, ["--ref", "{empty}", "--sys", "{full}"]),
    "other length": (cli.score, ["--ref", "{full}", "--sys", "{longer}"]),
    "not text": (cli.score, ["--ref", "{full}", "--sys", "{binary}"]),
    "dictionary": (cli.preprocess, ["--source-lang", "en", "--target-lang", "de", "--srcdict", "{binary}"]),
    "inputs": (average.main, ["--inputs", "none.pt", "--output", "out.pt"]),
    "garbage": (average.main, ["--inputs", "{binary}", "--output", "out.pt"]),
    "checkpoint": (export.main, ["--to", "fairseq", "none.pt", "out.pt"]),
}
SAYS = {
    "betas": "--adam-betas (0.9",
    "beam": "--beam 0: must be at least 1",
    "plasma": "--use-plasma-view: needs pyarrow.plasma, which is not installed; drop the flag",
    "plasma of a language model": "--use-plasma-view: needs pyarrow.plasma",
    "constraints": "lightseq-interactive",
    "workers": "--workers 0",
    "reference": "none.txt",
    "order": "--order 5: must be between 1 and 4",
    "empty system": "the file is empty",
    "empty reference": "the file is empty",
    "other length": "has 3 lines but",
    "not text": "not UTF-8",
    "dictionary": "not a whole dictionary",
    "inputs": "none.pt",
    "garbage": "not a whole checkpoint",
    "checkpoint": "none.pt",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory, data_bin):
    folder = tmp_path_factory.mktemp("files")
    contents = {"full": b"a b c d\n" * 2, "longer": b"a b c d\n" * 3, "empty": b"", "binary": bytes(range(256)) * 4}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {"data": data_bin, **{name: folder / name for name in contents}}


@pytest.mark.parametrize("name", MISSING)
def test_missing(run_cli, files, name):
    main, words, part = MISSING[name]
    result = run_cli(main, *(str(word).format(**files) for word in words))
    assert result.code not in (0, None)
    assert "Traceback" not in result.err
    assert part in result.err.splitlines()[-1], result.err


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless(run_cli, files, name):
    main, words = SENSELESS[name]
    assert_refused(run_cli(main, *(str(word).format(**files) for word in words)), SAYS[name])


def test_layers_to_keep_from_the_command_line(run_cli, train_arguments, tmp_path):
    """fairseq's parser makes a list of it, its models want the text."""
    flags = ["--decoder-layers", 3, "--decoder-layers-to-keep", "0,2", "--max-update", 1, "--no-save"]
    result = run_cli(cli.train, *train_arguments, *flags, "--disable-validation").check()
    assert "(0-1): 2 x LSTransformerDecoderLayer" in result.out

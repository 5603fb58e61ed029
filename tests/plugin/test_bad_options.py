"""Options and data that do not fit the model: exit code not 0, one clear line, no checkpoint written."""

import shutil

import pytest
import torch

from fairseq_plugin import cli, model_options
from fairseq_plugin.errors import UserError
from tests.plugin.test_bad_input import assert_refused
from tests.plugin.tiny_models import build

REFUSED = {
    "--tpu": ([], "no TPU implementation"),
    "--model-parallel-size": ([2], "model_parallel_transformer"),
    "--pipeline-model-parallel": ([], "pipeline_parallel_transformer"),
    "--fp16-adam-stats": ([], "drop the flag"),
    "--use-old-adam": ([], "--optimizer adam"),
}
BAD = {
    "--encoder-attention-heads 3": (["--encoder-attention-heads", 3], "--encoder-embed-dim 64 is no multiple"),
    "--decoder-attention-heads 0": (["--decoder-attention-heads", 0], "--decoder-embed-dim 64 is no multiple"),
    "--dropout 2.0": (["--dropout", 2], "between 0 and 1"),
    "--attention-dropout -0.1": (["--attention-dropout=-0.1"], "between 0 and 1"),
    "--label-smoothing 3.0": (["--label-smoothing", 3], "between 0 and 1"),
    "max_positions=(5, 5)": (
        ["--max-source-positions", 5, "--max-target-positions", 5, "--max-update", 60],
        "skip-invalid",
    ),
}


def train(run_cli, arguments, folder, *flags):
    fixed = [*arguments, "--save-dir", folder, "--max-update", 1, "--no-epoch-checkpoints", "--max-tokens", 300]
    return run_cli(cli.train, *fixed, *flags)


@pytest.mark.parametrize("flag", REFUSED)
def test_refused(run_cli, train_arguments, tmp_path, flag):
    values, advice = REFUSED[flag]
    assert_refused(train(run_cli, train_arguments, tmp_path / "save", flag, *values), flag, advice)
    assert not list(tmp_path.glob("save/*.pt"))


@pytest.mark.parametrize("option", sorted(model_options.REFUSED))
def test_every_refused_option_of_the_model(option):
    with pytest.raises(UserError, match=f"^--{option.replace('_', '-')}: .*use "):
        build("ls_transformer", **{option: "2" if option.endswith(("balance", "devices")) else 2})


@pytest.mark.parametrize("name", BAD)
def test_bad_value(run_cli, train_arguments, tmp_path, name):
    flags, advice = BAD[name]
    assert_refused(train(run_cli, train_arguments, tmp_path / "save", *flags), name, advice)
    assert not list(tmp_path.glob("save/*.pt"))


def test_unknown_activation(run_cli, train_arguments, tmp_path):
    result = train(run_cli, train_arguments, tmp_path / "save", "--activation-fn", "sine")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("command: error: argument --activation-fn: invalid choice: 'sine'")
    assert not (tmp_path / "save").exists()


def test_token_id_out_of_range(run_cli, train_arguments, data_bin, tmp_path):
    """Data whose dictionaries were cut short hold ids that the model has no rows for."""
    folder = shutil.copytree(data_bin, tmp_path / "data")
    for side in ("en", "de"):
        path = folder / f"dict.{side}.txt"
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:400]), encoding="utf-8")
    line = assert_refused(
        train(run_cli, [folder, *train_arguments[1:]], tmp_path / "save"), "ids must be between 0 and"
    )
    assert "dictionary" in line
    assert not list(tmp_path.glob("save/checkpoint*.pt"))


def test_dropout_while_generating():
    model = build("ls_transformer")
    with pytest.raises(UserError, match="^--retain-dropout: .*--model-overrides"):
        model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=None)
    build("ls_transformer").make_generation_fast_(need_attn=True)
    assert torch.is_grad_enabled()


def test_replacing_needs_alignments():
    from fairseq import utils

    with pytest.raises(UserError, match="add --print-alignment hard"):
        utils.replace_unk("a <unk>", "b c", torch.empty(0), {}, "<unk>")
    assert utils.replace_unk("a <unk> <unk>", "b c", [(1, 1), (0, 2)], {"c": "C"}, "<unk>") == "a C b"

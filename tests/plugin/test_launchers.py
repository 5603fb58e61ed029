"""Launchers: fairseq's command lines, the user's own --user-dir, logs, resume, generation from the command line."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from fairseq_plugin import cli, user_dir
from fairseq_plugin.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
USER_MODULE = """
from fairseq.models import register_model_architecture
from fairseq.models.transformer import tiny_architecture
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


@register_task("users_translation", dataclass=TranslationConfig)
class UsersTask(TranslationTask):
    pass


@register_model_architecture("ls_transformer", "users_transformer")
def users_architecture(args):
    args.decoder_layers = getattr(args, "decoder_layers", 1)
    tiny_architecture(args)
"""


@pytest.fixture
def users(tmp_path):
    folder = tmp_path / "users_module"
    folder.mkdir()
    (folder / "__init__.py").write_text(USER_MODULE)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_cli, data_bin, train_arguments):
    """A run of 6 updates with everything switched on that logs."""
    folder = tmp_path_factory.mktemp("trained")
    extra = ["--log-format", "json", "--log-interval", 1, "--tensorboard-logdir", folder / "tb", "--seed", 7]
    extra += ["--save-dir", folder / "save", "--save-interval-updates", 3, "--max-update", 6, "--dropout", 0.1]
    result = run_cli(cli.train, *train_arguments, *extra, cwd=folder).check()
    return folder, result


class TestUserDir:
    def test_split(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine").mkdir()
        mine = str(tmp_path / "mine")
        assert user_dir.split(["a", "--user-dir", "mine", "b"]) == (["a", "b"], mine)
        assert user_dir.split(["--user-dir=mine", "--user-dir", user_dir.PLUGIN_DIR]) == ([], mine)
        assert user_dir.split(["--user-dir", "x", "--user-dir", "examples/y"]) == ([], "examples/y")
        assert user_dir.split(["--user-dirs", "x"]) == (["--user-dirs", "x"], None)
        with pytest.raises(UserError, match="--user-dir needs a folder"):
            user_dir.split(["--user-dir"])

    @pytest.mark.parametrize("relative", [False, True])
    def test_users_folder_is_imported_beside_ours(self, run_cli, users, data_bin, train_arguments, tmp_path, relative):
        own = ["--task", "users_translation", "--arch", "users_transformer"]
        folder = users.name if relative else users
        arguments = [*train_arguments, *own, "--user-dir", folder, "--save-dir", tmp_path / "save"]
        result = run_cli(cli.train, *arguments, "--max-update", 1, cwd=tmp_path).check()
        assert "task: UsersTask" in result.out
        assert "model: LSTransformerModel" in result.out

    def test_missing_folder_is_named(self, run_cli, data_bin, tmp_path):
        result = run_cli(cli.train, data_bin, "--user-dir", tmp_path / "nowhere")
        assert result.code == 1
        assert f"error: --user-dir {tmp_path / 'nowhere'}: no such folder" in result.err
        assert "Traceback" not in result.err

    def test_missing_architecture_is_named(self, run_cli, data_bin):
        result = run_cli(cli.train, data_bin)
        assert result.code == 1
        assert "error: no architecture is chosen; give one with --arch" in result.err
        assert "Traceback" not in result.err

    def test_plain_fairseq_takes_the_plugin_by_name(self, run_cli, plain, data_bin, train_arguments, tmp_path):
        """From the repository's root: ``fairseq-train --user-dir fairseq_plugin``."""
        arguments = [*train_arguments, "--user-dir", "fairseq_plugin", "--save-dir", tmp_path, "--max-update", 1]
        assert "LSTransformerModel" in run_cli(plain["train"], *arguments, cwd=ROOT).check().out


class TestTrain:
    def test_log_lines_are_fairseqs(self, trained):
        _, result = trained
        steps = [json.loads(line[line.index("{") :]) for line in result.out.splitlines() if "| train_inner | {" in line]
        assert [step["num_updates"] for step in steps] == [str(number) for number in range(1, 7)]
        assert {"loss", "nll_loss", "ppl", "wps", "ups", "wpb", "bsz", "lr", "gnorm", "train_wall"} <= set(steps[0])
        assert re.search(r"\| INFO \| valid \| \{.*valid_loss", result.out)
        assert "Saved checkpoint" in result.out
        assert "| fairseq_cli.train | num. shared model params" in result.out

    def test_tensorboard_folder(self, trained):
        pytest.importorskip("torch.utils.tensorboard")
        folder, _ = trained
        assert list((folder / "tb").rglob("events.out.tfevents.*"))

    def test_resume_equals_uninterrupted(self, trained, run_cli, train_arguments, tmp_path):
        """Updates 4 to 6 after a restart print the losses of the uninterrupted run, dropout on."""
        folder, whole = trained
        extra = ["--log-format", "json", "--log-interval", 1, "--seed", 7, "--dropout", 0.1, "--max-update", 6]
        restart = ["--restore-file", folder / "save" / "checkpoint_1_3.pt", "--save-dir", tmp_path / "save"]
        result = run_cli(cli.train, *train_arguments, *extra, *restart, cwd=tmp_path).check()
        pattern = re.compile(r'"loss": "([\d.]+)".*"num_updates": "([456])"')
        losses = [re.findall(pattern, line) for line in whole.out.splitlines() if "train_inner" in line]
        again = [re.findall(pattern, line) for line in result.out.splitlines() if "train_inner" in line]
        assert [found for found in losses if found] == [found for found in again if found] != []

    def test_bf16_on_the_cpu(self, run_cli, train_arguments, tmp_path):
        arguments = [*train_arguments, "--bf16", "--max-update", 3, "--save-dir", tmp_path, "--no-epoch-checkpoints"]
        result = run_cli(cli.train, *arguments).check()
        losses = [float(text) for text in re.findall(r"valid \| .*?loss (\d+\.\d+)", result.out)]
        assert losses
        assert all(loss < 20 for loss in losses)


class TestEvaluation:
    def test_generate(self, trained, run_cli, data_bin):
        folder, _ = trained
        arguments = [data_bin, "--cpu", "--path", folder / "save/checkpoint_last.pt", "--beam", 2, "--max-len-b", 10]
        result = run_cli(
            cli.generate, *arguments, "--required-batch-size-multiple", 1, "--scoring", "sacrebleu"
        ).check()
        assert len(re.findall(r"^H-\d+\t", result.out, re.M)) == 200
        assert "BLEU" in result.out

    def test_ensemble_and_score(self, trained, run_cli, data_bin, tmp_path):
        folder, _ = trained
        pair = f"{folder / 'save/checkpoint_last.pt'}:{folder / 'save/checkpoint_1_3.pt'}"
        arguments = [data_bin, "--cpu", "--path", pair, "--beam", 2, "--max-len-b", 10, "--gen-subset", "valid"]
        result = run_cli(cli.generate, *arguments, "--required-batch-size-multiple", 1).check()
        hypotheses = re.findall(r"^H-\d+\t[^\t]+\t(.*)$", result.out, re.M)
        assert len(hypotheses) == 60
        for name, lines in (("sys", hypotheses), ("ref", re.findall(r"^T-\d+\t(.*)$", result.out, re.M))):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        for extra in ([], ["--sacrebleu"]):
            scored = run_cli(cli.score, "--sys", tmp_path / "sys", "--ref", tmp_path / "ref", *extra).check()
            assert "BLEU" in scored.out

    def test_interactive(self, trained, run_cli, data_bin):
        folder, _ = trained
        arguments = [data_bin, "--cpu", "--path", folder / "save/checkpoint_last.pt", "--beam", 2, "--max-len-b", 10]
        result = run_cli(cli.interactive, *arguments, stdin="the system\nthis is a test\n").check()
        assert len(re.findall(r"^H-[01]\t", result.out, re.M)) == 2

    def test_validate(self, trained, run_cli, data_bin):
        folder, result = trained
        arguments = [data_bin, "--cpu", "--path", folder / "save/checkpoint_last.pt", "--valid-subset", "valid"]
        arguments += ["--task", "translation", "--required-batch-size-multiple", 1]
        again = run_cli(cli.validate, *arguments, "--max-tokens", 400).check()
        during = json.loads(re.findall(r"\| valid \| (\{.*\})", result.out)[-1])["valid_loss"]
        assert re.findall(r"valid .*\bloss (\d+\.\d+)", again.out)[-1] == during

    def test_preprocess_writes_the_same_bytes(self, run_cli, data_bin, preprocess_arguments, tmp_path):
        run_cli(cli.preprocess, *preprocess_arguments(tmp_path)).check()
        names = sorted(path.name for path in data_bin.iterdir() if path.suffix != ".log")
        assert {"train.en-de.en.bin", "dict.de.txt"} <= set(names)
        assert all((tmp_path / name).read_bytes() == (data_bin / name).read_bytes() for name in names)


def test_doctor(launcher_script, tmp_path):
    """The doctor reports and exits with 0 where no fairseq can be found."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['fairseq'] = None\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = launcher_script("lightseq-doctor", "ls_train.doctor:main")
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("Python", "torch", "CUDA", "nvcc", "g++", "ninja", "GPU", "layer_norm_fwd", "adam"):
        assert name in result.stdout
    assert "pip install 'ls-train[fairseq]'" in result.stdout
    assert "Training on the CPU works." in result.stdout

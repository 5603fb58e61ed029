"""Bad input: exit code not 0, one clear line, nothing written over."""

import argparse
import json
import os
import pwd
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch

from fairseq_plugin import checkpoint_io, cli, errors, guards, save_dir
from fairseq_plugin.errors import UserError


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every checkpoint in ``folder``; crash.pt is none to go on from."""
    paths = [path for path in sorted(folder.glob("*.pt")) if path.name != "crash.pt"]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def assert_refused(result, *parts: str) -> str:
    """Check the exit code and that stderr is one ``error:`` line with all ``parts``; return the line."""
    assert result.code not in (0, None), result.out[-2000:]
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert len(lines) == 1, result.err[-3000:]
    assert lines[0].startswith("error: ")
    for part in parts:
        assert str(part) in lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def short(train_arguments):
    return [*train_arguments, "--max-tokens", 200, "--no-epoch-checkpoints", "--disable-validation", "--seed", 2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run_cli, short):
    """The save-dir of a run of 4 updates with a checkpoint every 2."""
    folder = tmp_path_factory.mktemp("finished")
    run_cli(cli.train, *short, "--save-interval-updates", 2, "--max-update", 4, "--save-dir", folder).check()
    return folder


@pytest.fixture
def saved(finished, tmp_path):
    """A copy of that save-dir."""
    return Path(shutil.copytree(finished, tmp_path / "save"))


@pytest.fixture
def refuses(run_cli, short, tmp_path):
    """Run training with more arguments and check that it is refused and leaves ``tmp_path/save`` as it was."""

    def check(*extra, parts, main=cli.train, **options):
        folder = tmp_path / "save"
        before = snapshot(folder)
        arguments = [*short, "--save-dir", folder, "--max-update", 6, *extra]
        line = assert_refused(run_cli(main, *arguments, **options), *parts)
        assert snapshot(folder) == before
        return line

    return check


class TestData:
    def test_missing_folder(self, refuses, tmp_path):
        refuses(parts=[tmp_path / "nowhere", "does not exist"], main=with_data(tmp_path / "nowhere"))

    def test_folder_of_something_else(self, refuses, tmp_path):
        (tmp_path / "empty").mkdir()
        refuses(parts=[tmp_path / "empty", "lightseq-preprocess"], main=with_data(tmp_path / "empty"))

    @pytest.mark.parametrize(
        ("name", "keep", "parts"),
        [
            ("train.en-de.de.bin", 0.7, ["train.en-de.de.bin: truncated"]),
            ("dict.de.txt", None, ["dict.de.txt"]),
        ],
    )
    def test_damaged(self, refuses, data_bin, tmp_path, name, keep, parts):
        folder = Path(shutil.copytree(data_bin, tmp_path / "bin"))
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if keep is not None:
            (folder / name).write_bytes(content[: int(keep * len(content))])
        refuses(parts=parts, main=with_data(folder))

    @pytest.mark.parametrize("part", [0.0, 0.0005, 0.5, 0.999])
    @pytest.mark.parametrize("suffix", [".idx", ".bin"])
    def test_truncated_dataset(self, data_bin, tmp_path, suffix, part):
        prefix = tmp_path / "train.en-de.en"
        for kind in (".idx", ".bin"):
            shutil.copy(data_bin / f"train.en-de.en{kind}", f"{prefix}{kind}")
        guards.check_dataset(str(prefix))
        damaged = Path(f"{prefix}{suffix}")
        damaged.write_bytes(damaged.read_bytes()[: int(part * damaged.stat().st_size)])
        with pytest.raises(UserError, match=f"train.en-de.en{suffix}: "):
            guards.check_dataset(str(prefix))

    def test_missing_file_of_a_dataset(self, data_bin, tmp_path):
        shutil.copy(data_bin / "train.en-de.en.idx", tmp_path)
        with pytest.raises(UserError, match=r"train.en-de.en.bin: missing although train.en-de.en.idx is there"):
            guards.check_dataset(str(tmp_path / "train.en-de.en"))
        guards.check_dataset(str(tmp_path / "none"))  # neither is there: fairseq says so itself

    def test_missing_target(self, data_bin, tmp_path):
        from fairseq.data import data_utils

        with pytest.raises(UserError, match="nothing to train on"):
            data_utils.load_indexed_dataset(str(tmp_path / "train.en-de.de"))

    def test_damaged_dictionary(self, tmp_path):
        from fairseq.data import Dictionary

        (tmp_path / "dict.en.txt").write_text("the 10\nof\n")
        with pytest.raises(UserError, match=r"dict.en.txt: not a whole dictionary"):
            Dictionary.load(str(tmp_path / "dict.en.txt"))


def with_data(folder):
    """``cli.train`` with another data folder in place of the first argument."""

    def run():
        import sys

        cli.train([str(folder), *sys.argv[2:]])

    return run


class TestCheckpoints:
    def test_missing_restore_file(self, refuses, saved):
        refuses("--restore-file", "none.pt", parts=["none.pt: no such checkpoint", "--restore-file"])

    def test_truncated_restore_file(self, refuses, saved, tmp_path):
        content = (saved / "checkpoint_last.pt").read_bytes()
        (tmp_path / "cut.pt").write_bytes(content[:-200])
        refuses("--restore-file", tmp_path / "cut.pt", parts=["cut.pt: not a whole checkpoint", len(content) - 200])

    @pytest.mark.parametrize(("part", "missed"), [("optimizer_history", "best_loss"), ("extra_state", "extra_state")])
    def test_without_a_part(self, refuses, saved, tmp_path, part, missed):
        """fairseq takes a file without an optimizer's history for one of its oldest, which had other entries."""
        state = checkpoint_io.read(str(saved / "checkpoint_last.pt"))
        del state[part]
        checkpoint_io.write(state, str(tmp_path / "part.pt"))
        refuses("--restore-file", tmp_path / "part.pt", parts=[f"no entry '{missed}'", "whole checkpoint"])

    def test_truncated_last_continues_from_the_newest(self, run_cli, short, saved):
        last = saved / "checkpoint_last.pt"
        last.write_bytes(last.read_bytes()[:-200])
        os.remove(saved / "checkpoint_1_4.pt")
        result = run_cli(cli.train, *short, "--save-dir", saved, "--max-update", 5).check()
        lines = [line for line in result.out.splitlines() if "not a whole checkpoint" in line]
        assert len(lines) == 1
        assert f"continuing from {saved / 'checkpoint_1_2.pt'}" in lines[0]
        assert "@ 2 updates)" in result.out
        assert checkpoint_io.updates(checkpoint_io.read(str(last))) == 5

    def test_missing_last_continues_from_the_newest(self, run_cli, short, saved):
        os.remove(saved / "checkpoint_last.pt")
        extra = ["--save-dir", saved, "--max-update", 5, "--finetune-from-model", "not-used.pt"]
        result = run_cli(cli.train, *short, *extra).check()
        assert f"checkpoint_last.pt is missing; continuing from {saved / 'checkpoint_1_4.pt'}" in result.out
        assert "@ 4 updates)" in result.out

    def test_nothing_whole(self, refuses, saved):
        for path in saved.glob("*.pt"):
            path.write_bytes(path.read_bytes()[:1000])
        refuses(parts=["checkpoint_last.pt: not a whole checkpoint", f"{saved} holds no whole checkpoint", "remove"])

    def test_other_architecture(self, refuses, saved):
        parts = ["holds a model of architecture ls_transformer_tiny", "--arch ls_transformer_iwslt_de_en"]
        line = refuses("--arch", "ls_transformer_iwslt_de_en", parts=parts)
        assert " there and " in line or "missing" in line

    def test_other_dictionary(self, refuses, saved, data_bin, tmp_path):
        folder = Path(shutil.copytree(data_bin, tmp_path / "bin"))
        for name in ("dict.en.txt", "dict.de.txt"):
            with (folder / name).open("a") as stream:
                stream.writelines(f"added{number} 1\n" for number in range(24))
        size = len((data_bin / "dict.en.txt").read_text().splitlines()) + 4
        refuses(
            parts=[f"source dictionary of {size} entries", f"the one in {folder} has {size + 24}"],
            main=with_data(folder),
        )

    def test_generate(self, run_cli, data_bin, saved, tmp_path):
        command = [data_bin, "--cpu", "--gen-subset", "valid"]
        assert_refused(run_cli(cli.generate, *command, "--path", tmp_path / "none.pt"), "none.pt")
        (tmp_path / "cut.pt").write_bytes((saved / "checkpoint_last.pt").read_bytes()[:5000])
        assert_refused(run_cli(cli.generate, *command, "--path", tmp_path / "cut.pt"), "cut.pt: not a whole checkpoint")

    def test_generate_with_other_sizes(self, run_cli, data_bin, saved):
        command = [data_bin, "--cpu", "--path", saved / "checkpoint_last.pt", "--gen-subset", "valid"]
        result = run_cli(cli.generate, *command, "--model-overrides", "{'encoder_ffn_embed_dim': 32}")
        assert_refused(result, "--model-overrides", "encoder.layers.0.fc1.weight is [64, 64] there and [32, 64] here")

    def test_generate_with_another_dictionary(self, run_cli, data_bin, saved, tmp_path):
        folder = Path(shutil.copytree(data_bin, tmp_path / "bin"))
        for name in ("dict.en.txt", "dict.de.txt"):
            lines = (folder / name).read_text().splitlines()
            (folder / name).write_text("\n".join(lines[:-10]) + "\n")
        result = run_cli(cli.generate, folder, "--cpu", "--path", saved / "checkpoint_last.pt", "--gen-subset", "valid")
        assert_refused(result, "source dictionary of", "use the data folder it was trained with")


class TestSaveDir:
    def test_full_disk(self, run_cli, short, saved):
        """The disk fills up while the second checkpoint of the run is written; all files of before are whole."""
        before = snapshot(saved)

        def small_disk():
            limit = (saved / "checkpoint_last.pt").stat().st_size - 1000
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            cli.train()

        extra = ["--save-dir", saved, "--save-interval-updates", 1, "--max-update", 6]
        result = run_cli(small_disk, *short, *extra)
        assert_refused(result, saved / "checkpoint_1_5.pt", "cannot be written (File too large)", "--save-dir")
        assert snapshot(saved) == before
        assert not list(saved.glob(save_dir.TEMPORARY_PREFIX + "*"))

    def test_cannot_be_created(self, refuses, tmp_path):
        (tmp_path / "file").touch()
        refuses("--save-dir", tmp_path / "file" / "save", parts=["--save-dir", "Not a directory"])

    @pytest.mark.skipif(os.getuid() != 0, reason="gives up the rights of root to have none")
    def test_read_only_for_root(self, run_cli, saved):
        saved.chmod(0o555)
        for folder in saved.parents:  # pytest's own folders, one more of them where several workers run
            if folder.stat().st_mode & 0o077 == 0:
                folder.chmod(0o755)

        def nobody():
            os.setuid(pwd.getpwnam("nobody").pw_uid)
            assert os.listdir(saved)
            assert_read_only(saved)

        run_cli(nobody).check()

    @pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
    def test_read_only(self, saved):
        saved.chmod(0o555)
        assert_read_only(saved)

    def test_two_runs(self, run_cli, refuses, short, tmp_path):
        folder = tmp_path / "save"
        job = run_cli.start(waiting(cli.train), *short, "--save-dir", folder, "--max-update", 2)
        for _ in range(400):
            if (folder / save_dir.LOCK_NAME).exists() and (folder / save_dir.LOCK_NAME).stat().st_size:
                break
            time.sleep(0.05)
        refuses(parts=[f"--save-dir {folder} is in use by process {job.pid} on "])
        (tmp_path / "go").touch()
        job.wait().check()
        assert (folder / "checkpoint_last.pt").exists()

    def test_lock_dies_with_the_process(self, run_cli, tmp_path):
        """Killed while a child of it, as a data loader's worker is, lives on."""
        child = tmp_path / "child"

        def holder():
            save_dir.lock(str(tmp_path))
            if os.fork() == 0:
                child.write_text(str(os.getpid()))
                time.sleep(30)
                os._exit(0)
            while not child.exists() or not child.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)

        assert run_cli(holder).code == -9
        run_cli(lambda: save_dir.lock(str(tmp_path))).check()
        os.kill(int(child.read_text()), 9)

    def test_lock_again_in_one_process(self, tmp_path):
        save_dir.lock(str(tmp_path))
        save_dir.lock(str(tmp_path))

    def test_leftovers_are_removed(self, tmp_path):
        leftover = tmp_path / f"{save_dir.TEMPORARY_PREFIX}123.checkpoint_last.pt"
        leftover.touch()
        save_dir.prepare(str(tmp_path))
        assert not leftover.exists()

    def test_no_save_needs_no_folder(self, tmp_path):
        save_dir.expect_writes(False)
        try:
            save_dir.prepare(str(tmp_path / "save"))
        finally:
            save_dir.expect_writes(True)
        assert not (tmp_path / "save").exists()


def assert_read_only(folder):
    with pytest.raises(UserError, match=rf"--save-dir {folder}: cannot write there \(Permission denied\)"):
        save_dir.prepare(str(folder))


def waiting(main):
    """Run ``main`` until it builds its model, then wait for the file ``go`` beside the save-dir."""

    def run():
        import sys

        from fairseq.tasks.translation import TranslationTask

        build = TranslationTask.build_model
        go = Path(sys.argv[sys.argv.index("--save-dir") + 1]).parent / "go"

        def build_model(*args, **kwargs):
            while not go.exists():
                time.sleep(0.02)
            return build(*args, **kwargs)

        TranslationTask.build_model = build_model
        return main()

    return run


class TestTraining:
    def test_loss_is_nan(self, refuses, saved):
        """Weights that are not numbers, loaded into a run, stop it before anything of them is saved."""
        state = checkpoint_io.read(str(saved / "checkpoint_last.pt"))
        state["model"]["decoder.layers.0.fc1.bias"].fill_(float("nan"))
        checkpoint_io.write(state, str(saved.parent / "nan.pt"))
        line = refuses("--restore-file", saved.parent / "nan.pt", "--save-interval-updates", 1, parts=["not finite"])
        assert "crash.pt" in line

    def test_fp16_without_a_gpu(self, refuses, saved):
        refuses("--fp16", parts=["--fp16 needs a GPU", "--bf16"])

    @pytest.mark.parametrize("flag", ["memory_efficient_fp16", "fp16_no_flatten_grads"])
    def test_fp16_that_runs_on_a_cpu(self, flag):
        common = argparse.Namespace(fp16=True, tpu=False, cpu=True, memory_efficient_fp16=False)
        common.fp16_no_flatten_grads = False
        with pytest.raises(UserError, match="--cpu is given"):
            guards.check_precision(common, gpu=False)
        guards.check_precision(common, gpu=True)
        setattr(common, flag, True)
        guards.check_precision(common, gpu=False)


class TestReport:
    def test_known_errors_are_one_line(self, capsys):
        for error, text in (
            (UserError("a\n b"), "error: a b\n"),
            (
                FileNotFoundError("Dataset not found: valid2 (bin)"),
                "error: Dataset not found: valid2 (bin); is the data folder whole, and are the languages and the "
                "subset's name right?\n",
            ),
            (FileNotFoundError(2, "No such file or directory", "x.txt"), "error: x.txt: No such file or directory\n"),
        ):
            assert errors.report(error) == 1
            assert capsys.readouterr().err == text
        errors.report(FloatingPointError("gradients are Nan/Inf"))
        assert "not finite (gradients are Nan/Inf)" in capsys.readouterr().err

    def test_others_keep_their_traceback(self, capsys):
        with pytest.raises(ValueError) as caught:
            json.loads("{")
        assert errors.report(caught.value) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback")
        assert lines[-1].startswith("error: JSONDecodeError: Expecting property name")

    def test_errors_of_spawned_ranks(self, capsys):
        text = (
            "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
            '  File "x.py", line 1, in f\nfairseq_plugin.errors.UserError: --save-dir is in use\n'
        )
        errors.report(torch.multiprocessing.ProcessRaisedException(text, 1, 5))
        assert capsys.readouterr().err == "error: --save-dir is in use\n"

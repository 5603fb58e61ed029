"""Checkpoint files: written atomically, read by an allow-list, damaged ones recognised."""

import argparse
import os
import resource

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf

from fairseq_plugin import checkpoint_io
from fairseq_plugin.checkpoint_io import DamagedCheckpoint
from fairseq_plugin.errors import UserError


@pytest.fixture
def small(tmp_path):
    """A checkpoint of one tensor."""
    path = tmp_path / "checkpoint_1_7.pt"
    state = {"model": {"weight": torch.arange(50000.0)}, "optimizer_history": [{"num_updates": 7}]}
    checkpoint_io.write(state, str(path))
    return path


class TestFiles:
    def test_write_and_copy(self, small):
        checkpoint_io.copy(str(small), str(small.with_name("checkpoint_last.pt")))
        assert small.read_bytes() == small.with_name("checkpoint_last.pt").read_bytes()
        assert sorted(os.listdir(small.parent)) == ["checkpoint_1_7.pt", "checkpoint_last.pt"]
        assert small.stat().st_ino != small.with_name("checkpoint_last.pt").stat().st_ino

    def test_fairseq_writes_through_it(self, small, monkeypatch):
        calls = []
        for name in ("write", "copy"):
            monkeypatch.setattr(checkpoint_io, name, lambda *a, _name=name: calls.append((_name, *a)))
        checkpoint_utils.torch_persistent_save({"model": {}}, "a.pt")
        assert checkpoint_utils.PathManager.copy("a.pt", "b.pt", overwrite=True)
        assert calls == [("write", {"model": {}}, "a.pt"), ("copy", "a.pt", "b.pt")]

    @pytest.mark.parametrize("action", ["write", "copy"])
    def test_full_disk_leaves_the_old_file(self, small, run_cli, action):
        old = small.with_name("checkpoint_last.pt")
        old.write_bytes(b"the old one")

        def full_disk():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
            if action == "write":
                checkpoint_io.write({"model": {"weight": torch.ones(50000)}}, str(old))
            else:
                checkpoint_io.copy(str(small), str(old))

        result = run_cli(full_disk)
        assert result.code != 0
        assert f"UserError: {old}: cannot be written (File too large)" in result.err
        assert old.read_bytes() == b"the old one"
        assert sorted(os.listdir(small.parent)) == ["checkpoint_1_7.pt", "checkpoint_last.pt"]

    def test_error_while_renaming(self, small, monkeypatch):
        before = small.read_bytes()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="No space left on device"):
            checkpoint_io.write({"model": {}}, str(small))
        assert small.read_bytes() == before
        assert os.listdir(small.parent) == [small.name]

    def test_synced_before_it_is_renamed(self, small, monkeypatch):
        calls = []
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name: (calls.append(_name), _real(*a)))
        checkpoint_io.write({"model": {}}, str(small))
        assert calls == ["fsync", "replace", "fsync"]

    @pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_truncated(self, tmp_path, part, zipped):
        path = tmp_path / "checkpoint_last.pt"
        torch.save({"model": {"weight": torch.ones(3000)}}, path, _use_new_zipfile_serialization=zipped)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])
        with pytest.raises(DamagedCheckpoint, match=r"checkpoint_last.pt: not a whole checkpoint"):
            checkpoint_io.read(str(path))

    def test_newest_whole(self, small):
        folder = small.parent
        for updates, name in ((9, "checkpoint_2_9.pt"), (8, "checkpoint_best.pt"), (99, "crash.pt")):
            checkpoint_io.write({"model": {}, "optimizer_history": [{"num_updates": updates}]}, str(folder / name))
        (folder / "checkpoint_3_12.pt").write_bytes((folder / "checkpoint_2_9.pt").read_bytes()[:-30])
        assert checkpoint_io.newest_whole(str(folder)) == str(folder / "checkpoint_2_9.pt")
        os.remove(folder / "checkpoint_2_9.pt")
        assert checkpoint_io.newest_whole(str(folder)) == str(folder / "checkpoint_best.pt")
        old = {"model": {}, "optimizer_history": [{"num_updates": 20}]}
        torch.save(old, folder / "checkpoint9.pt", _use_new_zipfile_serialization=False)
        assert checkpoint_io.newest_whole(str(folder)) == str(folder / "checkpoint9.pt")
        assert checkpoint_io.newest_whole(str(folder), suffix="-shard0") is None
        assert checkpoint_io.newest_whole(str(folder / "nowhere")) is None


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestAllowList:
    def test_code_is_not_run(self, tmp_path):
        torch.save({"model": {}, "extra_state": RunsCode(tmp_path / "made")}, tmp_path / "evil.pt")
        for load in (checkpoint_io.read, checkpoint_utils.load_checkpoint_to_cpu):
            with pytest.raises(UserError, match=r"evil.pt: holds posix.mkdir"):
                load(str(tmp_path / "evil.pt"))
        assert not (tmp_path / "made").exists()

    def test_types_of_fairseq_checkpoints(self, tmp_path):
        cfg = OmegaConf.create({"model": {"arch": "x", "lr": [0.1, 2], "flag": True, "none": None}})
        meters = {"value": np.float64(2.5), "count": np.int64(3), "array": np.arange(3, dtype=np.float32)}
        state = {"model": {}, "args": argparse.Namespace(arch="x"), "cfg": cfg, "extra_state": {"metrics": meters}}
        torch.save(state, tmp_path / "checkpoint.pt")
        loaded = checkpoint_io.read(str(tmp_path / "checkpoint.pt"))
        assert loaded["cfg"] == cfg
        assert loaded["args"] == state["args"]
        assert loaded["extra_state"]["metrics"]["value"] == 2.5
        assert loaded["extra_state"]["metrics"]["array"].tolist() == [0, 1, 2]

    def test_not_a_checkpoint(self, tmp_path):
        torch.save({"weight": torch.ones(1)}, tmp_path / "tensor.pt")
        with pytest.raises(UserError, match="not a fairseq checkpoint"):
            checkpoint_io.read(str(tmp_path / "tensor.pt"))

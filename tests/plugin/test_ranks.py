"""Several ranks on the CPU: spawned ones know both user folders, and two ranks equal one with --update-freq 2."""

import argparse
import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from fairseq_plugin import cli, guards, rank_options
from fairseq_plugin.errors import UserError
from fairseq_plugin.ports import free_port
from tests.plugin.test_bad_input import assert_refused

ROOT = Path(__file__).resolve().parents[2]
USER_MODULE = """
from fairseq.models import register_model_architecture
from fairseq.models.transformer import tiny_architecture

register_model_architecture("ls_transformer", "ranks_transformer")(tiny_architecture)
"""
UPDATES = 6


def losses(log: str) -> dict[int, float]:
    steps = (json.loads(line) for line in re.findall(r"\| train_inner \| (\{.*\})", log))
    return {int(step["num_updates"]): float(step["loss"]) for step in steps}


@pytest.fixture(scope="module")
def arguments(train_arguments):
    logs = ["--log-format", "json", "--log-interval", 1, "--disable-validation"]
    return [*train_arguments, *logs, "--dropout", 0, "--clip-norm", 1, "--max-update", UPDATES]


@pytest.fixture(scope="module")
def alone(run_cli, arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return losses(run_cli(cli.train, *arguments, "--update-freq", 2, "--save-dir", folder).check().out)


def test_spawned_ranks(launcher_script, arguments, alone, tmp_path):
    """The installed script, started afresh: fairseq spawns interpreters, which have both user folders; c10d.

    Log lines come in fairseq's format on stdout although the plugin is imported before fairseq sets up its log.
    """
    (tmp_path / "ranks_module").mkdir()
    (tmp_path / "ranks_module" / "__init__.py").write_text(USER_MODULE)
    ranks = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--save-dir", "save", "--no-save"]
    users = ["--user-dir", "ranks_module", "--arch", "ranks_transformer"]
    command = [*launcher_script("lightseq-train", "fairseq_plugin.cli:train"), *arguments, *ranks, *users]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(argument) for argument in command], capture_output=True, text=True, timeout=170, env=env, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert losses(result.stdout) == pytest.approx(alone, rel=1e-5)
    assert re.search(
        r"^\d{4}-\d\d-\d\d .* \| INFO \| fairseq_cli\.train \| model: LSTransformerModel", result.stdout, re.MULTILINE
    )
    assert "Warning" not in result.stderr


def test_ranks_of_a_launcher_and_their_resume(run_cli, arguments, alone, tmp_path):
    """Ranks started by torchrun (here: forks with its variables), legacy_ddp; the second half from a checkpoint."""
    ranks = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    ranks += ["--save-dir", tmp_path / "save", "--save-interval-updates", 3]

    def run(*extra: object) -> dict[int, float]:
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        jobs = [
            run_cli.start(cli.train, *arguments, *ranks, *extra, env={**env, "RANK": str(rank)}, cwd=tmp_path)
            for rank in range(2)
        ]
        return losses([job.wait(120).check() for job in jobs][0].out)

    first = run("--max-update", 3)
    assert list(first) == [1, 2, 3]
    assert {**first, **run()} == pytest.approx(alone, rel=1e-5)


class TestTorchrunWithoutWorldSize:
    """fairseq's world size is 1 there, so each process would train alone, with its own log and the same losses."""

    LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}

    @pytest.mark.parametrize("rank", [0, 1])
    def test_refused(self, run_cli, arguments, tmp_path, rank):
        env = {**self.LAUNCHED, "RANK": str(rank)}
        result = run_cli(cli.train, *arguments, "--save-dir", tmp_path / "save", env=env, cwd=tmp_path)
        assert_refused(result, "WORLD_SIZE=2", "add --distributed-world-size 2 --distributed-backend gloo")
        assert not (tmp_path / "save").exists()

    @pytest.mark.parametrize(
        ("changed", "environment"),
        [
            ({"distributed_world_size": 2}, {}),
            ({"distributed_init_method": "tcp://localhost:1"}, {}),
            ({}, {"WORLD_SIZE": "1"}),
            ({}, {"RANK": None}),
        ],
    )
    def test_others_train(self, monkeypatch, changed, environment):
        for name, value in {**self.LAUNCHED, "RANK": "1", **environment}.items():
            if value is not None:
                monkeypatch.setenv(name, value)
        one = {"distributed_world_size": 1, "distributed_init_method": None}
        guards.check_ranks(argparse.Namespace(**{**one, **changed}), cpu=False)
        for name, value in {**self.LAUNCHED, "RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="add --distributed-world-size 2, or start one process$"):
            guards.check_ranks(argparse.Namespace(**one), cpu=False)


class TestRanksThatCannotStart:
    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ([], ["--distributed-backend nccl", "--distributed-backend gloo"]),
            (["--distributed-backend", "nonsense"], ["--distributed-backend nonsense: must be one of", "gloo"]),
            (["--distributed-backend", "gloo", "--distributed-rank", 2], ["--distributed-rank 2: must be from 0 to 1"]),
        ],
        ids=["default backend", "unknown backend", "rank"],
    )
    def test_refused(self, run_cli, arguments, tmp_path, options, parts):
        ranks = ["--distributed-world-size", 2, "--save-dir", tmp_path / "save"]
        assert_refused(run_cli(cli.train, *arguments, *ranks, *options), *parts)
        assert not (tmp_path / "save").exists()

    @pytest.mark.parametrize(("size", "backend", "cpu"), [(1, "nccl", True), (2, "nccl", False), (2, "cpu:gloo", True)])
    def test_others_start(self, size, backend, cpu):
        options = {"distributed_world_size": size, "distributed_rank": 0, "distributed_backend": backend}
        guards.check_start(argparse.Namespace(**options), cpu)


class TestRanksThatDisagree:
    """Which would wait for each other for ever, or train different models."""

    @pytest.mark.parametrize(
        ("section", "values", "message"),
        [
            ("optimization", ({"update_freq": [1]}, {"update_freq": [2]}), r"--update-freq: \[1\] on rank 0 but \[2\]"),
            ("optimizer", ({"_name": "ls_adam"}, {"_name": "adam"}), "--optimizer: ls_adam on rank 0 but adam"),
            ("dataset", ({}, {"curriculum": None}), "--curriculum: absent on rank 0 but None"),
            ("common", ({"seed": 1, "user_dir": "a"}, {"seed": 1, "user_dir": "b"}), None),
            ("common", ({"log_interval": 1}, {"log_interval": 9}), None),
        ],
    )
    def test_options(self, monkeypatch, section, values, message):
        parallel = argparse.Namespace(distributed_world_size=3, ddp_backend="c10d")
        ranks = [
            argparse.Namespace(distributed_training=parallel, **{section: OmegaConf.create(value)}) for value in values
        ]
        self.meet(monkeypatch, [rank_options._given(cfg, torch.nn.Linear(2, 3)) for cfg in (ranks[0], *ranks)])
        with pytest.raises(UserError, match=f"{message} on rank 2;") if message else contextlib.nullcontext():
            rank_options.check_options(ranks[1], torch.nn.Linear(2, 3))

    def test_parameters(self, monkeypatch):
        parallel = argparse.Namespace(distributed_world_size=2, ddp_backend="c10d")
        cfg = argparse.Namespace(distributed_training=parallel)
        self.meet(monkeypatch, [rank_options._given(cfg, torch.nn.Linear(width, 3)) for width in (2, 4)])
        with pytest.raises(UserError, match=r"parameter weight: \(3, 2\) on rank 0 but \(3, 4\) on rank 1"):
            rank_options.check_options(cfg, torch.nn.Linear(4, 3))

    @staticmethod
    def meet(monkeypatch, given):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(given))
        monkeypatch.setattr(dist, "all_gather_object", lambda found, _: found.__setitem__(slice(None), given))

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (["--ls-shard-update"], "--ls-shard-update: False on rank 0 but True on rank 1"),
            (["--max-source-positions", 12], "number of training batches: "),
        ],
    )
    def test_all_end(self, run_cli, arguments, tmp_path, option, message):
        ranks = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--distributed-no-spawn", "--no-save"]
        ranks += ["--distributed-init-method", (tmp_path / "meeting").as_uri()]
        jobs = [
            run_cli.start(cli.train, *arguments, *ranks, "--distributed-rank", rank, *(option * rank))
            for rank in range(2)
        ]
        for job in jobs:
            assert_refused(job.wait(60), message, "start all ranks with the same options and data")

"""Two GPUs of one host through NCCL equal one GPU with twice the ``--update-freq``, whatever the shards look like.

As tests/plugin/test_data_parallel.py, which does the same on the CPU: sixty sentence pairs in batches of twelve make a
group of four and a group of one, in which the second rank repeats a dummy batch. Sentences are sorted by length, so the
ranks' batches have different shapes. Every run is processes of its own, as a process that has used CUDA cannot fork.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fairseq_plugin.ports import free_port
from ls_train.testing import assert_accurate
from tests.plugin.checkpoint_bits import assert_same_bits
from tests.plugin.training_log import losses
from tests.plugin.watched_train import UPDATE

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(280),
]

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 6
TYPES = {torch.float32: [], torch.float16: ["--fp16"], torch.bfloat16: ["--bf16"]}
WATCHED = ["-m", "tests.plugin.watched_train"]
# NVLink multicast needs rights that a container may not have; NCCL's rings and trees give the same sums.
NCCL = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# (name, options); EMA is one of the options that leave ls_adam to fairseq's own step and wrapper.
WAYS = {
    "ls_adam": {
        "c10d": (["--ddp-backend", "c10d"], "bare"),
        "c10d, sharded": (["--ddp-backend", "c10d", "--ls-shard-update"], "bare"),
        "legacy_ddp": (["--ddp-backend", "legacy_ddp"], "bare"),
        "c10d with EMA": (["--ddp-backend", "c10d", "--store-ema"], "wrapped"),
    },
    "adam": {
        "c10d": (["--ddp-backend", "c10d"], "wrapped"),
        "legacy_ddp": (["--ddp-backend", "legacy_ddp"], "wrapped"),
    },
}


@dataclass
class Run:
    """A command under way; its output goes to a file, so that no pipe fills up while others are waited for."""

    process: subprocess.Popen
    log: Path

    def wait(self, limit: float = 240) -> str:
        """Return what it printed; a command that fails or does not end fails the test."""
        try:
            end = f"exit code {self.process.wait(limit)}"
        except subprocess.TimeoutExpired:
            end = f"no end after {limit} s"
        text = self.log.read_text(errors="replace")
        assert end == "exit code 0", f"{end}\n{text[-20000:]}"
        return text


@pytest.fixture
def start(tmp_path):
    """Start commands; what still runs at the end of the test is killed."""
    runs = []

    def launch(name: str, *command: object, **environment: str) -> Run:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **NCCL, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
        log = tmp_path / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(argument) for argument in command],
                stdout=output, stderr=subprocess.STDOUT, env=env, cwd=tmp_path, start_new_session=True,
            )  # fmt: skip
        runs.append(Run(process, log))
        return runs[-1]

    yield launch
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, 9)
            run.process.wait()


@pytest.fixture
def train(start, arguments, tmp_path):
    """Start a training on one GPU or on both, the ranks spawned by fairseq; its checkpoints go to ``name``."""

    def run(name: str, ranks: int, *options: object, **environment: str) -> Run:
        fixed = [*arguments, "--distributed-world-size", ranks, "--save-dir", tmp_path / name]
        if ranks == 1:
            environment = {"CUDA_VISIBLE_DEVICES": str(len(name) % 2), **environment}
        return start(name, sys.executable, *WATCHED, *fixed, *options, **environment)

    return run


@pytest.fixture(scope="module")
def arguments(train_arguments):
    on_gpu = [argument for argument in train_arguments if argument != "--cpu"]
    return [
        *(*on_gpu, "--train-subset", "valid", "--batch-size", 12, "--lr", 5e-3, "--clip-norm", 1, "--dropout", 0),
        *("--max-update", UPDATES, "--log-format", "json", "--log-interval", 1),
        # With the usual 1e-8 Adam makes a full step of the rounding noise in gradients that are zero (k_proj.bias).
        *("--adam-eps", 1e-5, "--no-epoch-checkpoints", "--seed", 7),
    ]


def updates(log: str, rank: int) -> list[dict]:
    """Return what a rank printed of its steps."""
    found = [json.loads(line) for line in re.findall(rf"{UPDATE}(\{{.*?\}})", log)]
    return [update for update in found if update["rank"] == rank]


def assert_ranks_agree(log: str, count: int = UPDATES) -> None:
    """Assert that both ranks made ``count`` steps on their own devices and hold the same bits after each of them."""
    first, second = (updates(log, rank) for rank in (0, 1))
    assert len(first) == len(second) == count
    assert {(update["device"], update["current"]) for update in first} <= {("cuda:0", 0), ("cuda", 0)}
    assert {(update["device"], update["current"]) for update in second} <= {("cuda:1", 1), ("cuda", 1)}
    assert [update["bits"] for update in first] == [update["bits"] for update in second]
    assert len({update["bits"] for update in first}) == count


def assert_losses_match(found: list[float], alone: list[float], exact: list[float], dtype: torch.dtype) -> None:
    """Assert the rule of ls_train.testing: at most twice the error that one GPU makes at ``dtype``, and one unit."""
    assert len(found) == len(alone) == len(exact)
    assert exact[-1] < exact[0] - 0.5, "the training must change something"
    actual, reference, native = (torch.tensor(series, dtype=torch.float64) for series in (found, exact, alone))
    assert_accurate(actual, reference, dtype, None if dtype == torch.float32 else native, "losses")


@pytest.mark.parametrize("optimizer", WAYS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_one_gpu(train, optimizer, dtype):
    """Uneven last groups and dummy batches, ``lightseq-train --distributed-world-size 2``, every way of summing."""
    alone = ["--optimizer", optimizer, "--update-freq", 4]
    exact = train("exact", 1, *alone)
    single = train("single", 1, *alone, *TYPES[dtype])
    pairs = {
        name: train(name, 2, "--optimizer", optimizer, "--update-freq", 2, *options, *TYPES[dtype])
        for name, (options, _) in WAYS[optimizer].items()
    }
    logs = {name: pair.wait() for name, pair in pairs.items()}
    reference, native = losses(exact.wait()), losses(single.wait())
    for name, log in logs.items():
        assert_losses_match(losses(log), native, reference, dtype)
        assert_ranks_agree(log)
        assert {update["way"] for update in updates(log, 1)} == {WAYS[optimizer][name][1]}, name
        shapes = [updates(log, rank)[0]["shapes"] for rank in (0, 1)]
        assert shapes[0] != shapes[1], "the ranks' batches must differ in shape"
        assert any(None in update["shapes"] for update in updates(log, 1)), "no shard of the second rank was empty"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_transformer_base_under_torchrun(start, train, arguments, tmp_path, dtype):
    """Gradients of 60 million elements go out in pieces while the backward runs; ranks of a launcher."""
    base = ["--arch", "ls_transformer", "--lr", 1e-3, "--no-save", "--ls-cuda-graph", "off"]
    exact = train("exact", 1, *base, "--update-freq", 2)
    base += TYPES[dtype]
    single = train("single", 1, *base, "--update-freq", 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    pair = start("pair", *torchrun, *WATCHED, *arguments, *base, "--save-dir", tmp_path / "pair").wait()
    assert_losses_match(losses(pair), losses(single.wait()), losses(exact.wait()), dtype)
    assert_ranks_agree(pair)


def test_installed_launcher(start, launcher_script, train, arguments, tmp_path):
    """The script that users call, without anything that watches; three digits of the loss are logged."""
    alone = train("alone", 1, "--fp16", "--update-freq", 2)
    script = launcher_script("lightseq-train", "fairseq_plugin.cli:train")
    options = [*arguments, "--fp16", "--distributed-world-size", 2, "--save-dir", tmp_path / "pair"]
    log = start("pair", *script, *options).wait()
    assert losses(log) == pytest.approx(losses(alone.wait()), abs=2e-2)
    assert "distributed init (rank 1)" in log


def test_empty_shard(train):
    """All sentences in one batch: the second rank has none, neither to train on nor to validate."""
    options = ["--batch-size", 100, "--max-tokens", 4000, "--max-update", 2, "--no-save"]
    alone, pair = train("alone", 1, *options), train("pair", 2, *options)
    log, expected = pair.wait(), alone.wait()
    for tag in ("train_inner", "valid"):
        assert len(losses(expected, tag)) == 2
        assert losses(log, tag) == pytest.approx(losses(expected, tag), rel=1e-5)
    assert [update["shapes"] for update in updates(log, 1)] == [[None], [None]]
    assert_ranks_agree(log, 2)


GRAPHS = {
    "a step": ["--dropout", 0.1],
    "micro-batches": ["--update-freq", 2, "--dropout", 0.1, "--attention-dropout", 0.1],
    "overflows": ["--fp16-init-scale", 2**22, "--dropout", 0.1],
    "base": ["--arch", "ls_transformer", "--lr", 1e-3, "--dropout", 0.1],
    "sharded": ["--dropout", 0.1, "--ls-shard-update"],
    "micro-batches, sharded": ["--update-freq", 2, "--dropout", 0.1, "--ls-shard-update"],
    "base, sharded": ["--arch", "ls_transformer", "--lr", 1e-3, "--dropout", 0.1, "--ls-shard-update"],
}


@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS.keys())
def test_graphs(train, options):
    """Pieces leave behind marks in a replayed backward; the same bits where one rank or both run the rows eagerly."""
    # One after another: ranks of several runs on one GPU wait for each other, and a race would hide.
    bits = []
    for uncaptured in ("", "1", "0,1"):
        words = [*options, "--fp16", "--ls-cuda-graph", "auto", "--max-update", 10, "--no-save", "--disable-validation"]
        log = train(f"pair {uncaptured}", 2, *words, UNCAPTURED=uncaptured).wait(90)
        first, second = (updates(log, rank) for rank in (0, 1))
        assert [step["bits"] for step in first] == [step["bits"] for step in second]
        assert [steps[-1]["replays"] > 4 for steps in (first, second)] == [rank not in uncaptured for rank in "01"]
        bits.append([step["bits"] for step in first])
    assert len(set(bits[0])) >= 10
    assert bits[1] == bits[0]
    assert bits[2] == bits[0]


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "sharded"])
@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_resume(train, tmp_path, dtype, graphs, sharded):
    """Two ranks that start again within an epoch, dropout on, end with the bits of two that did not stop."""
    options = ["--update-freq", 2, "--dropout", 0.2, "--attention-dropout", 0.1, "--ls-cuda-graph", graphs]
    # Validation on the set that is trained on would end fairseq's epoch, which both share: no save would lie within it.
    options += [*TYPES[dtype], "--disable-validation", *["--ls-shard-update"] * sharded]
    whole = train("whole", 2, *options, "--save-interval-updates", 3).wait()
    (middle,) = (tmp_path / "whole").glob("checkpoint_*_3.pt")
    rest = train("rest", 2, *options, "--restore-file", middle).wait()
    assert losses(rest) == losses(whole)[3:]
    assert_same_bits(tmp_path / "whole" / "checkpoint_last.pt", tmp_path / "rest" / "checkpoint_last.pt")
    assert_ranks_agree(rest, UPDATES - 3)


# A replay does not run the code that makes the loss infinite.
EAGER = ["--optimizer", "ls_adam", "--ls-cuda-graph", "off"]


@pytest.mark.parametrize(
    "optimizer",
    [EAGER, [*EAGER, "--ls-shard-update"], ["--optimizer", "adam"]],
    ids=["ls_adam", "ls_adam, sharded", "adam"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_overflow_on_one_rank_skips_on_all(train, optimizer, rank):
    options = [*optimizer, "--fp16", "--update-freq", 2, "--no-save"]
    log = train("pair", 2, *options, OVERFLOW=f"{rank}:3").wait()
    first, second = (updates(log, which) for which in (0, 1))
    # One call more than updates: the third did nothing but halve the loss scale.
    assert len(first) == UPDATES + 1
    for steps in (first, second):
        assert [step["updates"] for step in steps] == [1, 2, 2, *range(3, UPDATES + 1)]
        assert steps[2]["bits"] == steps[1]["bits"]
        assert steps[2]["scale"] == steps[1]["scale"] / 2
        assert len({step["bits"] for step in steps}) == UPDATES
    assert [(step["bits"], step["scale"]) for step in first] == [(step["bits"], step["scale"]) for step in second]
    assert "gradient overflow detected" in log

"""kill -9 at random moments of a run, which is started again each time: the same final bits as without.

One kill in `make test`, twenty in `make soak`; ``LS_TRAIN_KILLS`` sets another number, ``LS_TRAIN_KILL_SEED`` repeats
the moments of a run that failed.
"""

import os
import random
import re
import signal
import time

import pytest

from fairseq_plugin import cli, save_dir
from tests.plugin.checkpoint_bits import assert_same_bits

SAVE_EVERY = 5
# A life does at most this many updates before it is killed, so the run is long enough for all kills.
LONGEST_LIFE = 9


@pytest.fixture
def seed():
    return int(os.environ.get("LS_TRAIN_KILL_SEED") or random.SystemRandom().randrange(10**6))


@pytest.mark.parametrize(
    "kills",
    [1, pytest.param(int(os.environ.get("LS_TRAIN_KILLS", 20)), marks=[pytest.mark.soak, pytest.mark.timeout(3000)])],
)
def test_killed_run_ends_with_the_same_bits(kills, seed, run_cli, train_arguments, tmp_path):
    """Dropout on, bfloat16 with float32 masters, several epochs, best and last checkpoints, old ones deleted."""
    command = [
        *(*train_arguments, "--bf16", "--seed", 3, "--dropout", 0.1, "--max-tokens", 200, "--log-interval", 1),
        *("--save-interval-updates", SAVE_EVERY, "--keep-interval-updates", 2, "--max-valid-steps", 1),
        *("--max-update", (kills + 1) * LONGEST_LIFE),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_cli(cli.train, *command, "--save-dir", whole, limit=900).check()
    moments = random.Random(seed)
    print(f"LS_TRAIN_KILL_SEED={seed}")
    for _ in range(kills):
        job = run_cli.start(cli.train, *command, "--save-dir", killed)
        where = kill_at_random(job, killed, moments)
        print(where)
        assert job.wait().code == -signal.SIGKILL
    result = run_cli(cli.train, *command, "--save-dir", killed, limit=900).check()
    assert "Loaded checkpoint" in result.out
    assert_same_bits(whole / "checkpoint_last.pt", killed / "checkpoint_last.pt")
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in killed.iterdir())


def kill_at_random(job, folder, moments) -> str:
    """Kill the run ``job`` within its life: while it starts, between two updates, or while a file is being written."""
    kind, first = moments.choice(["anywhere", "anywhere", "writing"]), 0
    # Without a checkpoint there would be nothing to go on from, and the first one must not be cut off.
    if not (folder / "checkpoint_last.pt").exists():
        kind, first = "anywhere", SAVE_EVERY + 1
    updates, extra = moments.randint(first, LONGEST_LIFE - 1), moments.uniform(0, 0.1)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        done = len(re.findall(r"\| train_inner \|", job.text(".out")))
        if kind == "writing" and any(folder.glob(f"{save_dir.TEMPORARY_PREFIX}{job.pid}.*.pt")):
            break
        if kind == "anywhere" and done >= updates and job.stem.with_suffix(".out").exists():
            time.sleep(extra)
            break
        assert done <= LONGEST_LIFE, "no checkpoint was seen being written"
        time.sleep(0.0005)
    os.killpg(job.pid, signal.SIGKILL)
    return f"{kind}: killed after {done} updates"

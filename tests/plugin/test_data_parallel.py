"""Two ranks on the CPU equal one process with twice the ``--update-freq``, whatever the shards look like.

The training set is so small that epochs end after two updates: five batches make a group of four and a group of one, in
which the second rank has an empty shard and repeats a dummy batch. Ranks are forks that meet through a file.
"""

import hashlib
import re
from collections.abc import Callable

import pytest
import torch

from fairseq_plugin import checkpoint_io, cli
from tests.plugin.checkpoint_bits import assert_same_bits
from tests.plugin.test_bad_input import assert_refused
from tests.plugin.training_log import losses, precise
from tests.recorded_graphs import RecordedGraphs

UPDATES = 5


def watched(main):
    """Return ``main`` that prints each backward's way of summing gradients, and the parameters' hash of each update."""

    def run():
        import fairseq_cli.train

        trainers = []
        kind, backward = fairseq_cli.train.Trainer, torch.Tensor.backward
        step = kind.train_step

        def train_step(self, *args, **kwargs):
            trainers[:] = [self]
            output = step(self, *args, **kwargs)
            bits = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
            print(f"parameters: {hashlib.sha256(bits).hexdigest()}", flush=True)
            return output

        def spied_backward(*args, **kwargs):
            trainer = trainers[0]
            direct = getattr(trainer.optimizer.optimizer, "direct_grads", False)
            print(f"backward: {'wrapped' if trainer.model is not trainer._model else 'bare'}{' direct' * direct}")
            return backward(*args, **kwargs)

        kind.train_step, torch.Tensor.backward = train_step, spied_backward
        return precise(main)()

    return run


def recorded(main, eager_ranks):
    """Return ``main`` with recorded operators as graphs, but on ``eager_ranks``, where no capture succeeds.

    Each rank prints the sizes of what it sums and at the end the number of its replays.
    """

    class NoGraphs(RecordedGraphs):
        def capture(self, function):
            raise RuntimeError("no graphs")

    def run():
        import torch.distributed as dist

        from fairseq_plugin import trainer
        from ls_train.optim import all_reduce

        built = []
        summing = {"_reduce_scatter": all_reduce._reduce_scatter, "all_reduce": dist.all_reduce}

        def spied(name):
            def send(*tensors, **kwargs):
                if kwargs.get("async_op"):
                    print(f"sent by {name}: {tensors[-1].numel()}", flush=True)
                return summing[name](*tensors, **kwargs)

            return send

        def captured_calls(self):
            built.append(trainer.CapturedCalls(graphs[dist.get_rank() in eager_ranks](), self._model))
            return built[-1]

        graphs = {True: NoGraphs, False: RecordedGraphs}
        all_reduce._reduce_scatter, dist.all_reduce = spied("_reduce_scatter"), spied("all_reduce")
        trainer.graph_obstacles = lambda *_: []
        trainer.LSTrainer._captured_calls = captured_calls
        try:
            return main()
        finally:
            print(f"replays: {built[0].replays}", flush=True)

    return run


@pytest.fixture(scope="module")
def arguments(train_arguments):
    """60 sentence pairs in batches of 12."""
    return [
        *(*train_arguments, "--train-subset", "valid", "--batch-size", 12, "--lr", 5e-3, "--clip-norm", 1),
        *("--dropout", 0, "--max-update", UPDATES, "--log-format", "json", "--log-interval", 1),
        # With the usual 1e-8 Adam makes a full step of the rounding noise in gradients that are zero (k_proj.bias).
        *("--adam-eps", 1e-5, "--no-epoch-checkpoints", "--seed", 7),
    ]


@pytest.fixture
def two_ranks(run_cli, tmp_path):
    """Run a training on two ranks; return their outputs."""

    def run(name: str, *options: object, main: Callable[[], None] = cli.train) -> list[str]:
        meeting = tmp_path / f"{name}.meeting"
        common = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--distributed-no-spawn"]
        common += ["--distributed-init-method", meeting.as_uri(), "--save-dir", tmp_path / name]
        jobs = [run_cli.start(watched(main), *options, *common, "--distributed-rank", rank) for rank in range(2)]
        return [job.wait(150).check().out for job in jobs]

    return run


@pytest.fixture(scope="module")
def alone(run_cli, arguments, tmp_path_factory):
    """One process with ``--update-freq 4``, by optimizer: its log and final parameters."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = {
        optimizer: run_cli.start(
            watched(cli.train),
            *(*arguments, "--optimizer", optimizer, "--update-freq", 4),
            *("--save-dir", folder / optimizer, "--disable-validation"),
        )
        for optimizer in ("ls_adam", "adam")
    }
    return {
        name: (job.wait(150).check().out, parameters(folder / name), moments(folder / name))
        for name, job in jobs.items()
    }


def backwards(log: str) -> set[str]:
    """Return whether the model was wrapped and gradients were direct in the backwards of a run."""
    return set(re.findall(r"^backward: (.*)$", log, re.MULTILINE))


def parameters(folder) -> dict[str, torch.Tensor]:
    model = checkpoint_io.read(str(folder / "checkpoint_last.pt"))["model"]
    return {name: tensor for name, tensor in model.items() if not name.endswith("version")}


def moments(folder) -> dict[str, torch.Tensor]:
    state = checkpoint_io.read(str(folder / "checkpoint_last.pt"))["last_optimizer_state"]["state"]
    # All in one: that of a k_proj.bias alone is rounding noise.
    entries = [state[key] for key in sorted(state)]
    return {name: torch.cat([entry[name].flatten() for entry in entries]) for name in ("exp_avg", "exp_avg_sq")}


def furthest(found, expected) -> float:
    """Return the largest distance of a tensor from the expected one, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


# EMA is one of the options that leave ls_adam to fairseq's own step and wrapper.
@pytest.mark.parametrize(
    "optimizer, options, way",
    [
        ("ls_adam", ["--ddp-backend", "c10d"], "bare direct"),
        ("ls_adam", ["--ddp-backend", "c10d", "--ls-shard-update"], "bare direct"),
        ("ls_adam", ["--ddp-backend", "legacy_ddp"], "bare direct"),
        ("ls_adam", ["--ddp-backend", "c10d", "--store-ema"], "wrapped"),
        ("adam", ["--ddp-backend", "c10d"], "wrapped"),
        ("adam", ["--ddp-backend", "legacy_ddp"], "wrapped"),
    ],
    ids=["c10d", "c10d, sharded", "legacy_ddp", "c10d with EMA", "c10d with adam", "legacy_ddp with adam"],
)
def test_equals_one_process(two_ranks, arguments, alone, tmp_path, optimizer, options, way):
    """Uneven last groups and dummy batches; both ranks hold the same bits after every update.

    Gradients are never direct under a wrapper: DistributedDataParallel learns of them from autograd, which sees none
    that a layer writes in place.
    """
    options = [*options, "--update-freq", 2, "--optimizer", optimizer, "--disable-validation"]
    outputs = two_ranks("save", *arguments, *options)
    log, expected, expected_moments = alone[optimizer]
    expected_losses = losses(log)
    assert len(expected_losses) == UPDATES
    assert expected_losses[-1] < expected_losses[0] - 0.5
    assert losses(outputs[0]) == pytest.approx(expected_losses, rel=1e-5)
    assert furthest(parameters(tmp_path / "save"), expected) < 1e-5
    assert furthest(moments(tmp_path / "save"), expected_moments) < 1e-4
    first, second = (re.findall(r"^parameters: (\w+)$", out, re.MULTILINE) for out in outputs)
    assert len(set(first)) == UPDATES
    assert first == second
    assert backwards(log) == {"bare direct" if optimizer == "ls_adam" else "bare"}
    assert all(backwards(out) == {way} for out in outputs)


def test_empty_shard(two_ranks, run_cli, arguments, tmp_path):
    """All sentences in one batch: the second rank has none, neither to train on nor to validate."""
    options = [*arguments, "--batch-size", 100, "--max-tokens", 4000, "--max-update", 2, "--no-save"]
    expected = run_cli(precise(cli.train), *options, "--save-dir", tmp_path / "alone").check().out
    found = two_ranks("save", *options)[0]
    for tag in ("train_inner", "valid"):
        assert len(losses(expected, tag)) == 2
        assert losses(found, tag) == pytest.approx(losses(expected, tag), rel=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "sharded"])
def test_resume(two_ranks, arguments, tmp_path, sharded):
    """Two ranks that start again within an epoch, dropout on, end with the bits of two that did not stop."""
    options = [*arguments, "--update-freq", 2, "--dropout", 0.2, "--attention-dropout", 0.1, "--disable-validation"]
    options += ["--ls-shard-update"] * sharded
    whole = two_ranks("whole", *options, "--save-interval-updates", 3)
    (middle,) = (tmp_path / "whole").glob("checkpoint_*_3.pt")
    rest = two_ranks("rest", *options, "--restore-file", middle)
    assert losses(rest[0]) == losses(whole[0])[3:]
    assert_same_bits(tmp_path / "whole" / "checkpoint_last.pt", tmp_path / "rest" / "checkpoint_last.pt")


@pytest.mark.parametrize("fewer", [True, False], ids=["two ranks, then one", "one rank, then two"])
def test_resume_with_other_ranks(two_ranks, run_cli, arguments, alone, tmp_path, fewer):
    """What ranks save has the state of all of them."""
    options = [*arguments, "--disable-validation", "--ls-shard-update"]
    together, single = ["--update-freq", 2], ["--update-freq", 4]
    if fewer:
        two_ranks("save", *options, *together, "--max-update", 2)
        run_cli(cli.train, *options, *single, "--save-dir", tmp_path / "save").check()
    else:
        run_cli(cli.train, *options, *single, "--max-update", 2, "--save-dir", tmp_path / "save").check()
        two_ranks("save", *options, *together)
    _, expected, expected_moments = alone["ls_adam"]
    assert furthest(parameters(tmp_path / "save"), expected) < 1e-5
    assert furthest(moments(tmp_path / "save"), expected_moments) < 1e-4


# The ranks that run eagerly. Of one batch an update the two runs compare what rank 0 replays and runs eagerly.
@pytest.mark.parametrize("update_freq, eager", [(1, ((1,), (0, 1))), (2, ((), (1,), (0, 1)))], ids=["1", "2"])
@pytest.mark.parametrize("way", ["all_reduce", "_reduce_scatter"])
def test_graphs(two_ranks, arguments, update_freq, eager, way):
    """Ranks in different shapes that replay, or of which one or both run the same rows eagerly: the same bits.

    Whatever a rank does it sends the same pieces in the same order.
    """
    options = [*arguments, "--update-freq", update_freq, "--dropout", 0.1, "--disable-validation", "--no-save"]
    options += ["--max-update", 8, *(["--ls-shard-update"] if way == "_reduce_scatter" else [])]
    found = []
    for eager_ranks in eager:
        outputs = two_ranks(f"eager {eager_ranks}", *options, main=recorded(cli.train, eager_ranks))
        sent = [re.findall(rf"^sent by {way}: (\d+)$", out, re.MULTILINE) for out in outputs]
        assert sent[0] == sent[1]
        assert len(sent[0]) >= 3 * 8
        replays = [int(re.search(r"^replays: (\d+)$", out, re.MULTILINE)[1]) for out in outputs]
        assert [count > 4 for count in replays] == [rank not in eager_ranks for rank in range(2)]
        found += [(re.findall(r"^parameters: (\w+)$", out, re.MULTILINE), sent[0]) for out in outputs]
    assert len(set(found[0][0])) == 8
    assert all(run == found[0] for run in found)


@pytest.mark.parametrize("failing", ["one rank", "all ranks"])
def test_what_fails_ends_all_ranks(run_cli, arguments, tmp_path, failing):
    """Ranks hold parts of the state: one that fails alone waits for nobody, and what all see at once is saved."""

    def run():
        import torch.distributed as dist

        from fairseq_plugin.device_step import DeviceStep

        step, calls = DeviceStep.run, []

        def third_fails(self, *args, **kwargs):
            calls.append(None)
            if len(calls) == 3 and failing == "all ranks":
                with torch.no_grad():
                    self._parameters[0].fill_(float("nan"))
            if len(calls) == 3 and failing == "one rank" and dist.get_rank() == 1:
                raise ValueError("a bad batch")
            return step(self, *args, **kwargs)

        DeviceStep.run = third_fails
        return cli.train()

    options = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--distributed-no-spawn"]
    options += ["--distributed-init-method", (tmp_path / "meeting").as_uri(), "--ls-shard-update"]
    options += ["--save-dir", tmp_path / "save"]
    jobs = [run_cli.start(run, *arguments, *options, "--distributed-rank", rank) for rank in range(2)]
    results = [job.wait(100) for job in jobs]
    assert all(result.code != 0 for result in results)
    if failing == "one rank":
        assert "a bad batch" in results[1].err
        assert_refused(results[0], "the connection to another rank broke", "its own output says why")
        assert "not saved: each rank has a part of it" in results[1].out
    else:
        assert all("gradients are Nan/Inf" in result.err for result in results)
        saved = torch.load(tmp_path / "save" / "crash.pt", weights_only=False)["last_optimizer_state"]["state"]
        assert all(entry["exp_avg"].abs().max() > 0 for entry in saved.values() if entry["exp_avg"].numel() > 100)

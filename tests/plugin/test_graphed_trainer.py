"""The plugin's training step as graphs, on the CPU with recorded operators in the place of CUDA graphs."""

import logging

import pytest
import torch
import torch.distributed as dist

from fairseq_plugin import step_options
from fairseq_plugin import trainer as plugin_trainer
from fairseq_plugin.data_parallel import Ranks
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from tests.plugin.test_trainer import FP16, assert_a_load_is_exact, assert_same_bits, precise_metrics, start  # noqa: F401
from tests.recorded_graphs import RecordedGraphs


class NoGraphs(RecordedGraphs):
    """Captures nothing: batches are rounded up as for graphs and run eagerly."""

    def capture(self, function):
        raise RuntimeError("no graphs")


@pytest.fixture
def graphed(start, monkeypatch):  # noqa: F811
    """Start a run whose steps are recorded and replayed."""
    monkeypatch.setattr(plugin_trainer, "graph_obstacles", lambda *_: [])

    def graphed(*options, kind=RecordedGraphs):
        monkeypatch.setattr(plugin_trainer, "CudaGraphs", lambda device: kind())
        run = start("--max-tokens", 200, *options, "--ls-cuda-graph", "on")
        run.calls = run.trainer._captured_calls()
        run.trainer._captured_calls = lambda: run.calls
        return run

    return graphed


OPTIONS = {
    "one graph a step": ["--dropout", 0.1, "--attention-dropout", 0.1, "--clip-norm", 1],
    "bf16, accuracy": ["--bf16", "--dropout", 0.1, "--report-accuracy"],
    "overflows": [*FP16, "--fp16-init-scale", 2**14, "--dropout", 0.1],
    "overflows in micro-batches": [*FP16, "--fp16-init-scale", 2**14, "--update-freq", 2, "--dropout", 0.1],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_replays_equal_eager_steps(graphed, options):
    """Bit for bit on the same rows: losses, skipped updates, weights, moments and learning rates."""
    options = [*options, "--log-interval", 4]
    eager, replayed = graphed(*options, kind=NoGraphs), graphed(*options)
    outputs = [run.steps(14) for run in (eager, replayed)]
    found, expected = ([output and output.get("loss") for output in run] for run in outputs)
    assert found == expected
    assert eager.calls.replays == 0
    assert replayed.calls.replays >= 5
    assert_same_bits(replayed.state(), eager.state())
    assert 5 <= replayed.trainer.get_num_updates() == eager.trainer.get_num_updates()
    assert ("--fp16" in options) == (eager.trainer.get_num_updates() < 14), "some are skipped"
    assert replayed.trainer.get_lr() == eager.trainer.get_lr()


def test_a_load_drops_what_was_captured(graphed, tmp_path):
    """A checkpoint that is loaded into a running training: the same updates as in a training that never stopped."""
    whole, resumed = graphed("--dropout", 0.1), graphed("--dropout", 0.1)
    assert_a_load_is_exact(whole, resumed, tmp_path, before=6, after=4)


def test_summary_is_logged(graphed, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("fairseq_plugin.device_step._FIRST_SUMMARY", 3)
    run = graphed()
    run.steps(6)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("CUDA graphs:")]
    assert "of 3 calls replayed" in line


def test_memory_that_runs_out_gives_the_batch_up(graphed, caplog):
    run = graphed()
    run.steps(2)
    run.calls.clear()
    run.step()
    run.calls._graphs.fail = torch.OutOfMemoryError("out of memory")
    assert run.step() is None
    assert run.trainer.get_num_updates() == 3
    run.steps(3)
    assert run.trainer.get_num_updates() == 6


def test_obstacles_are_named(start, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    start("--ls-cuda-graph", "on", "--checkpoint-activations")
    line = "--ls-cuda-graph on: steps run without graphs because of training on the CPU, --checkpoint-activations"
    assert line in caplog.text
    caplog.clear()
    for options in ((), ("--ls-cuda-graph", "auto"), ("--ls-cuda-graph", "off")):
        run = start(*options)
        assert run.cfg.optimizer.ls_cuda_graph == (options[1] if options else "auto")
        run.steps(1)
        assert "graphs" not in caplog.text


def test_auto_leaves_graphs_out_where_batches_keep_the_gpu_busy(start, monkeypatch, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    line = "--ls-cuda-graph auto: no graphs"
    assert start("--max-tokens", 200).trainer._replays is False  # the CPU
    monkeypatch.setattr(plugin_trainer, "graph_obstacles", lambda *_: [])
    assert start("--max-tokens", 200).trainer._replays is True
    assert line not in caplog.text
    monkeypatch.setattr(step_options, "_BUSY", 1)
    assert start("--max-tokens", 200, "--ls-cuda-graph", "on").trainer._replays is True
    assert start("--max-tokens", 200, "--ls-token-budget").trainer._replays is True
    with monkeypatch.context() as patch:
        patch.setattr(plugin_trainer.LSTrainer, "data_parallel_world_size", 2)
        assert start("--max-tokens", 200).trainer._replays is True
    assert line not in caplog.text
    assert start("--max-tokens", 200).trainer._replays is False
    assert caplog.text.count(line) == 1


def test_what_keeps_a_gpu_busy(monkeypatch):
    """Parameters of a layer, on average, times tokens; embeddings and projections do not count."""
    sizes = {"embed_dim": 8, "num_heads": 2, "ffn_dim": 16}
    layers = [LSTransformerEncoderLayer(**sizes), LSTransformerDecoderLayer(**sizes)]
    model = torch.nn.ModuleList([*layers, torch.nn.Linear(100, 100)])
    monkeypatch.setattr(step_options, "_BUSY", 50 * sum(p.numel() for layer in layers for p in layer.parameters()))
    assert step_options.keeps_busy(model, 100)
    assert not step_options.keeps_busy(model, 99)
    assert not step_options.keeps_busy(model, None)
    assert not step_options.keeps_busy(torch.nn.Linear(100, 100), 10**9)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_send_in_one_order(graphed, group, monkeypatch):
    """Whether a rank runs eagerly, captures or replays, the same pieces leave in the same order."""
    sent = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, *a, **k: sent.append(x.numel()) or all_reduce(x, *a, **k))
    states = []
    for kind in (NoGraphs, RecordedGraphs):
        run = graphed("--dropout", 0.1, "--update-freq", 2, kind=kind)
        run.trainer._ranks = Ranks(1, group, run.trainer.optimizer.optimizer, sharded=False)
        orders = []
        for _ in range(8):
            sent.clear()
            run.step()
            orders.append(tuple(sent))
        assert len(set(orders)) == 1
        assert len(orders[0]) > 2
        states.append(run.state())
    assert run.calls.replays > 4
    assert run.calls._graphs.marks == run.calls.captures * (len(orders[0]) - 1)
    assert_same_bits(*states)

"""Training steps as CUDA graphs on a GPU: equal to the same steps without graphs, whatever happens in between."""

import pytest
import torch

import ls_train
from fairseq_plugin.trainer import CudaGraphs
from tests.plugin.test_trainer import FP16, assert_a_load_is_exact, assert_same_bits, precise_metrics, start  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class NoGraphs:
    """Captures nothing: batches are rounded up as for graphs and run eagerly."""

    def __init__(self, device):
        pass

    def capture(self, function):
        raise RuntimeError("no graphs")

    def release(self):
        pass

    renew = mark = release


@pytest.fixture
def graphed(start, monkeypatch):  # noqa: F811
    """Start a run with graphs, or with the same rows and none."""

    def graphed(*options, kind=CudaGraphs):
        monkeypatch.setattr("fairseq_plugin.trainer.CudaGraphs", kind)
        run = start("--max-tokens", 2000, *options, "--ls-cuda-graph", "on", gpu=True)
        run.trainer._step  # noqa: B018 built now, with what was patched
        return run

    return graphed


def losses(run, count):
    return [output and output.get("loss") for output in run.steps(count)]


def replays(run):
    return run.trainer._step.graphs.replays


OPTIONS = {
    "fp32": [],
    "bf16, clip": ["--bf16", "--clip-norm", 1, "--report-accuracy"],
    "fp16, overflows": [*FP16, "--fp16-init-scale", 2**22],
    "bf16, dropout": ["--bf16", "--dropout", 0.1, "--attention-dropout", 0.1, "--activation-dropout", 0.1],
    "fp16, dropout, micro-batches": [*FP16, "--fp16-init-scale", 2**22, "--update-freq", 3, "--dropout", 0.1],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equal_to_eager_steps(graphed, options):
    """Bit for bit: losses, skipped updates, weights, moments, changing learning rates; with dropout the same masks."""
    eager, replayed = graphed(*options, kind=NoGraphs), graphed(*options)
    assert losses(replayed, 30) == losses(eager, 30)
    assert replays(eager) == 0
    assert replays(replayed) > 15
    assert_same_bits(replayed.state(), eager.state())


def test_unused_rows_change_the_order_of_additions_alone(start):  # noqa: F811
    options = ["--max-tokens", 2000, "--bf16", "--dropout", 0.1]
    eager, replayed = (start(*options, "--ls-cuda-graph", graphs, gpu=True) for graphs in ("off", "auto"))
    assert losses(replayed, 30) == pytest.approx(losses(eager, 30), rel=5e-3)
    assert replays(replayed) > 10


def test_resume_is_exact(graphed, tmp_path):
    options = [*FP16, "--dropout", 0.1]
    whole, resumed = graphed(*options), graphed(*options)
    assert_a_load_is_exact(whole, resumed, tmp_path, before=8, after=8)
    assert replays(resumed) > 0


def evaluate(run):
    """Validate a batch and translate another, longer than those of the training."""
    trainer, task = run.trainer, run.trainer.task
    trainer.begin_valid_epoch(1)
    batch = next(iter(run.epoch.next_epoch_itr(shuffle=False)))
    trainer.valid_step(batch)
    model = trainer.get_model()
    generator = task.build_generator([model.eval()], run.cfg.generation)
    tokens = torch.randint(4, 50, (3, 100), device=trainer.device)
    lengths = torch.full((3,), 100, device=trainer.device)
    task.inference_step(generator, [model], {"net_input": {"src_tokens": tokens, "src_lengths": lengths}})
    run.groups = iter(())


def test_evaluation_between_steps_changes_nothing(graphed):
    options = ["--bf16", "--dropout", 0.1]
    plain, evaluated = graphed(*options), graphed(*options)
    for run in (plain, evaluated):
        for _ in range(3):
            run.steps(6)
            run.groups = iter(())
            if run is evaluated:
                evaluate(run)
    assert replays(evaluated) > 8
    assert_same_bits(evaluated.state(), plain.state())


def test_memory_is_flat_and_near_eager(graphed):
    """Once all shapes have come nothing more is reserved; what is reserved is about what eager steps reserve."""
    reserved = {}
    for kind in (NoGraphs, CudaGraphs):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        run = graphed("--bf16", "--arch", "ls_transformer_iwslt_de_en", kind=kind)
        run.steps(40)
        middle = torch.cuda.memory_reserved()
        run.steps(40)
        assert torch.cuda.memory_reserved() <= middle + (1 << 21)
        reserved[kind] = torch.cuda.memory_reserved() - before
        del run
    assert reserved[CudaGraphs] <= 1.15 * reserved[NoGraphs] + (64 << 20), reserved


class Rows(torch.nn.Module):
    """Language model on packed rows."""

    def __init__(self):
        super().__init__()
        layer = ls_train.LSTransformerEncoderLayer.get_config(hidden_size=64, intermediate_size=128, nhead=4)
        self.table = torch.nn.Embedding(100, 64)
        self.layer = ls_train.LSTransformerEncoderLayer(layer)

    def forward(self, tokens, packing):
        return self.layer.forward_packed(self.table(tokens), packing, None, 0) @ self.table.weight.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphed_step_equals_eager(dtype):
    """Plain PyTorch: dropout seeds are drawn from torch's generator, the same ones with and without graphs."""
    results = []
    for graphs in (None, NoGraphs(None)):
        torch.manual_seed(0)
        model = Rows().cuda().to(dtype)
        optimizer = ls_train.FusedAdam(model.parameters(), lr=1e-3)
        step = ls_train.GraphedStep(model, torch.nn.functional.cross_entropy, optimizer, max_norm=1.0, graphs=graphs)
        found = []
        for update in range(12):
            generator = torch.Generator().manual_seed(update)
            lengths = torch.tensor([(9, 7, 16), (3, 4, 5)][update % 2])
            packing = ls_train.Packing.from_lengths(lengths, int(lengths.max()), torch.device("cuda"))
            tokens = torch.randint(100, (int(lengths.sum()),), generator=generator).cuda()
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + update)
            found.append(step((tokens, packing), tokens.roll(-1)).item())
        results.append((found, [parameter.detach().clone() for parameter in model.parameters()], step.calls.replays))
    (found, weights, count), (expected, expected_weights, none) = results
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))
    assert (count, none) == (10, 0)

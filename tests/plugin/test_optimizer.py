"""``ls_adam`` against fairseq's ``adam``, plain and inside fairseq's mixed-precision wrappers, and their states."""

import copy
import importlib
import logging

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf
from torch import nn

from ls_train.optim import DynamicLossScale, FusedAdam

UPDATES = 20
BATCH = 37


@pytest.fixture(scope="module", autouse=True)
def plugin():
    return importlib.import_module("fairseq_plugin.optimizer")


@pytest.fixture(scope="module")
def user_error():
    return importlib.import_module("fairseq_plugin.errors").UserError


class Network(nn.Module):
    """Tied weights, a layer that not every update uses (unless ``steady``), and losses as sums, as criteria give."""

    def __init__(self, dtype: torch.dtype = torch.float32, steady: bool = False) -> None:
        super().__init__()
        self.steady = steady
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, update: int) -> torch.Tensor:
        tokens = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(update))
        x = torch.tanh(self.middle(self.embedding(tokens)))
        if self.steady or update % 3:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.output(x).float(), (tokens * 3 + 1) % 11, reduction="sum")


def adam_options(name: str, **options) -> dict:
    return {
        **OmegaConf.to_container(OmegaConf.structured(FairseqAdamConfig), resolve=False),
        "_name": name,
        "adam_betas": "(0.9, 0.98)",
        "lr": [3e-3],
        "weight_decay": 0.01,
        "tpu": False,
        **options,
    }


def config(name: str, bf16: bool = False, init_scale: float = 4.0, **options):
    """The parts of fairseq's configuration that its mixed-precision wrappers read."""
    return OmegaConf.create(
        {
            "common": {
                "bf16": bf16,
                "fp16_no_flatten_grads": True,
                "fp16_init_scale": init_scale,
                "fp16_scale_window": 8,
                "fp16_scale_tolerance": 0.0,
                "threshold_loss_scale": None,
                "min_loss_scale": 1e-4,
            },
            "optimizer": adam_options(name, **options),
            "optimization": {"update_freq": [1]},
            "distributed_training": {"distributed_world_size": 1},
        }
    )


def plain(name: str, model: nn.Module, **options):
    return optim.build_optimizer(config(name, **options).optimizer, list(model.parameters()))


def train(model, optimizer, updates=range(UPDATES), clip=0.5) -> list[float]:
    """fairseq's order of events in an update."""
    losses = []
    for update in updates:
        optimizer.zero_grad()
        loss = model(update)
        optimizer.backward(loss)
        optimizer.multiply_grads(1.0 / BATCH)
        try:
            optimizer.clip_grad_norm(clip)
        except OverflowError:
            losses.append(float("nan"))
            continue
        optimizer.set_lr(3e-3 / (1 + update / 10))
        optimizer.step()
        losses.append(loss.item() / BATCH)
    return losses


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_losses_equal_fairseqs(weight_decay, clip):
    losses = []
    for name in ("adam", "ls_adam"):
        model = Network()
        losses.append(train(model, plain(name, model, weight_decay=weight_decay), clip=clip))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][-1] < losses[1][0]


def test_gradient_norm_is_fairseqs_before_clipping():
    norms = []
    for name in ("adam", "ls_adam"):
        model = Network()
        optimizer = plain(name, model)
        model(1).backward()
        optimizer.multiply_grads(torch.tensor(0.5))
        norms.append([optimizer.clip_grad_norm(0.1, lambda norm: norm * 2), optimizer.clip_grad_norm(0.0)])
        assert norms[-1][0].shape == ()
    torch.testing.assert_close(norms[1], norms[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_copies_of_fp16_optimizer(dtype):
    """--fp16 and --bf16: fairseq keeps the copies; the bf16 case fails if the loss factor is passed to step()."""
    losses = []
    for name in ("adam", "ls_adam"):
        model = Network(dtype)
        cfg = config(name, bf16=dtype == torch.bfloat16)
        losses.append(train(model, optim.FP16Optimizer.build_optimizer(cfg, list(model.parameters()))))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, nan_ok=True)
    assert losses[1][-1] < 0.9 * losses[1][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_efficient_optimizer(dtype):
    """The masters inside ls_adam do what FP16Optimizer's float32 copies do around fairseq's adam.

    Every layer is used in every update: FP16Optimizer takes a missing gradient for zero, the other one skips it.
    """
    bf16 = dtype == torch.bfloat16
    reference, model = Network(dtype, steady=True), Network(dtype, steady=True)
    wrapper = optim.FP16Optimizer.build_optimizer(config("adam", bf16), list(reference.parameters()))
    expected = train(reference, wrapper)
    wrapper = optim.MemoryEfficientFP16Optimizer.build_optimizer(config("ls_adam", bf16), list(model.parameters()))
    assert wrapper.supports_step_with_scale
    losses = train(model, wrapper)
    assert losses == pytest.approx(expected, rel=1e-4)
    state = wrapper.optimizer.state[model.middle.weight]
    assert state["exp_avg"].dtype == state["master"].dtype == torch.float32


def test_overflow_leaves_everything_as_it_was():
    model = Network(torch.float16)
    wrapper = optim.MemoryEfficientFP16Optimizer.build_optimizer(
        config("ls_adam", init_scale=4.0), list(model.parameters())
    )
    train(model, wrapper, range(3))
    before = copy.deepcopy((model.state_dict(), wrapper.optimizer.state_dict()["state"]))
    wrapper.scaler.loss_scale = 2.0**18
    (loss,) = train(model, wrapper, range(3, 4))
    assert loss != loss
    assert wrapper.scaler.loss_scale == 2.0**17
    torch.testing.assert_close((model.state_dict(), wrapper.optimizer.state_dict()["state"]), before, rtol=0, atol=0)


def test_loss_scale_on_the_device_equals_the_wrapper():
    """FusedAdam with DynamicLossScale skips the same updates and gives the same losses."""
    start = 2.0**17  # overflows at first, and again each time it has grown
    model, ours = Network(torch.float16, steady=True), Network(torch.float16, steady=True)
    wrapper = optim.MemoryEfficientFP16Optimizer.build_optimizer(
        config("ls_adam", init_scale=start), list(model.parameters())
    )
    expected, scales = [], []
    for update in range(UPDATES):
        expected += train(model, wrapper, range(update, update + 1))
        scales.append(wrapper.scaler.loss_scale)
    optimizer = FusedAdam(ours.parameters(), betas=(0.9, 0.98), weight_decay=0.01, eps_after_correction=False)
    scale = DynamicLossScale("cpu", start, scale_window=8)
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss = ours(update)
        (loss * scale.scale).backward()
        norm, found_inf = optimizer.grad_norm()
        optimizer.param_groups[0]["lr"] = 3e-3 / (1 + update / 10)
        optimizer.step(scale=scale.scale * BATCH, max_norm=0.5, norm=norm, found_inf=found_inf)
        scale.update(found_inf)
        assert scale.scale.item() == scales[update]
        if expected[update] == expected[update]:
            assert loss.item() / BATCH == pytest.approx(expected[update], rel=1e-4)
        else:
            assert found_inf.item() == 1
    assert 1 < sum(loss != loss for loss in expected) < UPDATES / 2
    assert max(scales[4:]) > min(scales)


def test_state_goes_to_and_from_fairseqs_adam(tmp_path):
    whole = Network()
    train(whole, plain("adam", whole))
    for first, second in (("adam", "ls_adam"), ("ls_adam", "adam"), ("ls_adam", "ls_adam")):
        model = Network()
        optimizer = plain(first, model)
        train(model, optimizer, range(10))
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
        weights, state = torch.load(tmp_path / "checkpoint.pt")
        resumed = Network()
        resumed.load_state_dict(weights)
        optimizer = plain(second, resumed)
        optimizer.load_state_dict(state, optimizer.optimizer_config)
        train(resumed, optimizer, range(10, UPDATES))
        torch.testing.assert_close(
            dict(resumed.named_parameters()), dict(whole.named_parameters()), rtol=1e-5, atol=1e-6
        )


def test_memory_efficient_state_round_trip_is_exact():
    model, resumed = Network(torch.bfloat16), Network(torch.bfloat16)
    build = optim.MemoryEfficientFP16Optimizer.build_optimizer
    wrapper = build(config("ls_adam", True), list(model.parameters()))
    train(model, wrapper, range(10))
    saved = copy.deepcopy((model.state_dict(), wrapper.state_dict()))
    expected = train(model, wrapper, range(10, UPDATES))
    wrapper = build(config("ls_adam", True), list(resumed.parameters()))
    resumed.load_state_dict(saved[0])
    wrapper.load_state_dict(saved[1], wrapper.optimizer_config)
    assert train(resumed, wrapper, range(10, UPDATES)) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compact_masters_change_no_loss(dtype):
    """--ls-compact-master: 20 updates with losses and checkpoints as without it, masters in 16 bits."""
    bf16 = dtype == torch.bfloat16
    build = optim.MemoryEfficientFP16Optimizer.build_optimizer
    models = [Network(dtype), Network(dtype)]
    wrappers = [
        build(config("ls_adam", bf16, ls_compact_master=compact), list(model.parameters()))
        for model, compact in zip(models, (True, False), strict=True)
    ]
    losses = [train(model, wrapper) for model, wrapper in zip(models, wrappers, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, nan_ok=True)
    state = wrappers[0].optimizer.state[models[0].middle.weight]
    assert "master" not in state
    assert state["remainder"].dtype == torch.int16
    saved = [wrapper.state_dict()["state"] for wrapper in wrappers]
    for ours, theirs in zip(saved[0].values(), saved[1].values(), strict=True):
        assert {k: v.dtype for k, v in ours.items() if k != "step"} == {
            k: v.dtype for k, v in theirs.items() if k != "step"
        }
        torch.testing.assert_close(ours["master"], theirs["master"], rtol=1e-4, atol=1e-5)


def test_compact_masters_of_float32_parameters(caplog):
    caplog.set_level(logging.INFO)
    model, reference = Network(), Network()
    losses = train(model, plain("ls_adam", model, ls_compact_master=True))
    assert losses == train(reference, plain("ls_adam", reference))
    assert [record.message for record in caplog.records] == [
        "--ls-compact-master: without effect, the parameters that ls_adam was given are float32"
    ]


def test_moments_of_fairseqs_memory_efficient_adam_load():
    model, resumed = Network(torch.float16), Network(torch.float16)
    wrappers = [
        optim.MemoryEfficientFP16Optimizer.build_optimizer(config(name), list(m.parameters()))
        for name, m in (("adam", model), ("ls_adam", resumed))
    ]
    train(model, wrappers[0], range(3))
    wrappers[1].load_state_dict(copy.deepcopy(wrappers[0].state_dict()))
    for theirs, ours in zip(model.parameters(), resumed.parameters(), strict=True):
        expected, actual = wrappers[0].optimizer.state[theirs], wrappers[1].optimizer.state[ours]
        assert torch.equal(actual["exp_avg"], expected["exp_avg"])
        assert int(actual["step"]) == expected["step"]
    assert wrappers[1].scaler.loss_scale == wrappers[0].scaler.loss_scale


def test_flat_float32_parameter_is_not_copied():
    """--fp16 with flat gradients hands over one parameter and reads and writes it and its gradient in place."""
    param = nn.Parameter(torch.ones(64))
    param.grad = torch.ones(64)
    optimizer = optim.build_optimizer(config("ls_adam", weight_decay=0.0).optimizer, [param])
    assert optimizer.supports_flat_params
    assert not optimizer.supports_step_with_scale
    place = param.data_ptr(), param.grad.data_ptr()
    optimizer.multiply_grads(0.5)
    optimizer.step()
    assert (param.data_ptr(), param.grad.data_ptr()) == place
    assert param.grad[0].item() == 0.5
    assert param[0].item() == pytest.approx(1 - 3e-3)


@pytest.mark.parametrize("option, flag", [("fp16_adam_stats", "--fp16-adam-stats"), ("use_old_adam", "--use-old-adam")])
def test_flags_that_ask_for_another_adam_are_refused(user_error, option, flag):
    with pytest.raises(user_error, match=flag):
        plain("ls_adam", Network(), **{option: True})


def test_options_of_the_flags_arrive():
    optimizer = plain("ls_adam", Network(), adam_eps=1e-6, adam_betas="(0.8, 0.9)", weight_decay=0.25)
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"], group["lr"]) == ((0.8, 0.9), 1e-6, 0.25, 3e-3)
    assert optimizer.get_lr() == 3e-3
    assert optimizer.optimizer.form.decoupled_weight_decay
    assert not optimizer.optimizer.form.eps_after_correction

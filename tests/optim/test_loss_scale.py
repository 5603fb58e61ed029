"""The device loss scale takes the same decisions as fairseq's scaler, overflow by overflow."""

import random
import re

import pytest
import torch

from ls_train.optim import DynamicLossScale

CASES = [
    {"init_scale": 128.0, "scale_window": 3},
    {"init_scale": 128.0, "scale_window": 5, "tolerance": 0.3},
    {"init_scale": 64.0, "scale_window": 4, "threshold": 8.0},
    {"init_scale": 8.0, "scale_window": 7, "scale_factor": 4.0, "tolerance": 0.5, "min_loss_scale": 0.25},
    {"init_scale": 1.0, "scale_window": 2, "min_loss_scale": 0.2},
]


@pytest.fixture(scope="module")
def fairseq_scaler():
    return pytest.importorskip("fairseq.optim.dynamic_loss_scaler").DynamicLossScaler


def step(scaler, overflow: bool) -> str | None:
    """Do one update of fairseq's scaler; return the message with which it gives up."""
    if not overflow:
        scaler.update()
        return None
    try:
        scaler.check_overflow(float("nan"))
    except OverflowError:
        return None
    except FloatingPointError as error:
        return str(error)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("options", CASES)
def test_same_sequence_as_fairseq(fairseq_scaler, options, rate):
    generator = random.Random(7)
    theirs, ours = fairseq_scaler(**options), DynamicLossScale("cpu", **options)
    for _ in range(120):
        overflow = generator.random() < rate
        ours.update(torch.tensor([float(overflow)]))
        message = step(theirs, overflow)
        assert ours.scale.item() == theirs.loss_scale
        if message is not None:
            with pytest.raises(FloatingPointError, match=re.escape(message)):
                ours.check()
            return
        ours.check()
    assert rate < 1.0 or "threshold" in options, "only overflows: must end at the minimum"


def test_resumed_scale_goes_on_as_if_not_interrupted():
    whole = DynamicLossScale("cpu", 64.0, scale_window=3, tolerance=0.3)
    overflows = [0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    for flag in overflows[:5]:
        whole.update(torch.tensor([float(flag)]))
    resumed = DynamicLossScale("cpu", 1.0, scale_window=3, tolerance=0.3)
    resumed.load_state_dict(whole.state_dict())
    for flag in overflows[5:]:
        for scale in (whole, resumed):
            scale.update(torch.tensor([float(flag)]))
        assert resumed.state_dict() == whole.state_dict()
    resumed.load_state_dict({"loss_scale": 32.0})
    assert resumed.scale.item() == 32.0


def test_refusals():
    for options in ({"init_scale": 0.0}, {"scale_factor": 1.0}, {"scale_window": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DynamicLossScale("cpu", **options)

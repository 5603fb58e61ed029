"""Updates whose predecessor may have been skipped: the device knows, and takes the learning rate that fits."""

import pytest
import torch

from ls_train.optim import FusedAdam

RATES = [0.5, 0.25, 0.125, 0.0625, 0.03125]


def gradients(count, overflows):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(6, generator=generator) for _ in range(count)]
    return [value * float("inf") if step in overflows else value for step, value in enumerate(values)]


def build():
    parameter = torch.nn.Parameter(torch.ones(6))
    return parameter, FusedAdam([parameter], lr=RATES[0], weight_decay=0.1, eps_after_correction=False)


def exact(steps):
    """Wait for every flag."""
    parameter, optimizer = build()
    done = 0
    for gradient in steps:
        optimizer.param_groups[0]["lr"] = RATES[done]
        parameter.grad = gradient.clone()
        optimizer.expect(done)
        _, found_inf = optimizer.measured_step(max_norm=1.0)
        done += int(found_inf == 0)
    return parameter, optimizer, done


def late(steps):
    """Read every flag one update later, as a trainer does."""
    parameter, optimizer = build()
    done, pending, earlier = 0, None, None
    for gradient in steps:
        optimizer.param_groups[0]["lr"] = RATES[done]
        parameter.grad = gradient.clone()
        optimizer.expect(done, earlier)
        _, found_inf = optimizer.measured_step(max_norm=1.0)
        done -= int(pending or 0)
        pending, earlier = found_inf.clone(), [RATES[done]]
        done += 1
    return parameter, optimizer, done - int(pending)


@pytest.mark.parametrize("overflows", [(), (1,), (0, 1), (1, 3), (1, 2, 3), (4,)])
def test_late_flags_change_nothing(overflows):
    steps = gradients(5, overflows)
    (expected, reference, count), (found, optimizer, number) = exact(steps), late(steps)
    assert torch.equal(found, expected)
    assert optimizer.updates.tolist() == reference.updates.tolist() == [5 - len(overflows)]
    assert count == number == 5 - len(overflows)
    assert torch.equal(optimizer.state[found]["exp_avg"], reference.state[expected]["exp_avg"])


def test_step_without_expectation_takes_the_groups_rate():
    """After updates of which the flags came late, an ordinary step knows nothing of an earlier rate."""
    parameter, optimizer = build()
    parameter.grad = torch.full((6,), float("inf"))
    optimizer.expect(0)
    optimizer.measured_step()
    optimizer.expect(1, [RATES[0]])
    before = parameter.detach().clone()
    parameter.grad = torch.ones(6)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert torch.equal(parameter, before)


def test_multiplier():
    parameter, optimizer = build()
    parameter.grad = torch.full((6,), 4.0)
    norm, found_inf = optimizer.measured_step(torch.tensor([0.25]), max_norm=0.0)
    assert norm.item() == pytest.approx(4.0 * 6**0.5)
    assert found_inf.item() == 0
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((6,), 0.1))

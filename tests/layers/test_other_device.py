"""A model and its optimizer on one device while another is current: the bits of the device that is current."""

import pytest
import torch

from ls_train.optim import FusedAdam
from tests.layers.test_autograd import loss_of, transformer

UPDATES = 3
on_second_gpu = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def trained(device, dtype, direct):
    """Return the parameters after some updates with dropout, on the CPU."""
    model = transformer(device, hidden_size=64, intermediate_size=128).to(dtype)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    optimizer.direct_grads = direct
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss_of(model, torch.tensor([update])).backward()
        optimizer.step(max_norm=1.0)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@on_second_gpu
@pytest.mark.parametrize("direct", [False, True], ids=["fresh", "direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_second_gpu_while_the_first_is_current(dtype, direct):
    expected, found = (trained(device, dtype, direct) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    model = transformer(hidden_size=64, intermediate_size=128).to(dtype)
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert not torch.equal(expected["encoder.embed_tokens.weight"], start["encoder.embed_tokens.weight"])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name

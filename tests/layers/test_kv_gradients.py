"""Gradients of keys and values that decoder layers hand on: whoever else gets one never sees it change."""

import pytest
import torch

from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.packing import Packing
from ls_train.testing import devices

SIZE = 16


class Chain:
    """Three decoder layers that share keys and values, and what goes into them."""

    def __init__(self, device):
        torch.manual_seed(4)
        layers = [LSTransformerDecoderLayer(embed_dim=SIZE, num_heads=4).eval() for _ in range(3)]
        self.layers = torch.nn.ModuleList(layers).to(device)
        self.packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device(device))
        self.x = torch.randn(6, SIZE).to(device)
        self.kv = torch.randn(6, 3 * 2 * SIZE).to(device).requires_grad_()

    def layer(self, number, x, kv):
        return self.layers[number].forward_packed(x, self.packing, kv, self.packing, number)

    def forward(self):
        """Return a loss and the keys and values that each layer gets."""
        y, kv, received = self.x, self.kv, []
        for number in range(3):
            received.append(kv)
            y, kv = self.layer(number, y, kv)
        return y.tanh().sum(), received


@pytest.mark.parametrize("device", devices())
def test_gradients_asked_for_together_are_those_asked_for_alone(device):
    chain = Chain(device)
    alone = []
    for number in range(3):
        loss, received = chain.forward()
        alone += torch.autograd.grad(loss, received[number])
    loss, received = chain.forward()
    for together, expected in zip(torch.autograd.grad(loss, received), alone, strict=True):
        assert torch.equal(together, expected)


@pytest.mark.parametrize("device", devices())
def test_sum_of_keys_and_values_of_two_layers(device):
    """An addition hands one gradient to both: what one layer adds to it must not reach the other."""
    chain = Chain(device)

    def gradients(add):
        kvs = [chain.kv.detach().requires_grad_(), (2 * chain.kv.detach()).requires_grad_()]
        (first, handed_on), (second, also) = (chain.layer(number, chain.x, kv) for number, kv in enumerate(kvs))
        chain.layer(2, first + second, add(handed_on, also))[0].tanh().sum().backward()
        return [kv.grad for kv in kvs]

    expected = gradients(lambda a, b: 1 * a + 1 * b)
    for actual, value in zip(gradients(torch.add), expected, strict=True):
        torch.testing.assert_close(actual, value)


@pytest.mark.parametrize("device", devices())
def test_gradient_given_by_the_caller_is_left_alone(device):
    """A backward in two stages: the second begins with gradients that the first returned, twice."""
    chain = Chain(device)
    expected = torch.autograd.grad(chain.forward()[0], chain.kv)[0]
    outputs = chain.layer(0, chain.x, chain.kv)
    between = [tensor.detach().requires_grad_() for tensor in outputs]
    y, _ = chain.layer(2, *chain.layer(1, *between))
    given = torch.autograd.grad(y.tanh().sum(), between)
    before = [tensor.clone() for tensor in given]
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(outputs, chain.kv, given, retain_graph=True)[0], expected)
    for tensor, value in zip(given, before, strict=True):
        assert torch.equal(tensor, value)

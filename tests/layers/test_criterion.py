"""Cross-entropy layer against fairseq's formula written out."""

import pytest
import torch

from ls_train.layers.criterion import LSCrossEntropyLayer
from ls_train.testing import devices

PAD = 1


def plain(logits, targets, epsilon):
    """Sum over real targets of (1 - eps - eps_i) nll + eps_i sum over the vocabulary of -log p; and the nll."""
    log_probabilities = logits.log_softmax(-1)[targets.ne(PAD)]
    nll = -log_probabilities.gather(1, targets[targets.ne(PAD)][:, None]).sum()
    share = epsilon / (logits.shape[-1] - 1)
    return (1 - epsilon - share) * nll - share * log_probabilities.sum(), nll


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_matches_formula(epsilon, projection, device):
    features = torch.randn(3, 5, 8, device=device, requires_grad=True)
    weight = torch.randn(11, 8, device=device, requires_grad=True)
    targets = torch.randint(2, 11, (3, 5), device=device)
    targets[0, 3:] = PAD
    expected, expected_nll = plain(features @ weight.t(), targets, epsilon)
    criterion = LSCrossEntropyLayer(epsilon=epsilon, padding_idx=PAD)
    inputs = (features, targets, weight) if projection else (features @ weight.t(), targets)
    loss, nll = criterion(*inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, expected_nll)
    assert not nll.requires_grad
    wanted = torch.autograd.grad(expected, (features, weight))
    for actual, reference in zip(torch.autograd.grad(loss, (features, weight)), wanted, strict=True):
        torch.testing.assert_close(actual, reference)


def test_errors():
    with pytest.raises(ValueError, match="epsilon = 1.5"):
        LSCrossEntropyLayer(epsilon=1.5)
    with pytest.raises(ValueError, match=r"targets must have shape \(3, 5\), got \(3, 4\)"):
        LSCrossEntropyLayer()(torch.randn(3, 5, 7), torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(IndexError, match="9"):
        LSCrossEntropyLayer()(torch.randn(3, 7), torch.tensor([0, 9, 2]))

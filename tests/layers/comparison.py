"""How layer tests compare: outputs by the rule of ``ls_train.testing``, gradients relative to the whole gradient.

Some gradients are zero in exact arithmetic (that of the keys' bias), so each parameter's error is measured against the
norm of the gradient of all parameters together.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ls_train.testing import assert_accurate

GRADIENT_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def assert_matches(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor], names: Sequence[str]
) -> None:
    """Assert that value and gradients of ``ours`` match ``theirs`` in float64, both functions of ``inputs``."""
    dtype = inputs[0].dtype
    runs = {}
    for name, function, cast in (
        ("ours", ours, dtype),
        ("native", theirs, dtype),
        ("reference", theirs, torch.float64),
    ):
        leaves = [x.detach().to(cast).requires_grad_() for x in inputs]
        y = function(*leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        gradients = torch.autograd.grad(y, leaves, dy.to(y.device, y.dtype))
        runs[name] = y.detach(), dict(zip(names, gradients, strict=True))
    (y, gradients), (native, native_gradients), (reference, expected) = runs.values()
    assert_accurate(y, reference, dtype, native)
    allowed = GRADIENT_TOLERANCES.get(dtype)
    if allowed is None:
        allowed = 2 * max(gradient_errors(native_gradients, expected).values()) + torch.finfo(dtype).eps
    for name, error in gradient_errors(gradients, expected).items():
        assert error <= allowed, f"gradient of {name}: error {error:.3g} of {dtype} is larger than {allowed:.3g}"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the gradients of ``model``'s parameters, zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def gradient_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each name the norm of the gradient's error relative to the norm of the whole gradient."""
    assert actual.keys() == expected.keys()
    total = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    return {name: float((actual[name].double() - expected[name].double()).norm() / total) for name in expected}

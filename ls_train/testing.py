"""What tests of operators and layers share: devices, types, shapes and the rule for comparing numbers.

The rule has no hand-picked tolerance for 16-bit types: against a float64 reference, the error may be at most twice the
error that PyTorch's own operators make at that type, plus one unit in the last place of the largest reference value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest error of the types that are not 16 bits wide, relative to the largest reference value."""

ROW_SHAPES = ((0, 8), (1, 1), (1, 8), (3, 7), (13, 64), (37, 129), (5, 1023), (67, 256))
"""(rows, columns) of row-wise operators: empty, one row, odd, prime, and whole 16-byte packs."""


def devices() -> tuple[str, ...]:
    """Return the device types that tests run on: the CPU, and CUDA where there is a card."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def gpus() -> tuple[str, ...]:
    """Return the device types of :func:`devices` other than the CPU."""
    return devices()[1:]


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Return the activation types that operators support on ``device``."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return (*types, torch.float64) if device == "cpu" else types


def device_types() -> list[tuple[str, torch.dtype]]:
    """Return every pair of a present device and a type it supports."""
    return [(device, dtype) for device in devices() for dtype in dtypes(device)]


def tolerance(reference: Tensor, dtype: torch.dtype, native: Tensor | None = None, scale: float | None = None) -> float:
    """Return the largest error allowed to a result of type ``dtype``.

    Args:
        reference: the result in float64.
        dtype: the type that was tested.
        native: what PyTorch's own operators give at ``dtype``.
        scale: taken for the largest reference value where all are zero.
    """
    largest = _largest(reference) or scale or 0.0
    if dtype in TOLERANCES:
        unit = TOLERANCES[dtype] * largest
    else:
        unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    return (2 * _error(native, reference) if native is not None else 0.0) + unit


def assert_accurate(
    actual: Tensor,
    reference: Tensor,
    dtype: torch.dtype,
    native: Tensor | None = None,
    name: str = "result",
    scale: float | None = None,
) -> None:
    """Assert that ``actual`` obeys the rule of this module.

    Args:
        actual: the result to test.
        reference: the result in float64, same shape.
        dtype: the type of the calculation, which fixes the tolerance.
        native: what PyTorch's own operators give at ``dtype``.
        name: name for the message.
        scale: taken for the largest reference value where all are zero.
    """
    assert actual.shape == reference.shape, f"{name}: shape {tuple(actual.shape)} is not {tuple(reference.shape)}"
    error, allowed = _error(actual, reference), tolerance(reference, dtype, native, scale)
    assert error <= allowed, f"{name}: error {error:.3g} of {dtype} is larger than {allowed:.3g}"


def assert_matches_torch(
    ours: Callable[..., Tensor | Sequence[Tensor]],
    theirs: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    seed: int = 0,
) -> None:
    """Assert that values and gradients of ``ours`` at the type of ``inputs`` match those of ``theirs`` in float64.

    Args:
        ours: function of ``inputs`` that returns one or several tensors.
        theirs: the same from PyTorch's own functions; called in float64 for the reference and at the type of the
            inputs for the error that PyTorch makes.
        inputs: floating-point tensors of one type; all are differentiated.
        seed: seed of the random gradients of the outputs.
    """
    dtype = inputs[0].dtype
    results = {}
    for name, function, cast in (
        ("ours", ours, dtype),
        ("native", theirs, dtype),
        ("reference", theirs, torch.float64),
    ):
        leaves = [x.detach().to(cast).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for y in outputs]
        grads = [g.to(y.device, y.dtype) for g, y in zip(grads, outputs, strict=True)]
        results[name] = [*outputs, *torch.autograd.grad(outputs, leaves, grads)]
    # A gradient may be truly zero, such as that of the scores of a single key: it is measured against the others.
    scale = max(_largest(reference) for reference in results["reference"])
    for i, (actual, native, reference) in enumerate(zip(*results.values(), strict=True)):
        count = len(results["ours"]) - len(inputs)
        name = f"output {i}" if i < count else f"gradient of input {i - count}"
        assert_accurate(actual.detach(), reference.detach(), dtype, native.detach(), name, scale)


def _largest(values: Tensor) -> float:
    finite = values.detach()[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(actual: Tensor, reference: Tensor) -> float:
    if reference.numel() == 0:
        return 0.0
    difference = (actual.to(torch.float64) - reference).abs()
    # Equal infinities, such as the softmax sum of a row without keys, are no error; NaN never compares as small.
    difference[actual == reference] = 0
    error = float(difference.max())
    return error if not math.isnan(error) else math.inf

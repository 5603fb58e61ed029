"""What the kernel benchmark times of the output projection with its loss, and the three GEMMs that are its floor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ls_train.ops.linear_cross_entropy import chunk_rows, linear_cross_entropy, linear_cross_entropy_gradients
from tests.kernels.bench_problems import SMOOTHING, Buffers, Problem


def output_projection(b: Buffers, rows: int, columns: int, classes: int) -> Problem:
    """Return the problem of ``linear_cross_entropy``: loss and both gradients of features (rows, columns).

    ``step`` is the form with a gradient that is known before, ``autograd_step`` forward and backward. The peers
    ``products`` and ``products_in_chunks`` are the three GEMMs by themselves.
    """
    x, target, gradient = b(rows, columns), b.ids(classes, rows), b.floats(1).fill_(128.0)
    weight = (b(classes, columns) * columns**-0.5).requires_grad_()
    leaf, plain = x.detach().requires_grad_(), weight.detach()
    logits, dx, dweight = b(rows, classes), b.empty(rows, columns), b.empty(classes, columns)

    def autograd_step() -> None:
        loss = linear_cross_entropy(leaf, weight, target, SMOOTHING).loss
        torch.autograd.grad(loss, (leaf, weight), gradient.to(loss.dtype).view(()))

    def products(step: int) -> None:
        for number, (features, into) in enumerate(zip(x.split(step), dx.split(step), strict=True)):
            part = logits[: len(features)]
            torch.mm(features, plain.t(), out=part)
            torch.mm(part, plain, out=into)
            if number == 0:
                torch.mm(part.t(), features, out=dweight)
            else:
                torch.addmm(dweight, part.t(), features, out=dweight)

    chunk = chunk_rows(rows, holds_gradient=False)
    gemms = {"products": lambda: products(rows), "products_in_chunks": lambda: products(chunk)}
    # Logits are written, read and overwritten by their gradient, and read twice.
    moved = (5 * rows * classes + 3 * rows * columns + 3 * classes * columns) * b.size
    return Problem(
        (x, plain, target),
        lambda x, weight, target: F.cross_entropy(
            F.linear(x, weight), target, reduction="none", label_smoothing=SMOOTHING
        ),
        2,
        {
            "step": lambda: linear_cross_entropy_gradients(x, weight, target, gradient, SMOOTHING),
            "autograd_step": autograd_step,
        },
        {"step": moved, "autograd_step": moved},
        calls={"step": gemms, "autograd_step": gemms},
    )

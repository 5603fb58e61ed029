"""The reference floor of a packed training step: its GEMMs, measured, and the bytes of a fused step at copy speed.

Bytes outside the GEMMs: Adam with fp32 masters 28 a parameter; 53 passes over rows of width C in an encoder layer and
75 in a decoder layer (forward and backward together, attention included), 2 bytes an element; the logits read and
their gradient written once. From length 512 on the attention's products count as well. A reference, not a bound: what
an epilogue absorbs or what stays in the L2 cache can go below it.
"""

from __future__ import annotations

import torch

from benchmarks.records import capture, median_ms
from benchmarks.shapes import Shape

_ROTATE = 3
"""Sets of operands that a timing goes round, so that none is read from the cache."""


def copy_bandwidth(size: int = 2**31) -> float:
    """Return bytes a second, read and written counted, of a device copy of ``size`` bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / (median_ms(lambda: y.copy_(x), 20, 5) * 1e-3)


def gemm_ms(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Return the time of a projection's three products (forward, input gradient, weight gradient)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sets = []
    for _ in range(_ROTATE):
        x, w, g = ((rows, inner), (columns, inner), (rows, columns))
        sets.append([torch.randn(shape, device=device, dtype=dtype) for shape in (x, w, g)])
    y, dx, dw = (torch.empty_like(like) for like in (sets[0][2], sets[0][0], sets[0][1]))

    def products() -> None:
        for x, w, g in sets:
            torch.mm(x, w.t(), out=y)
            torch.mm(g, w, out=dx)
            torch.mm(g.t(), x, out=dw)

    return median_ms(capture(products), 8, 2) / _ROTATE


def step_floor(shape: Shape, tokens: int, length: int, dtype: torch.dtype, bandwidth: float) -> dict[str, float]:
    """Return ``gemms``, ``bytes`` and ``total`` of a step with ``tokens`` rows on either side, in milliseconds."""
    c, f, layers = shape.embed_dim, shape.ffn_dim, shape.layers
    projections = (
        (c, 3 * c, 2 * layers),
        (c, c, 4 * layers),
        (c, 2 * c * layers, 1),
        (c, f, 2 * layers),
        (f, c, 2 * layers),
        (c, shape.vocab_size, 1),
    )
    gemms = sum(count * gemm_ms(tokens, inner, columns, dtype) for inner, columns, count in projections)
    if length >= 512:
        # q k^T and p v forward, five products backward; the causal half of the decoder's counts half.
        flops = 2 * 7 * tokens * length * c * layers * 2.5
        peak = 2 * 3 * tokens * c * f / (gemm_ms(tokens, c, f, dtype) * 1e-3)
        gemms += flops / peak * 1e3
    moved = 28 * shape.parameters + (53 + 75) * layers * tokens * c * 2 + 2 * 2 * tokens * shape.vocab_size
    return {"gemms": gemms, "bytes": moved / bandwidth * 1e3, "total": gemms + moved / bandwidth * 1e3}

"""The reference floor of a packed training step: its GEMMs, measured, and the bytes of a fused step at copy speed.

Bytes outside the GEMMs: Adam with fp32 masters 28 a parameter; 53 passes over rows of width C in an encoder layer and
75 in a decoder layer (forward and backward together, attention included), 2 bytes an element; the logits read and
their gradient written once. From length 512 on the attention's products count as well. A reference, not a bound: what
an epilogue absorbs or what stays in the L2 cache can go below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.records import capture, median_ms
from benchmarks.shapes import ATTENTIONS, Projections, Shape

ADAM_BYTES = 28
"""Bytes a parameter: gradient, fp32 master and moments read, the last three and the 16-bit parameter written."""
ENCODER_PASSES, DECODER_PASSES = 53, 75
ATTENTION_LENGTH = 512
_ROTATE = 3
"""Sets of operands that a timing goes round, so that none is read from the cache."""


def copy_bandwidth() -> float:
    """Return bytes a second, read and written counted, of a device copy of 2 GiB; of 1 MiB on a CPU."""
    device, size = ("cuda", 2**31) if torch.cuda.is_available() else ("cpu", 2**20)
    x = torch.empty(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / (median_ms(lambda: y.copy_(x), 20, 5) * 1e-3)


@cache
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


@dataclass(frozen=True)
class Floor:
    """Milliseconds of a step's parts.

    Attributes:
        products: projections.
        attention: products of the attention, from the length on at which they count.
        moved: bytes outside the products at copy speed.
    """

    products: float
    attention: float
    moved: float

    @property
    def gemms(self) -> float:
        """All products."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        """Both together."""
        return self.gemms + self.moved


def step_floor(shape: Shape, tokens: int, length: int, dtype: torch.dtype, bandwidth: float) -> Floor:
    """Return the floor of a step with ``tokens`` rows on either side."""
    products = _products_ms(shape.projections, tokens, dtype)
    attention = _attention_ms(shape, ATTENTIONS * shape.layers, tokens, length, dtype)
    rows = (ENCODER_PASSES + DECODER_PASSES) * shape.layers * tokens * shape.embed_dim
    moved = ADAM_BYTES * shape.parameters + 2 * rows + 2 * 2 * tokens * shape.vocab_size
    return Floor(products, attention, moved / bandwidth * 1e3)


def group_floors(shape: Shape, tokens: int, length: int, dtype: torch.dtype, bandwidth: float) -> dict[str, float]:
    """Return milliseconds of a step's parts outside the projections, by the groups of ``benchmarks/profile_step.py``.

    Passes over rows of width C: attention 4 forward and 8 backward, three attentions; an epilogue with layer norm 4 and
    4, five of them, and the 12 of residual gradients and bias sums; the activation 8 and 12, twice; the embedding 2 and
    2 a side, which the floor of a step leaves out.
    """
    row_ms = 2 * tokens * shape.embed_dim / bandwidth * 1e3
    attention = _attention_ms(shape, ATTENTIONS * shape.layers, tokens, length, dtype)
    return {
        "attention": 3 * 12 * shape.layers * row_ms + attention,
        "layer norm + dropout + residual": (5 * 8 + 12) * shape.layers * row_ms,
        "activation + dropout": 2 * 20 * shape.layers * row_ms,
        "embedding": 2 * 4 * row_ms,
        "output projection: loss": 2 * 2 * tokens * shape.vocab_size / bandwidth * 1e3,
        "update": ADAM_BYTES * shape.parameters / bandwidth * 1e3,
    }


def layer_floor(kind: str, shape: Shape, tokens: int, length: int, dtype: torch.dtype, bandwidth: float) -> Floor:
    """Return the floor of forward and backward of one layer; kind: ``"encoder"`` or ``"decoder"``.

    A decoder layer includes its own encoder-decoder keys and values.
    """
    c = shape.embed_dim
    if kind == "encoder":
        projections, passes, attentions = shape.encoder_projections, ENCODER_PASSES, 1.0
    else:
        projections, passes, attentions = (*shape.decoder_projections, (c, 2 * c, 1)), DECODER_PASSES, 1.5
    products = _products_ms(projections, tokens, dtype)
    attention = _attention_ms(shape, attentions, tokens, length, dtype)
    return Floor(products, attention, 2 * passes * tokens * c / bandwidth * 1e3)


def _products_ms(projections: Projections, tokens: int, dtype: torch.dtype) -> float:
    return sum(count * gemm_ms(tokens, inner, columns, dtype) for inner, columns, count in projections)


def _attention_ms(shape: Shape, attentions: float, tokens: int, length: int, dtype: torch.dtype) -> float:
    if length < ATTENTION_LENGTH:
        return 0.0
    # q k^T and p v forward, five products backward, at the pace of a large GEMM.
    flops = 2 * 7 * tokens * length * shape.embed_dim * attentions
    pace = 2 * 3 * tokens * shape.embed_dim * shape.ffn_dim / gemm_ms(tokens, shape.embed_dim, shape.ffn_dim, dtype)
    return flops / pace

"""Model and batch sizes of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder-decoder Transformer with one shared embedding table."""

    embed_dim: int
    ffn_dim: int
    heads: int
    layers: int
    vocab_size: int = 40000
    dropout: float = 0.1

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        c, f = self.embed_dim, self.ffn_dim
        attention = 4 * (c * c + c)
        ffn = 2 * c * f + c + f
        return self.vocab_size * c + self.layers * (3 * attention + 2 * ffn + 5 * 2 * c)


_BASE = Shape(512, 2048, 8, 6)
_BIG = Shape(1024, 4096, 16, 6)
SHAPES = {
    "transformer_base_6e6d": _BASE,
    "transformer_big_6e6d": _BIG,
    "transformer_big_12e12d": replace(_BIG, layers=12),
    "transformer_big_24e24d": replace(_BIG, layers=24),
    "transformer_toy_1e1d": Shape(32, 64, 2, 1, vocab_size=101),
}
"""Shapes by the ``arch`` of a record's case."""

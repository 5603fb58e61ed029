"""Model and batch sizes of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

Projections = tuple[tuple[int, int, int], ...]
"""(inner size, columns, how often) of matrix products with as many rows as tokens."""
ATTENTIONS = 2.5
"""Attentions of an encoder and a decoder layer together: the causal half of one counts half."""


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

    @property
    def encoder_projections(self) -> Projections:
        """Matrix products of one encoder layer."""
        c, f = self.embed_dim, self.ffn_dim
        return ((c, 3 * c, 1), (c, c, 1), (c, f, 1), (f, c, 1))

    @property
    def decoder_projections(self) -> Projections:
        """Matrix products of one decoder layer without those of the encoder-decoder keys and values."""
        c, f = self.embed_dim, self.ffn_dim
        return ((c, 3 * c, 1), (c, c, 3), (c, f, 1), (f, c, 1))

    @property
    def projections(self) -> Projections:
        """Matrix products of the whole model, the cross keys and values of all layers as one."""
        layers = [*self.encoder_projections, *self.decoder_projections]
        others = ((self.embed_dim, 2 * self.embed_dim * self.layers, 1), (self.embed_dim, self.vocab_size, 1))
        return (*((inner, columns, count * self.layers) for inner, columns, count in layers), *others)

    def flops(self, tokens: int, length: int) -> float:
        """Return the operations of a step's matrix products, without any that are done again in the backward."""
        products = sum(2 * tokens * inner * columns * count for inner, columns, count in self.projections)
        # q k^T and p v; the causal half of the decoder's self-attention counts half.
        attention = 2 * 2 * tokens * length * self.embed_dim * ATTENTIONS * self.layers
        return 3.0 * (products + attention)


_BASE = Shape(512, 2048, 8, 6)
_BIG = Shape(1024, 4096, 16, 6)
SHAPES = {
    "transformer_base_6e6d": _BASE,
    "transformer_base_12e12d": replace(_BASE, layers=12),
    "transformer_base_24e24d": replace(_BASE, layers=24),
    "transformer_big_6e6d": _BIG,
    "transformer_big_12e12d": replace(_BIG, layers=12),
    "transformer_big_24e24d": replace(_BIG, layers=24),
    "transformer_toy_1e1d": Shape(32, 64, 2, 1, vocab_size=101),
}
"""Shapes by the ``arch`` of a record's case."""

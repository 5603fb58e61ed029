"""What the encoder and the decoder do alike with packed rows: embed, normalise, checkpoint activations, draw seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_train import rng
from ls_train.layers import embedding
from ls_train.layers.call import SITES
from ls_train.layers.norm import layer_norm
from ls_train.ops.dropout import dropout
from ls_train.packing import Packing

ENCODER_OFFSET = 0
"""Dropout constants: the embedding at the offset, layer i at ``offset + (i + 1) * SITES``."""
DECODER_OFFSET = 1 << 20


def draw_seed(side: nn.Module) -> Tensor | None:
    """Return a seed for the dropout masks of one forward of an encoder or decoder, None where nothing is dropped."""
    cfg = side.cfg
    if not side.training or not (cfg.dropout or cfg.attention_dropout or cfg.activation_dropout or cfg.relu_dropout):
        return None
    return rng.draw_seed(side.embed_tokens.weight.device)


def packings(padding_idx: int, *batches: Tensor) -> list[Packing]:
    """Return the packing of each int64 (B, T) batch; batches on a GPU cost one synchronisation together."""
    masks = [batch.eq(padding_idx) for batch in batches]
    flat = torch.cat([mask.flatten() for mask in masks]).cpu()
    parts = flat.split([mask.numel() for mask in masks])
    return [
        Packing.from_padding_mask(part.view(batch.shape), *batch.shape, batch.device)
        for part, batch in zip(parts, batches, strict=True)
    ]


def embed(
    side: nn.Module,
    tokens: Tensor,
    packing: Packing,
    seed: Tensor | None,
    offset: int,
    embeddings: Tensor | None = None,
) -> Tensor:
    """Return dropout(norm(scale * table[token] + positions)), (N, C).

    Args:
        side: encoder or decoder with fairseq's ``embed_tokens``, ``embed_positions``, ``embed_scale``,
            ``layernorm_embedding``, ``dropout_module`` and ``padding_idx``.
        tokens: int64 (N,).
        packing: of the tokens.
        seed: of the dropout mask, None without dropout.
        offset: constant of the dropout mask.
        embeddings: (N, C) to use instead of the rows of the table.

    Raises:
        ValueError: a sentence is longer than learned positions reach.
    """
    p = 0.0 if seed is None else side.dropout_module.p
    positions = None if side.embed_positions is None else _Positions(side)
    norm, scale = side.layernorm_embedding, side.embed_scale
    if embeddings is None:
        return embedding.embed(tokens, packing, side.embed_tokens, positions, norm, scale, p, seed, offset)
    x = scale * embeddings
    if positions is not None:
        rows = packing.positions + side.padding_idx + 1
        x = x + nn.functional.embedding(rows, positions.table(packing.max_length), side.padding_idx)
    if norm is not None:
        x = layer_norm(norm, x, packing.rows)
    return dropout(x, p, seed, offset) if p else x


class _Positions:
    """fairseq's position modules as the fused embedding asks for them."""

    def __init__(self, side: nn.Module) -> None:
        self.side = side

    def table(self, length: int) -> Tensor:
        """Return the table of positions, at least ``length`` rows beyond the padding row, in the type of the weights.

        Raises:
            ValueError: learned positions do not reach ``length``.
        """
        module = self.side.embed_positions
        if not isinstance(module, SinusoidalPositionalEmbedding):
            if length > module.max_positions:
                raise ValueError(
                    f"a sentence of {length} tokens is longer than the {module.max_positions} learned positions; raise "
                    "--max-source-positions or --max-target-positions, or leave such sentences out"
                )
            return module.weight
        rows = self.side.padding_idx + 1 + length
        if rows > module.weights.shape[0]:
            grown = module.get_embedding(rows, module.embedding_dim, module.padding_idx)
            module.weights = grown.to(module.weights)
        return module.weights.to(self.side.embed_tokens.weight)


def run(checkpointed: bool, forward: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``forward(*arguments)``, which ``checkpointed`` computes again in the backward.

    Dropout masks depend on the seed among the arguments only, so torch's generators need not be kept.
    """
    if not checkpointed or not torch.is_grad_enabled():
        return forward(*arguments)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)


def time_first(rows: Tensor, packing: Packing) -> Tensor:
    """Return packed ``rows`` (N, C) as fairseq's (T, B, C), zero where padded."""
    return packing.unpack(rows).transpose(0, 1)


def from_time_first(x: Tensor, packing: Packing) -> Tensor:
    """Return fairseq's ``x`` (T, B, C) as packed rows (N, C)."""
    return packing.pack(x.transpose(0, 1))


__all__ = [
    "DECODER_OFFSET",
    "ENCODER_OFFSET",
    "SITES",
    "draw_seed",
    "embed",
    "from_time_first",
    "layer_norm",
    "packings",
    "run",
    "time_first",
]

"""Token and position embedding of packed tokens: lookup, scale, position and dropout in one pass.

Positions are fairseq's: padding is skipped, the first real token of a sequence has index ``padding_idx + 1``.
Sinusoidal table: sines in the first half of the columns, cosines in the second, wavelengths in a geometric progression
with ratio 10000^(1 / (C/2 - 1)) (tensor2tensor's variant of Vaswani et al., 2017, section 3.5).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ls_train.layers import modules
from ls_train.layers.config import EmbeddingConfig, from_preset
from ls_train.layers.gradients import GradientWriter, once_differentiable
from ls_train.layers.norm import layer_norm
from ls_train.ops.dropout import dropout
from ls_train.packing import Packing, TokenOrder

ops = torch.ops.ls_train


class EmbeddingFunction(torch.autograd.Function):
    """dropout(scale * weight[tokens] + position_weight[positions]), gradients in a fixed order of additions."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        tokens: Tensor,
        positions: Tensor,
        order: TokenOrder | None,
        rows: Tensor,
        seed: Tensor | None,
        scale: float,
        p: float,
        offset: int,
        padding_idx: int,
        weight: Tensor,
        position_weight: Tensor | None,
    ) -> Tensor:
        """Return (N, C) for ``tokens`` and ``positions`` (N,); ``order``: of the tokens, None to sort them."""
        y = weight.new_empty(tokens.shape[0], weight.shape[1])
        ops.embedding_fwd(y, tokens, positions, weight, position_weight, seed, rows, scale, p, offset)
        tables = (weight,) if position_weight is None else (weight, position_weight)
        ctx.constants = (order, rows, seed, scale, p, offset, padding_idx)
        ctx.leaves = [table if table.is_leaf else None for table in tables]
        ctx.save_for_backward(tokens, positions, *tables)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of both tables."""
        tokens, positions, *tables = ctx.saved_tensors
        order, rows, seed, scale, p, offset, padding_idx = ctx.constants
        dy = dy.contiguous()
        writer = GradientWriter({"token": 0, "position": 1}, tables, ctx.leaves, ctx.needs_input_grad[9:])
        sides = (("token", tokens, order, scale), ("position", positions, None, 1.0))
        for name, ids, known, factor in sides[: len(tables)]:
            (dweight,), add = writer.open((name,))
            if dweight is not None:
                sorted_ids, at = ids.sort(stable=True) if known is None else known
                ops.embedding_bwd(dweight, dy, at, sorted_ids, seed, rows, factor, p, offset, padding_idx, add)
        gradients = writer.finish()
        return *(None,) * 9, *gradients, *(None,) * (2 - len(gradients))


class SinusoidalPositionalEmbedding(nn.Module):
    """Table of sinusoidal positions that grows when a longer sequence comes; it is not part of the state dict.

    Args:
        length: longest sequence the table is made for at first.
        embedding_dim: C.
        padding_idx: index of padding.
    """

    def __init__(self, length: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.max_positions = 100_000
        self.register_buffer("weights", self._table(length + padding_idx + 1), persistent=False)

    def table(self, length: int) -> Tensor:
        """Return the table with at least ``length`` positions after padding."""
        rows = length + self.padding_idx + 1
        if rows > self.weights.shape[0]:
            with torch.inference_mode(False):
                self.weights = self._table(max(rows, 2 * self.weights.shape[0])).to(self.weights)
        return self.weights

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"embedding_dim={self.embedding_dim}, padding_idx={self.padding_idx}"

    def _table(self, rows: int) -> Tensor:
        half = self.embedding_dim // 2
        frequency = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
        angle = torch.arange(rows, dtype=torch.float32)[:, None] * frequency
        table = torch.zeros(rows, self.embedding_dim, dtype=torch.float32)
        table[:, :half] = angle.sin()
        table[:, half : 2 * half] = angle.cos()
        table[self.padding_idx] = 0
        return table

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Old fairseq checkpoints hold these.
        for key in ("weights", "_float_tensor"):
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class LearnedPositionalEmbedding(nn.Embedding):
    """Learned positions, fairseq's initialisation.

    Args:
        length: longest sequence.
        embedding_dim: C.
        padding_idx: index of padding.
    """

    def __init__(self, length: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__(length + padding_idx + 1, embedding_dim, padding_idx)
        nn.init.normal_(self.weight, mean=0, std=embedding_dim**-0.5)
        nn.init.zeros_(self.weight[padding_idx])
        self.max_positions = length

    def table(self, length: int) -> Tensor:
        """Return the table.

        Raises:
            ValueError: ``length`` is larger than the table.
        """
        if length > self.max_positions:
            raise ValueError(
                f"a sequence has {length} tokens but there are {self.max_positions} learned positions; build the model "
                "with a larger max_seq_len or shorten the input"
            )
        return self.weight


PositionalEmbedding = SinusoidalPositionalEmbedding | LearnedPositionalEmbedding


def token_embedding(vocab_size: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Return a token table with fairseq's initialisation: N(0, 1/C), padding zero."""
    table = nn.Embedding(vocab_size, embedding_dim, padding_idx)
    nn.init.normal_(table.weight, mean=0, std=embedding_dim**-0.5)
    nn.init.zeros_(table.weight[padding_idx])
    return table


def position_embedding(length: int, embedding_dim: int, padding_idx: int, learned: bool) -> PositionalEmbedding:
    """Return learned or sinusoidal positions."""
    kind = LearnedPositionalEmbedding if learned else SinusoidalPositionalEmbedding
    return kind(length, embedding_dim, padding_idx)


def embed(
    tokens: Tensor,
    packing: Packing,
    embed_tokens: nn.Embedding,
    embed_positions: PositionalEmbedding | None,
    norm: nn.LayerNorm | None,
    scale: float,
    p: float,
    seed: Tensor | None,
    rng_offset: int,
    order: TokenOrder | None = None,
) -> Tensor:
    """Return dropout(norm(scale * embed_tokens[tokens] + embed_positions[positions])), (N, C).

    Args:
        tokens: int64 (N,).
        packing: where the sequences lie.
        embed_tokens: token table.
        embed_positions: positions, or None.
        norm: layer norm before the dropout, or None.
        scale: factor of the token embedding.
        p: dropout probability.
        seed: int64 (1,) on the device, needed when p > 0.
        rng_offset: constant of the dropout site.
        order: of ``tokens``, None to sort them in the backward.

    Raises:
        IndexError: on the CPU, a token id is out of range. On a GPU its row becomes NaN instead.
        ValueError: a sequence is longer than the learned positions, or ``tokens`` do not fit ``packing`` or ``order``
            or lie on another device than the table.
    """
    if tokens.shape != packing.positions.shape or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens must be int64 of shape {tuple(packing.positions.shape)} for this packing, got {tokens.dtype} of "
            f"shape {tuple(tokens.shape)}"
        )
    weight, padding_idx = embed_tokens.weight, embed_tokens.padding_idx
    if tokens.device != weight.device:
        raise ValueError(
            f"tokens are on {tokens.device} but the embedding is on {weight.device}; move one of them with .to(device)"
        )
    if order is not None:
        order.check(tokens)
    positions, table = packing.positions, None
    if embed_positions is not None:
        table, first = embed_positions.table(packing.max_length), padding_idx + 1
        if table.requires_grad:
            positions = positions + first  # the gradient is that of the whole table
        else:
            table = table[first:]
    if table is None:
        (weight,) = modules.autocast_inputs((weight,))
    else:
        weight, table = modules.autocast_inputs((weight, table.to(weight.dtype)))
    inner = p if norm is None else 0.0
    rows = packing.rows
    x = modules.apply(
        EmbeddingFunction,
        tokens.contiguous(),
        positions,
        order,
        rows,
        seed if inner else None,
        scale,
        inner,
        rng_offset,
        padding_idx,
        weight,
        table,
    )
    if norm is None:
        return x
    x = layer_norm(norm, x, rows)
    return dropout(x, p, seed, rng_offset, rows) if p else x


class LSTransformerEmbeddingLayer(nn.Module):
    """Token embedding times sqrt(C), plus positions, then dropout.

    Args:
        config: from :meth:`get_config`.
        initial_embeddings: (V, C) values of the token table, or None.
        initial_positions: values of learned positions, or None.

    Raises:
        ValueError: a field has a bad value or an initial table a wrong shape.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        initial_embeddings: Tensor | None = None,
        initial_positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        config.check()
        size, padding_idx = config.embedding_dim, config.padding_idx
        self.padding_idx = padding_idx
        self.scale = math.sqrt(size) if config.scale is None else config.scale
        self.dropout = config.dropout
        self.embed_tokens = token_embedding(config.vocab_size, size, padding_idx)
        self.embed_positions = None
        if config.positions:
            self.embed_positions = position_embedding(config.max_seq_len, size, padding_idx, config.learned_positions)
        self.layernorm_embedding = nn.LayerNorm(size, config.layer_norm_eps) if config.layer_norm else None
        modules.fill([self.embed_tokens.weight], [initial_embeddings], "initial_embeddings")
        if initial_positions is not None:
            if not config.learned_positions:
                raise ValueError("initial_positions needs learned_positions=True")
            modules.fill([self.embed_positions.weight], [initial_positions], "initial_positions")
        if config.fp16:
            self.half()

    @staticmethod
    def get_config(**values: Any) -> EmbeddingConfig:
        """Return a configuration from field values.

        Raises:
            ValueError: a field is unknown, missing or has a bad value.
        """
        return from_preset(EmbeddingConfig, None, values)

    @modules.check_kinds
    def forward(self, tokens: Tensor, seed: Tensor | None = None) -> Tensor:
        """Return embeddings (B, T, C), zero where padded.

        Args:
            tokens: int64 (B, T), padded left, right or anywhere with ``padding_idx``.
            seed: int64 (1,) on the device, of the dropout mask; None draws one from torch's generator.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (batch, length), got {tuple(tokens.shape)}")
        packing = Packing.from_padding_mask(tokens.eq(self.padding_idx), *tokens.shape, tokens.device)
        return packing.unpack(self.forward_packed(packing.pack(tokens), packing, seed))

    @modules.check_kinds
    def forward_packed(
        self,
        tokens: Tensor,
        packing: Packing,
        seed: Tensor | None = None,
        rng_offset: int = 0,
        order: TokenOrder | None = None,
    ) -> Tensor:
        """Return embeddings (N, C) of packed ``tokens`` int64 (N,); ``order`` saves the backward a sort."""
        p = self.dropout if self.training else 0.0
        return embed(
            tokens,
            packing,
            self.embed_tokens,
            self.embed_positions,
            self.layernorm_embedding,
            self.scale,
            p,
            modules.dropout_seed(seed, (p,), tokens),
            rng_offset,
            order,
        )

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"scale={self.scale:g}, dropout={self.dropout}"

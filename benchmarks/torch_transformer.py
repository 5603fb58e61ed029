"""The peer: an encoder-decoder Transformer as one writes it in today's PyTorch (fused QKV, SDPA), post-norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import Shape


class _Attention(nn.Module):
    def __init__(self, shape: Shape, cross: bool) -> None:
        super().__init__()
        self.shape = shape
        size = shape.embed_dim
        self.query = nn.Linear(size, size) if cross else None
        self.project = nn.Linear(size, 2 * size if cross else 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        batch, length, size = x.shape
        heads = self.shape.heads
        if memory is None:
            q, k, v = self.project(x).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        else:
            q = self.query(x).view(batch, length, heads, -1).transpose(1, 2)
            k, v = self.project(memory).view(batch, memory.shape[1], 2, heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.shape.dropout, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, size))


class TorchLayer(nn.Module):
    """Encoder or decoder layer; its forward takes (B, T, C) and, in a decoder, the encoder's output."""

    def __init__(self, shape: Shape, decoder: bool) -> None:
        super().__init__()
        size = shape.embed_dim
        self.decoder = decoder
        self.dropout = shape.dropout
        self.self_attention = _Attention(shape, False)
        self.cross_attention = _Attention(shape, True) if decoder else None
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3 if decoder else 2))
        self.fc1 = nn.Linear(size, shape.ffn_dim)
        self.fc2 = nn.Linear(shape.ffn_dim, size)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + F.dropout(self.self_attention(x, causal=self.decoder), self.dropout))
        if self.cross_attention is not None:
            x = self.norms[1](x + F.dropout(self.cross_attention(x, memory), self.dropout))
        hidden = F.dropout(F.relu(self.fc1(x)), self.dropout)
        return self.norms[-1](x + F.dropout(self.fc2(hidden), self.dropout))


class TorchTransformer(nn.Module):
    """Transformer with all embeddings shared, whose forward returns the summed label-smoothed loss.

    Args:
        shape: sizes and dropout, which is always on.
        max_length: longest sequence.
    """

    def __init__(self, shape: Shape, max_length: int) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.scale = math.sqrt(shape.embed_dim)
        self.embedding = nn.Embedding(shape.vocab_size, shape.embed_dim, padding_idx=1)
        nn.init.normal_(self.embedding.weight, std=shape.embed_dim**-0.5)
        self.register_buffer("positions", torch.randn(max_length, shape.embed_dim) * 0.02)
        self.encoder = nn.ModuleList(TorchLayer(shape, False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(TorchLayer(shape, True) for _ in range(shape.layers))

    def forward(self, source: Tensor, previous: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over tokens; source, previous, target: int64 (B, T) without padding."""
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embed(previous)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(x, self.embedding.weight).flatten(0, 1).float()
        return F.cross_entropy(logits, target.flatten(), ignore_index=1, label_smoothing=0.1, reduction="sum")

    def _embed(self, tokens: Tensor) -> Tensor:
        positions = self.positions[: tokens.shape[1]].to(self.embedding.weight.dtype)
        return F.dropout(self.embedding(tokens) * self.scale + positions, self.dropout)

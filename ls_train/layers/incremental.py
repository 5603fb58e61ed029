"""Decoding token by token with cached keys and values, in plain PyTorch operations.

The cache holds padded tensors (B, H, length, D): a step appends to them, a beam search reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.packing import Packing

_FIRST_CAPACITY = 32

_ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
}


class DecodingState:
    """Keys and values that a decoder has seen so far.

    Args:
        layers: the decoder's layers.
        batch: B, number of hypotheses.
        memory: (Ns, Ce) packed output of the encoder, or None without cross attention.
        packing: where its B sequences lie.

    Attributes:
        length: number of tokens decoded so far.
        batch: B.
    """

    def __init__(
        self,
        layers: Sequence[LSTransformerDecoderLayer],
        batch: int,
        memory: Tensor | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.length = 0
        self.batch = batch
        self._keys: list[Tensor | None] = [None] * len(layers)
        self._values: list[Tensor | None] = [None] * len(layers)
        self._cross: list[tuple[Tensor, Tensor]] = []
        self._masked: Tensor | None = None
        if memory is None:
            return
        if packing.batch != batch:
            raise ValueError(
                f"the encoder's output has batch {packing.batch}, the state has {batch}; they must be equal"
            )
        kv = packing.unpack(cross_kv(memory, packing, layers))
        parts = kv.view(*kv.shape[:2], 2 * len(layers), layers[0].heads, -1).permute(2, 0, 3, 1, 4)
        self._cross = [(parts[2 * i].contiguous(), parts[2 * i + 1].contiguous()) for i in range(len(layers))]
        self._masked = ~packing.unpack(torch.ones(memory.shape[0], dtype=torch.bool, device=memory.device))

    def reorder(self, order: Tensor) -> None:
        """Keep the hypotheses ``order`` int64 (B',), in this order; B' may be smaller or larger than B."""
        self.batch = order.shape[0]
        self._keys = [key if key is None else key.index_select(0, order) for key in self._keys]
        self._values = [value if value is None else value.index_select(0, order) for value in self._values]
        self._cross = [(key.index_select(0, order), value.index_select(0, order)) for key, value in self._cross]
        if self._masked is not None:
            self._masked = self._masked.index_select(0, order)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values of ``layer`` and return all of them so far."""
        end = self.length + key.shape[2]
        stored = self._keys[layer]
        if stored is None or stored.shape[2] < end:
            self._keys[layer] = self._grown(stored, key, end)
            self._values[layer] = self._grown(self._values[layer], value, end)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def cross(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross-attention keys, values (B, H, S, D) of ``layer`` and the mask bool (B, S), True where padded."""
        return *self._cross[layer], self._masked

    def _grown(self, stored: Tensor | None, like: Tensor, end: int) -> Tensor:
        capacity = max(_FIRST_CAPACITY, end, 0 if stored is None else 2 * stored.shape[2])
        grown = like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])
        if stored is not None:
            grown[:, :, : self.length] = stored[:, :, : self.length]
        return grown


def decode_layers(
    layers: Sequence[LSTransformerDecoderLayer], x: Tensor, state: DecodingState, alignment_layer: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the layers' output for T new tokens, and append their keys and values to ``state``.

    Args:
        layers: the decoder's layers.
        x: (B, T, C), embeddings of the new tokens.
        state: what came before.
        alignment_layer: layer whose cross-attention weights are wanted, or None.

    Returns:
        (B, T, C), and attention weights (H, B, T, S) or None.
    """
    new = x.shape[1]
    position = torch.arange(state.length + new, device=x.device)
    future = position > position[state.length :, None]
    weights = None
    for i, layer in enumerate(layers):
        keep = i == alignment_layer
        x, attention = _decode_layer(layer, i, x, state, future if new > 1 else None, keep)
        weights = attention if keep else weights
    state.length += new
    return x, weights


def _decode_layer(
    layer: LSTransformerDecoderLayer, index: int, x: Tensor, state: DecodingState, future: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    before = layer.normalize_before
    weights = None

    residual, attention = x, layer.self_attn
    if before:
        x = layer.self_attn_layer_norm(x)
    heads = layer.heads
    key, value = state.append(index, _heads(attention.k_proj(x), heads), _heads(attention.v_proj(x), heads))
    x, _ = _attend(_heads(attention.q_proj(x), heads), key, value, future)
    x = residual + attention.out_proj(x)
    if not before:
        x = layer.self_attn_layer_norm(x)

    attention = layer.encoder_attn
    if attention is not None:
        residual = x
        if before:
            x = layer.encoder_attn_layer_norm(x)
        key, value, masked = state.cross(index)
        x, probabilities = _attend(_heads(attention.q_proj(x), heads), key, value, masked[:, None, None, :])
        weights = probabilities.transpose(0, 1) if keep else None
        x = residual + attention.out_proj(x)
        if not before:
            x = layer.encoder_attn_layer_norm(x)

    residual = x
    if before:
        x = layer.final_layer_norm(x)
    x = residual + layer.fc2(_ACTIVATIONS[layer.activation](layer.fc1(x)))
    return x if before else layer.final_layer_norm(x), weights


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
    if masked is not None:
        scores = scores.masked_fill(masked, float("-inf"))
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    if masked is not None:
        # Nothing to attend to (a source of padding only) gives zeros, as in training.
        probabilities = probabilities.nan_to_num(0.0)
    attended = probabilities.to(v.dtype) @ v
    return attended.transpose(1, 2).flatten(2), probabilities

"""Attention weights of a decoder layer to the source, for alignments; the fused layers never hold them.

The layer's self-attention and scores are computed once more in plain PyTorch, without dropout and gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ls_train.ops.attention import attention
from ls_train.packing import Packing


class Request:
    """Asks a decoder for the weights of one layer.

    Args:
        layer: the decoder layer.
        heads: average only the first so many heads; None averages all.

    Attributes:
        weights: (B, T, S), the average over heads, once the decoder has passed the layer.
    """

    def __init__(self, layer: nn.Module, heads: int | None = None) -> None:
        self.layer = layer
        self.heads = heads
        self.weights: Tensor | None = None

    @torch.no_grad()
    def compute(self, x: Tensor, packing: Packing, kv: Tensor, memory: Packing, index: int) -> None:
        """Set ``weights``.

        Args:
            x: (N, C), the layer's packed input.
            packing: of the target.
            kv: (Ns, L * 2C), cross-attention keys and values.
            memory: packing of the source.
            index: the layer's slice of ``kv``.
        """
        layer, width = self.layer, self.layer.embed_dim
        query = self._cross_query(x, packing)
        q = packing.unpack(query).unflatten(2, (layer.heads, -1))
        k = memory.unpack(kv[:, 2 * index * width : (2 * index + 1) * width].contiguous()).unflatten(
            2, (layer.heads, -1)
        )
        scores = torch.einsum("bthd,bshd->hbts", q, k).float() * q.shape[3] ** -0.5
        real = memory.unpack(torch.ones_like(kv[:, 0])) > 0
        weights = scores.masked_fill(~real[:, None, :], float("-inf")).softmax(3).to(x.dtype)
        self.weights = weights[: self.heads].mean(0)

    def _cross_query(self, x: Tensor, packing: Packing) -> Tensor:
        layer, own = self.layer, self.layer.self_attn
        normed = layer.self_attn_layer_norm(x) if layer.normalize_before else x
        q, k, v = (
            linear(normed, projection.weight, projection.bias).unflatten(1, (layer.heads, -1))
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        starts, longest = packing.cu_seqlens, packing.max_length
        attended = attention(q, k, v, starts, starts, longest, longest, causal=layer.causal).flatten(1)
        x = x + linear(attended, own.out_proj.weight, own.out_proj.bias)
        x = layer.encoder_attn_layer_norm(x) if layer.normalize_before else layer.self_attn_layer_norm(x)
        return linear(x, layer.encoder_attn.q_proj.weight, layer.encoder_attn.q_proj.bias)

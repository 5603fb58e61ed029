"""Encoder and decoder layers in plain PyTorch, with the keep masks of ``ls_train.rng``, one sentence at a time."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ls_train import rng
from ls_train.layers.call import ACTIVATION, CROSS_ATTENTION, CROSS_OUTPUT, FFN_OUTPUT, SELF_ATTENTION, SELF_OUTPUT
from ls_train.packing import Packing

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
}


def plain_layer(
    layer: nn.Module,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    packing: Packing,
    seed: Tensor | None,
    offset: int,
    memory: Tensor | None = None,
    memory_packing: Packing | None = None,
) -> Tensor:
    """Return what ``layer`` with ``parameters`` gives for packed rows ``x``; dropout is on when there is a seed."""
    run = _Plain(layer, parameters, packing, seed, offset)
    x = run.block(x, "self_attn_layer_norm", SELF_OUTPUT, lambda h: run.attend("self_attn", h, h, packing))
    if memory is not None:
        x = run.block(
            x,
            "encoder_attn_layer_norm",
            CROSS_OUTPUT,
            lambda h: run.attend("encoder_attn", h, memory, memory_packing),
        )
    return run.block(x, "final_layer_norm", FFN_OUTPUT, run.feed_forward)


class _Plain:
    def __init__(self, layer, parameters, packing, seed, offset):
        self.layer, self.parameters, self.packing, self.offset = layer, parameters, packing, offset
        self.seed = None if seed is None else seed.cpu()

    def linear(self, name, x):
        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"])

    def norm(self, name, x):
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return F.layer_norm(x, x.shape[1:], weight, bias, self.layer.eps)

    def drop(self, x, site, p):
        if self.seed is None or p == 0:
            return x
        keep = rng.keep_mask(self.seed, self.offset + site, *x.shape, p)
        return x * keep.to(x.device) * rng.keep_scale(p)

    def block(self, x, norm, site, function):
        before = self.layer.normalize_before
        y = x + self.drop(function(self.norm(norm, x) if before else x), site, self.layer.dropout)
        return y if before else self.norm(norm, y)

    def feed_forward(self, x):
        inner = ACTIVATIONS[self.layer.activation](self.linear("fc1", x))
        return self.linear("fc2", self.drop(inner, ACTIVATION, self.layer.activation_dropout))

    def attend(self, name, x, source, source_packing):
        heads, own = self.layer.heads, name == "self_attn"
        p = 0.0 if self.seed is None else self.layer.attention_dropout
        q = self.linear(f"{name}.q_proj", x).unflatten(1, (heads, -1))
        k = self.linear(f"{name}.k_proj", source).unflatten(1, (heads, -1))
        v = self.linear(f"{name}.v_proj", source).unflatten(1, (heads, -1))
        parts = []
        starts, source_starts = self.packing.cu_seqlens.tolist(), source_packing.cu_seqlens.tolist()
        for b in range(self.packing.batch):
            rows, columns = slice(*starts[b : b + 2]), slice(*source_starts[b : b + 2])
            queries, keys = rows.stop - rows.start, columns.stop - columns.start
            if keys == 0:
                parts.append(q[rows] * 0)
                continue
            scores = torch.einsum("thd,shd->hts", q[rows], k[columns]) * q.shape[2] ** -0.5
            if own and self.layer.causal:
                future = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            probabilities = scores.softmax(-1)
            if p > 0:
                site = self.offset + (SELF_ATTENTION if own else CROSS_ATTENTION)
                keep = rng.attention_keep_mask(self.seed, site, torch.arange(rows.start, rows.stop), heads, keys, p).to(
                    x.device
                )
                probabilities = probabilities * keep * rng.keep_scale(p)
            parts.append(torch.einsum("hts,shd->thd", probabilities, v[columns]))
        return self.linear(f"{name}.out_proj", torch.cat(parts).flatten(1))

"""Transformer decoder layer (self-attention, cross attention, feed-forward) as one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ls_train.layers import modules, residual
from ls_train.layers.attention import (
    cross_attention_bwd,
    cross_attention_fields,
    cross_attention_fwd,
    self_attention_bwd,
    self_attention_fields,
    self_attention_fwd,
)
from ls_train.layers.call import (
    CROSS_OUTPUT,
    FFN_OUTPUT,
    SELF_OUTPUT,
    Call,
    Pass,
    Sizes,
    backward_pass,
    layer_sizes,
)
from ls_train.layers.compiled import held_backward, layer_backward, layer_forward, parameter_groups
from ls_train.layers.config import LayerConfig
from ls_train.layers.cross_kv import cross_kv, finish_slice, gradient_slice
from ls_train.layers.encoder_layer import EncoderLayerFunction, LSTransformerEncoderLayer
from ls_train.layers.ffn import feed_forward_bwd, feed_forward_fwd
from ls_train.layers.gradients import (
    GradientWriter,
    Held,
    given,
    once_differentiable,
    save_parameters,
    saved_parameters,
)
from ls_train.memory import Field, SavedBlock, aligned, kept, workspace
from ls_train.packing import Packing


class DecoderParameters(NamedTuple):
    """Parameters of a decoder layer in the order in which its autograd function takes them (keys, values apart)."""

    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor
    v_weight: Tensor
    v_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    self_norm_weight: Tensor
    self_norm_bias: Tensor
    cross_q_weight: Tensor
    cross_q_bias: Tensor
    cross_out_weight: Tensor
    cross_out_bias: Tensor
    cross_norm_weight: Tensor
    cross_norm_bias: Tensor
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor
    final_norm_weight: Tensor
    final_norm_bias: Tensor


_INDEX = {name: i for i, name in enumerate(DecoderParameters._fields)}
_FC1 = _INDEX["fc1_weight"]
_GROUPS = parameter_groups(DecoderParameters._fields)


def decoder_block(
    rows: int, embed_dim: int, ffn_dim: int, heads: int, normalize_before: bool, dtype: torch.dtype
) -> SavedBlock:
    """Return the layout of what a decoder layer saves for its backward, besides its input and cross keys and values."""
    fields = (
        *self_attention_fields(embed_dim, heads),
        *residual.norm_fields("self_norm", embed_dim, not normalize_before),
        *cross_attention_fields(embed_dim, heads),
        *residual.norm_fields("cross_norm", embed_dim),
        *residual.norm_fields("final_norm", embed_dim),
        Field("hidden", ffn_dim),
    )
    return SavedBlock(fields, rows, dtype)


@lru_cache(maxsize=1024)
def _sizes(rows: int, embed_dim: int, ffn_dim: int, heads: int, normalize_before: bool, dtype: torch.dtype) -> Sizes:
    layout = decoder_block(rows, embed_dim, ffn_dim, heads, normalize_before, dtype)
    return layer_sizes(layout, rows, embed_dim, ffn_dim, heads, dtype.itemsize, True, normalize_before)


class DecoderLayerFunction(torch.autograd.Function):
    """(y, kv) of a decoder layer; ``kv`` is handed on so that its gradient is one buffer, see ``cross_kv``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Call, save: bool, x: Tensor, kv: Tensor, *arguments: Tensor | Held
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output (N, C) for ``x`` (N, C), and ``kv`` itself; ``save``: a backward may follow."""
        parameters, held = given(arguments)
        y, ffn_dim = torch.empty_like(x), parameters[_FC1].shape[0]
        sizes = _sizes(*x.shape, ffn_dim, call.heads, call.normalize_before, x.dtype)
        layout, saved = sizes.layout, None
        block = layout.allocate(x) if save else None
        if not layer_forward(y, block, x, kv, parameters, held, sizes, call):
            with workspace(x, sizes.forward + (0 if save else aligned(layout.size))) as scratch:
                block = scratch.take((layout.size // x.itemsize,), x.dtype) if block is None else block
                saved = layout.views(block)
                _forward(y, x, kv, Pass(call, DecoderParameters(*parameters), saved, scratch))
        if save:
            ctx.call, ctx.sizes, ctx.saved = call, sizes, None if saved is None else kept(saved)
            save_parameters(ctx, arguments, x, kv, block)
            ctx.set_materialize_grads(False)
        return y, kv

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor | None, dkv: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, ``kv`` and of the parameters that have no slot in a flat buffer."""
        (x, kv, block), parameters = saved_parameters(ctx, 3)
        saved, ctx.saved = ctx.saved, None
        if dy is None:
            return None, None, None, dkv, *([None] * (len(ctx.needs_input_grad) - 4))
        call, sizes, held, needed = ctx.call, ctx.sizes, ctx.held, ctx.needs_input_grad
        dy, dx, width, is_part = dy.contiguous(), torch.empty_like(x), 2 * x.shape[1], False
        if needed[3]:
            dkv, dkv_slice, is_part = gradient_slice(dkv, kv, call.layer * width, width)
        else:
            dkv, dkv_slice = None, x.new_empty((kv.shape[0], width))
        if held is not None and held_backward(dx, dkv_slice, dy, x, kv, block, held, _GROUPS, _INDEX, sizes, call):
            gradients = (None,)
        else:
            with workspace(x, sizes.backward) as scratch:
                writer = GradientWriter.of(ctx, _INDEX, parameters, scratch=scratch)
                if not layer_backward(dx, dkv_slice, dy, x, kv, block, parameters, _GROUPS, writer, sizes, call):
                    saved = sizes.layout.views(block) if saved is None else saved
                    run = backward_pass(call, DecoderParameters(*parameters), saved, scratch, writer, x, sizes.sums)
                    _backward(dx, dkv_slice, dy, x, kv, run)
                    run.column_sums.finish()
            gradients = writer.finish()
        if dkv is not None:
            finish_slice(dkv, dkv_slice, is_part, call.layer * width)
        return None, None, dx if needed[2] else None, dkv, *gradients


def _forward(y: Tensor, x: Tensor, kv: Tensor, run: Pass) -> None:
    p, saved, scratch = run.parameters, run.saved, run.scratch
    projected, normed = scratch.take(x.shape, x.dtype), scratch.take(x.shape, x.dtype)
    if run.call.normalize_before:
        residual.norm_fwd(normed, x, "self_norm", run)
        self_attention_fwd(projected, normed, run)
        residual.add_norm_fwd(normed, projected, p.out_bias, x, "cross_norm", SELF_OUTPUT, run)
        cross_attention_fwd(projected, normed, kv, run)
        between = saved.cross_norm_sum
        residual.add_norm_fwd(normed, projected, p.cross_out_bias, between, "final_norm", CROSS_OUTPUT, run)
        feed_forward_fwd(projected, normed, run)
        residual.add_fwd(y, projected, p.fc2_bias, saved.final_norm_sum, FFN_OUTPUT, run)
    else:
        self_attention_fwd(projected, x, run)
        # y is free for the first layer norm's output until its own turn comes.
        residual.add_norm_fwd(y, projected, p.out_bias, x, "self_norm", SELF_OUTPUT, run)
        cross_attention_fwd(projected, y, kv, run)
        residual.add_norm_fwd(normed, projected, p.cross_out_bias, y, "cross_norm", CROSS_OUTPUT, run)
        feed_forward_fwd(projected, normed, run)
        residual.add_norm_fwd(y, projected, p.fc2_bias, normed, "final_norm", FFN_OUTPUT, run)


def _backward(dx: Tensor, dkv: Tensor, dy: Tensor, x: Tensor, kv: Tensor, run: Pass) -> None:
    saved, scratch = run.saved, run.scratch
    dropped, dsum, dresidual = (scratch.take(x.shape, x.dtype) for _ in range(3))
    # dx is free for layer norm outputs until its own turn comes.
    if run.call.normalize_before:
        normed = residual.norm_again(dx, saved.final_norm_sum, "final_norm", run)
        dnormed = scratch.take(x.shape, x.dtype)
        dprojected = residual.add_bwd(dropped, dy, "fc2_bias", FFN_OUTPUT, run)
        feed_forward_bwd(dnormed, dprojected, normed, run, False)
        dprojected = residual.add_norm_bwd(
            dropped, dsum, dnormed, dy, "cross_out_bias", "final_norm", CROSS_OUTPUT, run
        )
        normed = residual.norm_again(dx, saved.cross_norm_sum, "cross_norm", run)
        cross_attention_bwd(dnormed, dkv, dprojected, normed, kv, run, False)
        dprojected = residual.add_norm_bwd(
            dropped, dresidual, dnormed, dsum, "out_bias", "cross_norm", SELF_OUTPUT, run
        )
        normed = residual.norm_again(dx, x, "self_norm", run)
        self_attention_bwd(dnormed, dprojected, normed, run, False)
        residual.norm_bwd(dx, dnormed, dresidual, x, "self_norm", run)
    else:
        dprojected = residual.add_norm_bwd(dropped, dsum, dy, None, "fc2_bias", "final_norm", FFN_OUTPUT, run)
        normed = residual.norm_again(dx, saved.cross_norm_sum, "cross_norm", run)
        feed_forward_bwd(dsum, dprojected, normed, run, True)
        dprojected = residual.add_norm_bwd(
            dropped, dresidual, dsum, None, "cross_out_bias", "cross_norm", CROSS_OUTPUT, run
        )
        normed = residual.norm_again(dx, saved.self_norm_sum, "self_norm", run)
        cross_attention_bwd(dresidual, dkv, dprojected, normed, kv, run, True)
        dprojected = residual.add_norm_bwd(dropped, dx, dresidual, None, "out_bias", "self_norm", SELF_OUTPUT, run)
        self_attention_bwd(dx, dprojected, x, run, True)


class LSTransformerDecoderLayer(LSTransformerEncoderLayer):
    """Transformer decoder layer, parameters named and initialised as in fairseq.

    Args:
        config: from :meth:`get_config`; or give the sizes in torch's style instead.
        initial_weights: self-attention q, k, v, output and layer norm, cross-attention q, k, v, output and layer norm
            (both only with cross attention), fc1, fc2, final layer norm weights.
        initial_biases: the biases in the same order.
        memory_dim: size of the encoder's output; None is C.
        cross_attention: whether the layer attends to an encoder.

    The other arguments and the errors are those of :class:`LSTransformerEncoderLayer`.
    """

    def __init__(
        self,
        config: LayerConfig | None = None,
        initial_weights: Sequence[Tensor | None] | None = None,
        initial_biases: Sequence[Tensor | None] | None = None,
        *,
        embed_dim: int | None = None,
        num_heads: int | None = None,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        activation: str = "relu",
        normalize_before: bool = False,
        eps: float = 1e-5,
        memory_dim: int | None = None,
        cross_attention: bool = True,
    ) -> None:
        if config is None:
            config = modules.layer_config(
                embed_dim,
                num_heads,
                ffn_dim,
                dropout,
                attention_dropout,
                activation_dropout,
                activation,
                normalize_before,
                eps,
            )
            config = replace(config, memory_size=memory_dim, cross_attention=cross_attention)
        super().__init__(config, initial_weights, initial_biases, causal=True)

    @modules.check_kinds
    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output (B, T, C).

        Args:
            x: (B, T, C).
            encoder_out: (B, S, Ce), or None without cross attention.
            encoder_padding_mask: bool (B, S), True where padded; None: no padding.
            padding_mask: bool (B, T), True where padded; the output is zero there. None: no padding.
            seed: int64 (1,) on the device, of the dropout masks; None draws one from torch's generator.

        Raises:
            TypeError: an input and the parameters differ in dtype.
            ValueError: a shape, device or a mask's dtype does not fit, or ``encoder_out`` is missing.
        """
        modules.check_batch("x", x, self.embed_dim)
        packing = Packing.from_padding_mask(padding_mask, x.shape[0], x.shape[1], x.device)
        rows = packing.pack(x)
        if self.encoder_attn is None:
            return packing.unpack(self.forward_packed(rows, packing, seed=seed)[0])
        if encoder_out is None:
            raise ValueError("encoder_out is missing; build the layer with cross_attention=False to do without")
        modules.check_batch("encoder_out", encoder_out, self.encoder_attn.k_proj.in_features)
        if encoder_out.shape[0] != x.shape[0]:
            raise ValueError(f"encoder_out has batch {encoder_out.shape[0]}, x has {x.shape[0]}; they must be equal")
        memory = Packing.from_padding_mask(
            encoder_padding_mask, encoder_out.shape[0], encoder_out.shape[1], encoder_out.device
        )
        kv = cross_kv(memory.pack(encoder_out), memory, [self])
        return packing.unpack(self.forward_packed(rows, packing, kv, memory, seed=seed)[0])

    @modules.check_kinds
    def forward_packed(
        self,
        x: Tensor,
        packing: Packing,
        kv: Tensor | None = None,
        memory: Packing | None = None,
        layer: int = 0,
        seed: Tensor | None = None,
        rng_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output (N, C) for packed rows ``x`` (N, C), and ``kv`` for the next layer.

        Args:
            x: (N, C); rows beyond the used ones must be finite.
            packing: where the sequences lie.
            kv: (Ns, L * 2C) from :func:`ls_train.layers.cross_kv.cross_kv` for the first layer, then what the layer
                before returned; None without cross attention. A hook on it that keeps the gradient needs a clone of it:
                the layers before add to it.
            memory: where the encoder's sequences lie in the rows of ``kv``.
            layer: which slice of ``kv`` is this layer's.
            seed: int64 (1,) on the device, of the dropout masks; None draws one from torch's generator.
            rng_offset: first of the eight dropout constants of this layer; different for each layer of one seed.
        """
        name = type(self).__name__
        modules.check_rows(name, "x", x, self.embed_dim, packing)
        if self.encoder_attn is None:
            call = self._call(packing, seed, rng_offset)
            (x,), save, arguments = modules.prepare(name, (x,), modules.parameters_of(self._self_modules()))
            return modules.apply(EncoderLayerFunction, call, save, x.contiguous(), *arguments), kv
        if kv is None or memory is None:
            raise ValueError(f"{name}: kv and memory are missing; make them with cross_kv(...)")
        rows = memory.positions.shape[0]
        if kv.dim() != 2 or kv.shape[0] != rows or not 0 < (layer + 1) * 2 * self.embed_dim <= kv.shape[1]:
            raise ValueError(f"{name}: kv of shape {tuple(kv.shape)} has no slice for layer {layer} of {rows} rows")
        (x, kv), save, arguments = modules.prepare(name, (x, kv), modules.parameters_of(self._cross_modules()))
        call = self._call(packing, seed, rng_offset, memory.cu_seqlens, memory.max_length, layer)
        y, handed_on = modules.apply(DecoderLayerFunction, call, save, x.contiguous(), kv, *arguments)
        return y, handed_on if kv.requires_grad else kv

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.encoder_attn is not None:
            modules.keep_cross_kv_together([self])

    def _build_cross_attention(self, config: LayerConfig) -> None:
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if config.cross_attention:
            self.encoder_attn = modules.Attention(config.hidden_size, config.memory_size)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
            modules.keep_cross_kv_together([self])

    def _cross_modules(self) -> list[nn.Module]:
        """Return what :class:`DecoderLayerFunction` takes weight and bias of, in its order."""
        own = self._self_modules()
        attention, norm = modules.children(self, "encoder_attn", "encoder_attn_layer_norm")
        return [*own[:5], *modules.children(attention, "q_proj", "out_proj"), norm, *own[5:]]

    def _initialised_modules(self) -> list[nn.Module]:
        own, attention = self._self_modules(), self.encoder_attn
        if attention is None:
            return own
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
        return [*own[:5], *projections, self.encoder_attn_layer_norm, *own[5:]]

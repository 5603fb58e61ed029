"""Transformer encoder layer (self-attention, feed-forward) as one autograd function over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ls_train.layers import modules, residual
from ls_train.layers.attention import self_attention_bwd, self_attention_fields, self_attention_fwd
from ls_train.layers.call import (
    FFN_OUTPUT,
    SELF_OUTPUT,
    Call,
    Pass,
    Sizes,
    backward_pass,
    layer_sizes,
)
from ls_train.layers.compiled import held_backward, layer_backward, layer_forward, parameter_groups
from ls_train.layers.config import LayerConfig, from_preset
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


class EncoderParameters(NamedTuple):
    """Parameters of an encoder layer in the order in which its autograd function takes them."""

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
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor
    final_norm_weight: Tensor
    final_norm_bias: Tensor


_INDEX = {name: i for i, name in enumerate(EncoderParameters._fields)}
_FC1 = _INDEX["fc1_weight"]
_GROUPS = parameter_groups(EncoderParameters._fields)


def encoder_block(
    rows: int, embed_dim: int, ffn_dim: int, heads: int, normalize_before: bool, dtype: torch.dtype
) -> SavedBlock:
    """Return the layout of what an encoder layer saves for its backward, besides its input."""
    fields = (
        *self_attention_fields(embed_dim, heads),
        *residual.norm_fields("self_norm", embed_dim, not normalize_before),
        *residual.norm_fields("final_norm", embed_dim),
        Field("hidden", ffn_dim),
    )
    return SavedBlock(fields, rows, dtype)


@lru_cache(maxsize=1024)
def _sizes(rows: int, embed_dim: int, ffn_dim: int, heads: int, normalize_before: bool, dtype: torch.dtype) -> Sizes:
    layout = encoder_block(rows, embed_dim, ffn_dim, heads, normalize_before, dtype)
    return layer_sizes(layout, rows, embed_dim, ffn_dim, heads, dtype.itemsize, False, normalize_before)


class EncoderLayerFunction(torch.autograd.Function):
    """Self-attention and feed-forward with residuals and layer norms; with ``call.causal`` a decoder-only layer."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, save: bool, x: Tensor, *arguments: Tensor | Held) -> Tensor:
        """Return the layer's output (N, C) for ``x`` (N, C); ``save``: a backward may follow."""
        parameters, held = given(arguments)
        y, ffn_dim = torch.empty_like(x), parameters[_FC1].shape[0]
        sizes = _sizes(*x.shape, ffn_dim, call.heads, call.normalize_before, x.dtype)
        layout, saved = sizes.layout, None
        block = layout.allocate(x) if save else None
        if not layer_forward(y, block, x, None, parameters, held, sizes, call):
            with workspace(x, sizes.forward + (0 if save else aligned(layout.size))) as scratch:
                block = scratch.take((layout.size // x.itemsize,), x.dtype) if block is None else block
                saved = layout.views(block)
                _forward(y, x, Pass(call, EncoderParameters(*parameters), saved, scratch))
        if save:
            ctx.call, ctx.sizes, ctx.saved = call, sizes, None if saved is None else kept(saved)
            save_parameters(ctx, arguments, x, block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and of the parameters that have no slot in a flat buffer."""
        (x, block), parameters = saved_parameters(ctx, 2)
        saved, ctx.saved = ctx.saved, None
        call, sizes = ctx.call, ctx.sizes
        dy, dx, held = dy.contiguous(), torch.empty_like(x), ctx.held
        if held is not None and held_backward(dx, None, dy, x, None, block, held, _GROUPS, _INDEX, sizes, call):
            return None, None, dx if ctx.needs_input_grad[2] else None, None
        with workspace(x, sizes.backward) as scratch:
            writer = GradientWriter.of(ctx, _INDEX, parameters, scratch=scratch)
            if not layer_backward(dx, None, dy, x, None, block, parameters, _GROUPS, writer, sizes, call):
                saved = sizes.layout.views(block) if saved is None else saved
                run = backward_pass(call, EncoderParameters(*parameters), saved, scratch, writer, x, sizes.sums)
                _backward(dx, dy, x, run)
                run.column_sums.finish()
        return None, None, dx if ctx.needs_input_grad[2] else None, *writer.finish()


def _forward(y: Tensor, x: Tensor, run: Pass) -> None:
    p, saved, scratch = run.parameters, run.saved, run.scratch
    projected, normed = scratch.take(x.shape, x.dtype), scratch.take(x.shape, x.dtype)
    if run.call.normalize_before:
        residual.norm_fwd(normed, x, "self_norm", run)
        self_attention_fwd(projected, normed, run)
        residual.add_norm_fwd(normed, projected, p.out_bias, x, "final_norm", SELF_OUTPUT, run)
        feed_forward_fwd(projected, normed, run)
        residual.add_fwd(y, projected, p.fc2_bias, saved.final_norm_sum, FFN_OUTPUT, run)
    else:
        self_attention_fwd(projected, x, run)
        residual.add_norm_fwd(normed, projected, p.out_bias, x, "self_norm", SELF_OUTPUT, run)
        feed_forward_fwd(projected, normed, run)
        residual.add_norm_fwd(y, projected, p.fc2_bias, normed, "final_norm", FFN_OUTPUT, run)


def _backward(dx: Tensor, dy: Tensor, x: Tensor, run: Pass) -> None:
    saved, scratch = run.saved, run.scratch
    dropped, dsum = scratch.take(x.shape, x.dtype), scratch.take(x.shape, x.dtype)
    # dx is free for layer norm outputs until its own turn comes.
    if run.call.normalize_before:
        normed = residual.norm_again(dx, saved.final_norm_sum, "final_norm", run)
        dnormed = scratch.take(x.shape, x.dtype)
        dprojected = residual.add_bwd(dropped, dy, "fc2_bias", FFN_OUTPUT, run)
        feed_forward_bwd(dnormed, dprojected, normed, run, False)
        dprojected = residual.add_norm_bwd(dropped, dsum, dnormed, dy, "out_bias", "final_norm", SELF_OUTPUT, run)
        normed = residual.norm_again(dx, x, "self_norm", run)
        self_attention_bwd(dnormed, dprojected, normed, run, False)
        residual.norm_bwd(dx, dnormed, dsum, x, "self_norm", run)
    else:
        dprojected = residual.add_norm_bwd(dropped, dsum, dy, None, "fc2_bias", "final_norm", FFN_OUTPUT, run)
        normed = residual.norm_again(dx, saved.self_norm_sum, "self_norm", run)
        feed_forward_bwd(dsum, dprojected, normed, run, True)
        dprojected = residual.add_norm_bwd(dropped, dx, dsum, None, "out_bias", "self_norm", SELF_OUTPUT, run)
        self_attention_bwd(dx, dprojected, x, run, True)


class LSTransformerEncoderLayer(nn.Module):
    """Transformer encoder layer, parameters named and initialised as in fairseq.

    Args:
        config: from :meth:`get_config`; or give the sizes in torch's style instead.
        initial_weights: q, k, v, attention output, attention layer norm, fc1, fc2, final layer norm weights.
        initial_biases: the biases in the same order.
        embed_dim: C.
        num_heads: H.
        ffn_dim: F; None is 4 C.
        dropout: probability on the outputs of attention and feed-forward.
        attention_dropout: probability on attention weights.
        activation_dropout: probability after the activation.
        activation: relu, gelu, gelu_tanh or swish.
        normalize_before: pre-norm (True) or post-norm (False).
        eps: of the layer norms.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: a size, probability or the activation has a bad value.
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
        causal: bool = False,
    ) -> None:
        super().__init__()
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
        config.check()
        self.heads = config.nhead
        self.dropout = config.hidden_dropout_ratio
        self.attention_dropout = config.attn_prob_dropout_ratio
        self.activation_dropout = config.activation_dropout_ratio
        self.activation = config.activation_fn
        self.normalize_before = config.pre_layer_norm
        self.eps = config.layer_norm_eps
        self.causal = causal
        self.embed_dim = size = config.hidden_size
        self.self_attn = modules.Attention(size)
        self.self_attn_layer_norm = nn.LayerNorm(size, self.eps)
        self._build_cross_attention(config)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)
        self.final_layer_norm = nn.LayerNorm(size, self.eps)
        modules.keep_qkv_together(self.self_attn)
        ordered = self._initialised_modules()
        modules.fill([module.weight for module in ordered], initial_weights, "initial_weights")
        modules.fill([module.bias for module in ordered], initial_biases, "initial_biases")
        if config.fp16:
            self.half()

    @staticmethod
    def get_config(model: str | None = None, **values: Any) -> LayerConfig:
        """Return a configuration from a preset (``transformer-base``, ...) and field values, which win.

        Raises:
            ValueError: the model or a field is unknown, missing or has a bad value.
        """
        return from_preset(LayerConfig, model, values)

    @modules.check_kinds
    def forward(self, x: Tensor, padding_mask: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """Return the layer's output (B, T, C).

        Args:
            x: (B, T, C).
            padding_mask: bool (B, T), True where padded; the output is zero there. None: no padding.
            seed: int64 (1,) on the device, of the dropout masks; None draws one from torch's generator.

        Raises:
            TypeError: ``x`` and the parameters differ in dtype.
            ValueError: a shape, device or the mask's dtype does not fit.
        """
        modules.check_batch("x", x, self.embed_dim)
        packing = Packing.from_padding_mask(padding_mask, x.shape[0], x.shape[1], x.device)
        return packing.unpack(self.forward_packed(packing.pack(x), packing, seed))

    @modules.check_kinds
    def forward_packed(self, x: Tensor, packing: Packing, seed: Tensor | None = None, rng_offset: int = 0) -> Tensor:
        """Return the layer's output (N, C) for packed rows ``x`` (N, C).

        Args:
            x: (N, C); rows beyond the used ones must be finite.
            packing: where the sequences lie.
            seed: int64 (1,) on the device, of the dropout masks; None draws one from torch's generator.
            rng_offset: first of the eight dropout constants of this layer; different for each layer of one seed.
        """
        name = type(self).__name__
        modules.check_rows(name, "x", x, self.embed_dim, packing)
        (x,), save, arguments = modules.prepare(name, (x,), modules.parameters_of(self._self_modules()))
        call = self._call(packing, seed, rng_offset)
        return modules.apply(EncoderLayerFunction, call, save, x.contiguous(), *arguments)

    def extra_repr(self) -> str:
        """Return the layer's settings for ``repr``."""
        return (
            f"heads={self.heads}, activation={self.activation}, normalize_before={self.normalize_before}, "
            f"dropout={self.dropout}, attention_dropout={self.attention_dropout}, "
            f"activation_dropout={self.activation_dropout}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Copies of parameters have lost what was declared about them.
        modules.keep_qkv_together(self.self_attn)

    def _build_cross_attention(self, config: LayerConfig) -> None:
        """Build what a decoder layer has between self-attention and feed-forward; nothing here."""

    def _call(
        self,
        packing: Packing,
        seed: Tensor | None,
        rng_offset: int,
        memory_cu: Tensor | None = None,
        memory_max_length: int = 0,
        layer: int = 0,
    ) -> Call:
        """Return what a call needs; the arguments are those of :meth:`forward_packed` and attributes of the result."""
        rates = (self.dropout, self.attention_dropout, self.activation_dropout) if self.training else (0.0, 0.0, 0.0)
        cu = packing.cu_seqlens
        return Call(
            cu,
            packing.rows,
            modules.dropout_seed(seed, rates, cu),
            memory_cu,
            self.heads,
            packing.max_length,
            memory_max_length,
            layer,
            rng_offset,
            self.normalize_before,
            self.causal,
            self.eps,
            *rates,
            self.activation,
        )

    def _self_modules(self) -> list[nn.Module]:
        """Return what :class:`EncoderLayerFunction` takes weight and bias of, in its order."""
        attention, norm, *rest = modules.children(
            self, "self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"
        )
        return [*modules.children(attention, "q_proj", "k_proj", "v_proj", "out_proj"), norm, *rest]

    def _initialised_modules(self) -> list[nn.Module]:
        """Return the modules in the order of ``initial_weights`` and ``initial_biases``."""
        return self._self_modules()

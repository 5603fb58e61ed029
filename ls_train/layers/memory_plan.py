"""How much memory one training step of a model takes, from its configuration and the batch size alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ls_train.layers.call import backward_scratch, backward_sums
from ls_train.layers.config import LayerConfig, TransformerConfig
from ls_train.layers.decoder_layer import decoder_block
from ls_train.layers.encoder_layer import encoder_block
from ls_train.layers.transformer import LSTransformer
from ls_train.memory import round_size
from ls_train.ops._product import gemm_workspace
from ls_train.ops.linear_cross_entropy import chunk_rows


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one training step.

    Attributes:
        parameters: parameters in the activation type.
        gradients: their gradients.
        optimizer: Adam's moments, and for 16-bit parameters the float32 master copy.
        saved: what forward keeps for backward: blocks, layer inputs, cross keys and values.
        workspace: scratch shared by all layers.
        criterion: what the output projection with its loss holds at the end of the forward.
        backward: what the first layer's backward adds while all blocks are still held: the gradient of the cross keys
            and values and those of two activations.
        fresh: gradients that autograd holds at the end of the backward, before they go into the flat buffer; 0 with
            ``direct_grads``.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    workspace: int
    criterion: int
    backward: int
    fresh: int = 0

    @property
    def total(self) -> int:
        """Largest sum that is held at a time."""
        lasting = self.parameters + self.gradients + self.optimizer + self.workspace
        return lasting + max(self.saved + max(self.criterion, self.backward), self.fresh)


def memory_plan(
    config: TransformerConfig,
    tokens: int,
    source_tokens: int | None = None,
    dtype: torch.dtype = torch.float16,
    direct_grads: bool = True,
) -> MemoryPlan:
    """Return the memory of one training step with :func:`ls_train.ops.linear_cross_entropy.linear_cross_entropy`.

    Scratch of cuBLAS, the batch itself and kernels' code come on top.

    Args:
        config: of the model.
        tokens: real target tokens of a batch.
        source_tokens: real source tokens; None is ``tokens``.
        dtype: type of activations and parameters.
        direct_grads: whether layers write gradients into :class:`ls_train.FusedAdam`'s flat buffer.
    """
    source_tokens = tokens if source_tokens is None else source_tokens
    with torch.device("meta"):
        model = LSTransformer(config)
    count, last_layer = (_count(module) for module in (model, model.decoder.layers[-1:]))
    sides = [(config.encoder, config.num_encoder_layer, source_tokens, encoder_block)]
    sides.append((config.decoder, config.num_decoder_layer, tokens, decoder_block))
    saved = 0
    for layer, layers, rows, layout in sides:
        sizes = (layer.hidden_size, layer.intermediate_size, layer.nhead)
        block = layout(rows, *sizes, layer.pre_layer_norm, dtype).size
        inputs = layers + (1 if layer.pre_layer_norm else 0)
        saved += layers * block + inputs * rows * layer.hidden_size * dtype.itemsize
        if layer.pre_layer_norm:
            saved += 2 * rows * _wide(dtype).itemsize
    size = config.decoder.hidden_size
    keys_values = source_tokens * config.num_decoder_layer * 2 * size * dtype.itemsize
    saved += keys_values + source_tokens * config.encoder.hidden_size * dtype.itemsize
    activation = tokens * size * dtype.itemsize
    projection = config.vocab_size * size * dtype.itemsize
    is_tied = model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    state = 8 if dtype == torch.float32 else 12 if dtype.itemsize == 2 else 16
    return MemoryPlan(
        parameters=count * dtype.itemsize,
        gradients=count * dtype.itemsize,
        optimizer=count * state,
        saved=saved,
        workspace=max(
            _scratch(config.encoder, source_tokens, False, dtype),
            _scratch(config.decoder, tokens, True, dtype),
            2 * gemm_workspace(dtype.itemsize),  # of the output projection, which uses two streams
        ),
        # Features, their gradient, the logits of a chunk and the weight's gradient before it is rounded.
        criterion=2 * activation
        + chunk_rows(tokens) * config.vocab_size * dtype.itemsize
        + config.vocab_size * size * _wide(dtype).itemsize,
        backward=keys_values + 2 * activation + (0 if direct_grads else projection + last_layer * dtype.itemsize),
        # The gradients of a tied table are summed into a third one.
        fresh=0 if direct_grads else count * dtype.itemsize + (2 * projection if is_tied else 0),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scratch(layer: LayerConfig, rows: int, cross: bool, dtype: torch.dtype) -> int:
    size, inner = layer.hidden_size, layer.intermediate_size
    sums, buffers = backward_sums(rows, size, inner, cross, layer.pre_layer_norm), 2 + cross + layer.pre_layer_norm
    return round_size(backward_scratch(rows, size, inner, layer.nhead, dtype.itemsize, sums, buffers))

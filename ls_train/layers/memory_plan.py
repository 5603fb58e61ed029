"""How much memory one training step of a model takes, from its configuration and the batch size alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ls_train.layers.call import backward_scratch, backward_sums
from ls_train.layers.config import LayerConfig, TransformerConfig
from ls_train.layers.decoder_layer import decoder_block
from ls_train.layers.encoder_layer import encoder_block
from ls_train.layers.transformer import LSTransformer
from ls_train.memory import round_size


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one training step.

    Attributes:
        parameters: parameters in the activation type.
        gradients: their gradients.
        optimizer: Adam's moments, and for 16-bit parameters the float32 master copy.
        saved: what forward keeps for backward: blocks, layer inputs, cross keys and values.
        workspace: scratch shared by all layers.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    workspace: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.workspace


def memory_plan(
    config: TransformerConfig,
    tokens: int,
    source_tokens: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> MemoryPlan:
    """Return the memory of one training step, without the output projection and its loss.

    Args:
        config: of the model.
        tokens: real target tokens of a batch.
        source_tokens: real source tokens; None is ``tokens``.
        dtype: type of activations and parameters.
    """
    source_tokens = tokens if source_tokens is None else source_tokens
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LSTransformer(config).parameters())
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
    saved += source_tokens * (config.num_decoder_layer * 2 * size + config.encoder.hidden_size) * dtype.itemsize
    state = 8 if dtype == torch.float32 else 12 if dtype.itemsize == 2 else 16
    return MemoryPlan(
        parameters=count * dtype.itemsize,
        gradients=count * dtype.itemsize,
        optimizer=count * state,
        saved=saved,
        workspace=max(
            _scratch(config.encoder, source_tokens, 0, 2, dtype),
            _scratch(config.decoder, tokens, source_tokens, 3, dtype),
        ),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scratch(layer: LayerConfig, rows: int, keys: int, buffers: int, dtype: torch.dtype) -> int:
    size, inner = layer.hidden_size, layer.intermediate_size
    sums = backward_sums(rows, keys, size, inner, layer.nhead)
    return round_size(backward_scratch(rows, size, inner, dtype.itemsize, sums, buffers + layer.pre_layer_norm))

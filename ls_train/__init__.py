"""Accelerated Transformer training for PyTorch: fused CUDA operators under drop-in layers.

Importing this package imports nothing else; a name is loaded at its first use, and CUDA code is compiled when the first
CUDA tensor reaches an operator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ls_train.graphed_step import GraphedStep
    from ls_train.layers.criterion import LSCrossEntropyLayer
    from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
    from ls_train.layers.embedding import LSTransformerEmbeddingLayer
    from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
    from ls_train.layers.memory_plan import memory_plan
    from ls_train.layers.transformer import LSTransformer, LSTransformerDecoder, LSTransformerEncoder
    from ls_train.optim import FusedAdam
    from ls_train.optim.ls_adam import LSAdam
    from ls_train.packing import Packing

_HOMES = {
    "FusedAdam": ("ls_train.optim", "FusedAdam"),
    "GraphedStep": ("ls_train.graphed_step", "GraphedStep"),
    "LSAdam": ("ls_train.optim.ls_adam", "LSAdam"),
    "LSCrossEntropyLayer": ("ls_train.layers.criterion", "LSCrossEntropyLayer"),
    "LSTransformer": ("ls_train.layers.transformer", "LSTransformer"),
    "LSTransformerDecoder": ("ls_train.layers.transformer", "LSTransformerDecoder"),
    "LSTransformerDecoderLayer": ("ls_train.layers.decoder_layer", "LSTransformerDecoderLayer"),
    "LSTransformerEmbeddingLayer": ("ls_train.layers.embedding", "LSTransformerEmbeddingLayer"),
    "LSTransformerEncoder": ("ls_train.layers.transformer", "LSTransformerEncoder"),
    "LSTransformerEncoderLayer": ("ls_train.layers.encoder_layer", "LSTransformerEncoderLayer"),
    "Packing": ("ls_train.packing", "Packing"),
    "memory_plan": ("ls_train.layers.memory_plan", "memory_plan"),
}

__all__ = [
    "FusedAdam",
    "GraphedStep",
    "LSAdam",
    "LSCrossEntropyLayer",
    "LSTransformer",
    "LSTransformerDecoder",
    "LSTransformerDecoderLayer",
    "LSTransformerEmbeddingLayer",
    "LSTransformerEncoder",
    "LSTransformerEncoderLayer",
    "Packing",
    "memory_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ls_train' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

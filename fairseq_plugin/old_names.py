"""Names of parameters in checkpoints of older fairseq versions, brought up to date before loading."""

from __future__ import annotations

import torch
from torch import Tensor, nn

StateDict = dict[str, Tensor]


def rename_layer_norms(state_dict: StateDict, name: str, layers: int, names: dict[str, str]) -> None:
    """Rename ``layer_norms.<number>`` of every layer of ``name`` to ``names[number]``, in place."""
    for layer in range(layers):
        for old, new in names.items():
            for kind in ("weight", "bias"):
                key = f"{name}.layers.{layer}.layer_norms.{old}.{kind}"
                if key in state_dict:
                    state_dict[f"{name}.layers.{layer}.{new}.{kind}"] = state_dict.pop(key)


def split_in_proj(state_dict: StateDict, name: str) -> None:
    """Split every joint ``in_proj_weight`` and ``in_proj_bias`` below ``name`` into q, k and v, in place."""
    for key in [key for key in state_dict if key.startswith(name + ".")]:
        for kind in ("weight", "bias"):
            suffix = f"in_proj_{kind}"
            if key.endswith("." + suffix):
                parts = state_dict.pop(key).chunk(3)
                for part, letter in zip(parts, "qkv", strict=True):
                    state_dict[f"{key.removesuffix(suffix)}{letter}_proj.{kind}"] = part


def drop_missing_final_norm(side: nn.Module, state_dict: StateDict, name: str, first_with_norm: int) -> None:
    """Take the final layer norm off ``side`` where the checkpoint is from before there was one.

    Args:
        side: encoder or decoder.
        state_dict: of the whole model; ``<name>.version`` tells, and is set to 1 for an old one.
        name: of ``side`` in it.
        first_with_norm: lowest version that has the norm.
    """
    key = f"{name}.version"
    if float(state_dict.get(key, torch.ones(1))[0]) < first_with_norm:
        side.layer_norm = None
        side.normalize = False
        state_dict[key] = torch.ones(1)


def name_output_projection(state_dict: StateDict, name: str, tied: bool) -> None:
    """Give the output projection of decoder ``name`` its name where the checkpoint has none, in place.

    Args:
        state_dict: of the whole model.
        name: of the decoder in it.
        tied: whether the projection is the table of target embeddings; else it was called ``embed_out``.
    """
    key = f"{name}.output_projection.weight"
    old = f"{name}.embed_tokens.weight" if tied else f"{name}.embed_out"
    if key not in state_dict and old in state_dict:
        state_dict[key] = state_dict[old] if tied else state_dict.pop(old)

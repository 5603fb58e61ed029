"""The encoder of ``ls_transformer``: fairseq's outside, fused layers on packed rows inside."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from fairseq_plugin import old_names
from fairseq_plugin.model_options import layer_config
from ls_train.layers import transformer

EncoderOut = dict[str, list[Tensor]]

LAYER_NORMS = {"0": "self_attn_layer_norm", "1": "final_layer_norm"}
"""Names of the layer norms in checkpoints of early fairseq versions and since."""


class LSTransformerEncoder(transformer.LSTransformerEncoder, FairseqEncoder):
    """Transformer encoder with the interface and the parameters of fairseq's.

    Args:
        cfg: fairseq's TransformerConfig.
        dictionary: of the source.
        embed_tokens: token table.
    """

    def __init__(self, cfg: Any, dictionary: Dictionary, embed_tokens: nn.Embedding) -> None:
        super().__init__(layer_config(cfg, dictionary), embed_tokens, dictionary=dictionary)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, return_all_hiddens: bool = False
    ) -> EncoderOut:
        """Encode a padded batch.

        Args:
            src_tokens: int64 (B, S), padded left or right.
            src_lengths: not needed, the padding tells.
            return_all_hiddens: also return the embeddings and every layer's output (``encoder_states``).

        Returns:
            fairseq's dictionary of lists: ``encoder_out`` (S, B, C), zero where padded, ``encoder_padding_mask`` (B, S)
            and ``encoder_states``, ``src_lengths`` int32 (B, 1). ``encoder_embedding`` is empty.
        """
        states: list[Tensor] | None = [] if return_all_hiddens else None
        tokens, packing = self.pack(src_tokens)
        x = self.forward_packed(tokens, packing, states=states)
        padding_mask = src_tokens.eq(self.padding_idx)
        return {
            "encoder_out": [packing.unpack(x).transpose(0, 1)],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [],
            "encoder_states": [packing.unpack(state).transpose(0, 1) for state in states or []],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding_mask).sum(dim=1, dtype=torch.int32).reshape(-1, 1)],
        }

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Return ``encoder_out`` with the sentences ``new_order`` int64 (B',), in this order."""
        time_first = ("encoder_out", "encoder_states")
        return {
            name: [tensor.index_select(1 if name in time_first else 0, new_order) for tensor in tensors]
            for name, tensors in encoder_out.items()
        }

    def max_positions(self) -> int:
        """Return the longest source that the options allow and the positions reach."""
        return self.max_tokens

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Rename what older checkpoints call otherwise, in place."""
        old_names.rename_layer_norms(state_dict, name, len(self.layers), LAYER_NORMS)
        old_names.split_in_proj(state_dict, name)
        old_names.drop_missing_final_norm(self, state_dict, name, first_with_norm=2)
        return state_dict

"""The encoder of ``ls_transformer``: fairseq's outside, fused layers on packed rows inside."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from fairseq_plugin import old_names, packed
from fairseq_plugin.model_options import ACTIVATIONS, activation_dropout
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing

LAYER_NORMS = {"0": "self_attn_layer_norm", "1": "final_layer_norm"}
"""Names of the layer norms in checkpoints before fairseq 0.8 and since."""


class LSTransformerEncoder(TransformerEncoderBase):
    """Transformer encoder; arguments and parameters are those of fairseq's ``TransformerEncoderBase``."""

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Return one fused layer."""
        return LSTransformerEncoderLayer(
            embed_dim=cfg.encoder.embed_dim,
            num_heads=cfg.encoder.attention_heads,
            ffn_dim=cfg.encoder.ffn_embed_dim,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=activation_dropout(cfg),
            activation=ACTIVATIONS[cfg.activation_fn],
            normalize_before=cfg.encoder.normalize_before,
        )

    def forward_packed(
        self, tokens: Tensor, packing: Packing, seed: Tensor | None, states: list[Tensor] | None = None
    ) -> Tensor:
        """Return the encoder's output (N, C).

        Args:
            tokens: int64 (B, S).
            packing: of ``tokens``.
            seed: of the dropout masks, None without dropout; see :func:`fairseq_plugin.packed.draw_seed`.
            states: gets the embeddings and every layer's output, each (N, C), appended.
        """
        return self._layers(
            packed.embed(self, packing.pack(tokens), packing, seed, packed.ENCODER_OFFSET), packing, seed, states
        )

    def _layers(self, x: Tensor, packing: Packing, seed: Tensor | None, states: list[Tensor] | None) -> Tensor:
        if states is not None:
            states.append(x)
        offset = packed.ENCODER_OFFSET
        for layer in self.layers:
            offset += packed.SITES
            x = packed.run(self.cfg.checkpoint_activations, layer.forward_packed, x, packing, seed, offset)
            if states is not None:
                states.append(x)
        return x if self.layer_norm is None else packed.layer_norm(self.layer_norm, x, packing.rows)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Encode a padded batch.

        Args:
            src_tokens: int64 (B, S), padded left or right.
            src_lengths: not needed, the padding tells.
            return_all_hiddens: also return the embeddings and every layer's output (``encoder_states``).
            token_embeddings: (B, S, C) to use instead of the table.

        Returns:
            fairseq's dictionary of lists: ``encoder_out`` (S, B, C), zero where padded, ``encoder_padding_mask`` (B, S)
            and ``encoder_states``, ``src_lengths`` int32 (B, 1). ``encoder_embedding`` is empty.
        """
        padding_mask = src_tokens.eq(self.padding_idx)
        packing = Packing.from_padding_mask(padding_mask, *src_tokens.shape, src_tokens.device)
        seed = packed.draw_seed(self)
        embeddings = None if token_embeddings is None else packing.pack(token_embeddings)
        x = packed.embed(self, packing.pack(src_tokens), packing, seed, packed.ENCODER_OFFSET, embeddings)
        states: list[Tensor] | None = [] if return_all_hiddens else None
        x = self._layers(x, packing, seed, states)
        return {
            "encoder_out": [packed.time_first(x, packing)],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [],
            "encoder_states": [packed.time_first(state, packing) for state in states or []],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding_mask).sum(dim=1, dtype=torch.int32).reshape(-1, 1)],
        }

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Rename what older checkpoints call otherwise, in place."""
        old_names.rename_layer_norms(state_dict, name, self.num_layers, LAYER_NORMS)
        old_names.split_in_proj(state_dict, name)
        old_names.drop_missing_final_norm(self, state_dict, name, first_with_norm=2)
        return state_dict

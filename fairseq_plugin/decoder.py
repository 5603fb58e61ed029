"""The decoder of ``ls_transformer``: fairseq's outside, fused layers on packed rows inside."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from fairseq_plugin import old_names
from fairseq_plugin.encoder import EncoderOut
from fairseq_plugin.errors import UserError
from fairseq_plugin.model_options import layer_config
from ls_train.layers import transformer
from ls_train.packing import Packing

Extra = dict[str, list[Tensor | None]]

LAYER_NORMS = {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"}
"""Names of the layer norms in checkpoints of early fairseq versions and since."""
STATE = "decoding_state"


class LSTransformerDecoder(transformer.LSTransformerDecoder, FairseqIncrementalDecoder):
    """Transformer decoder with the interface and the parameters of fairseq's.

    Attention weights are computed only when asked for: by ``alignment_layer``, or after
    ``make_generation_fast_(need_attn=True)``, which ``--print-alignment`` calls.

    Args:
        cfg: fairseq's TransformerConfig.
        dictionary: of the target.
        embed_tokens: token table.
    """

    def __init__(self, cfg: Any, dictionary: Dictionary, embed_tokens: nn.Embedding) -> None:
        super().__init__(layer_config(cfg, dictionary), embed_tokens, dictionary=dictionary)
        self.no_encoder_attn = cfg.no_cross_attention
        self.share_input_output_embed = self.output_projection.weight is embed_tokens.weight
        self.need_attn = False

    def make_generation_fast_(self, need_attn: bool = False, retain_dropout: bool = False, **kwargs: Any) -> None:
        """Say whether generation needs attention weights.

        Raises:
            UserError: dropout was asked for.
        """
        if retain_dropout:
            raise UserError(
                "--retain-dropout: ls_transformer generates without dropout; generate with fairseq's layers, "
                "--model-overrides \"{'arch': 'transformer', '_name': 'transformer'}\""
            )
        self.need_attn = need_attn

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: EncoderOut | None = None,
        incremental_state: dict[str, Any] | None = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, Extra]:
        """Return logits (B, T, V), or the features (B, T, C) with ``features_only``; see :meth:`extract_features`."""
        x, extra = self.extract_features(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
            return_all_hiddens,
        )
        return x if features_only else self.output_layer(x), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: EncoderOut | None = None,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, Extra]:
        """Return the features (B, T, C) and {"attn": [(B, T, S) or None], "inner_states": [(T, B, C), ...]}.

        Args:
            prev_output_tokens: int64 (B, T), padded.
            encoder_out: the encoder's dictionary.
            incremental_state: holds what earlier steps computed; only the last token's features, T = 1, are returned.
            full_context_alignment: not supported, must be False.
            alignment_layer: layer whose attention to the source is returned, by default the last where one is needed.
            alignment_heads: average only that many of its heads.
            return_all_hiddens: also return the embeddings and every layer's output.

        Raises:
            ValueError: ``full_context_alignment`` is set, or the state is ahead of ``prev_output_tokens``.
        """
        if full_context_alignment:
            raise ValueError("full_context_alignment: the layers of ls_transformer are causal; use --arch transformer")
        wanted = None
        if self.wants_attention(alignment_layer):
            wanted = range(len(self.layers))[-1 if alignment_layer is None else alignment_layer]
        memory, memory_packing = (None, None) if self.no_encoder_attn else _packed_memory(encoder_out)
        if incremental_state is not None:
            x, weights = self._step(prev_output_tokens, memory, memory_packing, incremental_state, wanted)
            return x, {"attn": [_average(weights, alignment_heads)], "inner_states": []}
        tokens, packing = self.pack(prev_output_tokens)
        states: list[Tensor] | None = [] if return_all_hiddens else None
        x = self.forward_packed(tokens, packing, memory, memory_packing, states=states)
        weights = None
        if wanted is not None and memory is not None:
            weights = self._attention(tokens, packing, memory, memory_packing, wanted)
        inner_states = [packing.unpack(state).transpose(0, 1) for state in states or []]
        return packing.unpack(x), {"attn": [_average(weights, alignment_heads)], "inner_states": inner_states}

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Keep the hypotheses ``new_order`` int64 (B',), in this order."""
        state = self.get_incremental_state(incremental_state, STATE)
        if state is not None:
            state.reorder(new_order)

    def wants_attention(self, alignment_layer: int | None) -> bool:
        """Return whether a call with this ``alignment_layer`` returns attention weights."""
        return alignment_layer is not None or (self.need_attn and not self.training)

    def max_positions(self) -> int:
        """Return the longest target that the options allow and the positions reach."""
        return self.max_tokens

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Rename what older checkpoints call otherwise, in place."""
        old_names.name_output_projection(state_dict, name, self.share_input_output_embed)
        old_names.rename_layer_norms(state_dict, name, len(self.layers), LAYER_NORMS)
        old_names.split_in_proj(state_dict, name)
        old_names.drop_missing_final_norm(self, state_dict, name, first_with_norm=3)
        return state_dict

    def _step(
        self,
        prev_output_tokens: Tensor,
        memory: Tensor | None,
        memory_packing: Packing | None,
        incremental_state: dict[str, Any],
        alignment_layer: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        state = self.get_incremental_state(incremental_state, STATE)
        if state is None:
            state = self.start(prev_output_tokens.shape[0], memory, memory_packing)
            self.set_incremental_state(incremental_state, STATE, state)
        new = prev_output_tokens[:, state.length :]
        if new.shape[1] == 0:
            raise ValueError(
                f"the incremental state holds {state.length} tokens, prev_output_tokens only "
                f"{prev_output_tokens.shape[1]}; start from an empty state"
            )
        x, weights = self.step(new, state, alignment_layer)
        return x[:, -1:], weights if weights is None else weights[:, :, -1:]

    @torch.no_grad()
    def _attention(
        self, tokens: Tensor, packing: Packing, memory: Tensor, memory_packing: Packing, layer: int
    ) -> Tensor:
        """Return attention weights (H, B, T, S): fused layers hold none, so the layers run once more without dropout.

        Decoding steps work on right-padded batches, so the sentences are moved to the left edge for it.
        """
        lengths = packing.cu_seqlens.diff()
        right = Packing.from_lengths(lengths, packing.length, tokens.device)
        _, weights = self.step(right.unpack(tokens), self.start(packing.batch, memory, memory_packing), layer)
        return packing.unpack(right.pack(weights.permute(1, 2, 0, 3))).permute(2, 0, 1, 3)


def _packed_memory(encoder_out: EncoderOut | None) -> tuple[Tensor | None, Packing | None]:
    if encoder_out is None or not encoder_out["encoder_out"]:
        return None, None
    x = encoder_out["encoder_out"][0].transpose(0, 1)
    masks = encoder_out["encoder_padding_mask"]
    packing = Packing.from_padding_mask(masks[0] if masks else None, x.shape[0], x.shape[1], x.device)
    return packing.pack(x), packing


def _average(weights: Tensor | None, heads: int | None) -> Tensor | None:
    """Return the average (B, T, S) over the first ``heads`` heads of ``weights`` (H, B, T, S)."""
    return None if weights is None else weights[:heads].mean(0)

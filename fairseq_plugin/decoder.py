"""The decoder of ``ls_transformer``: fairseq's outside, fused layers on packed rows inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from fairseq_plugin import alignment, old_names, packed
from fairseq_plugin.model_options import ACTIVATIONS, activation_dropout
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.modules import keep_cross_kv_together
from ls_train.packing import Packing

LAYER_NORMS = {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"}
"""Names of the layer norms in checkpoints before fairseq 0.8 and since."""

EncoderOut = dict[str, list[Tensor]]
IncrementalState = dict[str, dict[str, Tensor | None]]


class LSTransformerDecoder(TransformerDecoderBase):
    """Transformer decoder; arguments and parameters are those of fairseq's ``TransformerDecoderBase``.

    Attention weights are computed only when asked for: by ``alignment_layer``, or after
    ``make_generation_fast_(need_attn=True)``, which ``--print-alignment`` calls.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn)
        self.need_attn = False
        if not no_encoder_attn:
            keep_cross_kv_together(nn.ModuleList.__iter__(self.layers))

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Return one fused layer."""
        return LSTransformerDecoderLayer(
            embed_dim=cfg.decoder.embed_dim,
            num_heads=cfg.decoder.attention_heads,
            ffn_dim=cfg.decoder.ffn_embed_dim,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            activation_dropout=activation_dropout(cfg),
            activation=ACTIVATIONS[cfg.activation_fn],
            normalize_before=cfg.decoder.normalize_before,
            memory_dim=cfg.encoder.embed_dim,
            cross_attention=not no_encoder_attn,
        )

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        """Say whether generation needs attention weights."""
        self.need_attn = need_attn

    def forward_packed(
        self,
        tokens: Tensor,
        packing: Packing,
        memory: Tensor | None,
        memory_packing: Packing | None,
        seed: Tensor | None,
        states: list[Tensor] | None = None,
        attention: alignment.Request | None = None,
    ) -> Tensor:
        """Return the decoder's features (N, C).

        Args:
            tokens: int64 (B, T), the target shifted by one.
            packing: of ``tokens``.
            memory: (Ns, Ce), the encoder's packed output; None without one.
            memory_packing: of ``memory``.
            seed: of the dropout masks, None without dropout; see :func:`fairseq_plugin.packed.draw_seed`.
            states: gets the embeddings and every layer's output, each (N, C), appended.
            attention: gets the attention weights of the layer it asks for.
        """
        x = packed.embed(self, packing.pack(tokens), packing, seed, packed.DECODER_OFFSET)
        # LayerDrop chooses once per iteration, so keys and values are made for the layers of one iteration.
        layers = list(self.layers)
        kv = None
        if memory is not None and layers and layers[0].encoder_attn is not None:
            kv = cross_kv(memory, memory_packing, layers)
        if states is not None:
            states.append(x)
        for index, layer in enumerate(layers):
            if attention is not None and attention.layer is layer:
                attention.compute(x, packing, kv, memory_packing, index)
            offset = packed.DECODER_OFFSET + (index + 1) * packed.SITES
            arguments = (x, packing, kv, memory_packing, index, seed, offset)
            x, kv = packed.run(self.cfg.checkpoint_activations, layer.forward_packed, *arguments)
            if states is not None:
                states.append(x)
        return x if self.layer_norm is None else packed.layer_norm(self.layer_norm, x, packing.rows)

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: EncoderOut | None,
        incremental_state: IncrementalState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return the features (B, T, C) of a padded batch and {"attn": [(B, T, S) or None], "inner_states": [...]}.

        Args:
            prev_output_tokens: int64 (B, T); with ``incremental_state`` only the last column is new.
            encoder_out: the encoder's dictionary.
            incremental_state: holds keys and values of earlier steps.
            full_context_alignment: let every position see the whole target.
            alignment_layer: layer whose attention to the source is returned.
            alignment_heads: average only that many heads of it.
            return_all_hiddens: also return the embeddings and every layer's output (T, B, C).
        """
        if incremental_state is not None:
            return self._step(prev_output_tokens, encoder_out, incremental_state), {"attn": [None], "inner_states": []}
        packing = packed.packings(self.padding_idx, prev_output_tokens)[0]
        memory, memory_packing = self._memory(encoder_out)
        states: list[Tensor] | None = [] if return_all_hiddens else None
        request = self._attention_request(memory, alignment_layer, alignment_heads)
        with self._full_context() if full_context_alignment else contextlib.nullcontext():
            x = self.forward_packed(
                prev_output_tokens, packing, memory, memory_packing, packed.draw_seed(self), states, request
            )
        weights = None if request is None else request.weights
        inner_states = [packed.time_first(state, packing) for state in states or []]
        return packing.unpack(x), {"attn": [weights], "inner_states": inner_states}

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: EncoderOut | None = None,
        incremental_state: IncrementalState | None = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return logits (B, T, V), or features with ``features_only``; see :meth:`extract_features_scriptable`."""
        x, extra = self.extract_features_scriptable(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
            return_all_hiddens,
        )
        return x if features_only else self.output_layer(x), extra

    def _memory(self, encoder_out: EncoderOut | None) -> tuple[Tensor | None, Packing | None]:
        if encoder_out is None or not encoder_out["encoder_out"]:
            return None, None
        x = encoder_out["encoder_out"][0].transpose(0, 1)
        masks = encoder_out["encoder_padding_mask"]
        packing = Packing.from_padding_mask(masks[0] if masks else None, x.shape[0], x.shape[1], x.device)
        return packing.pack(x), packing

    def _attention_request(
        self, memory: Tensor | None, alignment_layer: int | None, heads: int | None
    ) -> alignment.Request | None:
        asked = alignment_layer is not None or (self.need_attn and not self.training)
        if not asked or memory is None or self.layers[0].encoder_attn is None:
            return None
        return alignment.Request(
            self.layers[self.num_layers - 1 if alignment_layer is None else alignment_layer], heads
        )

    @contextlib.contextmanager
    def _full_context(self) -> Iterator[None]:
        layers = list(nn.ModuleList.__iter__(self.layers))
        for layer in layers:
            layer.causal = False
        try:
            yield
        finally:
            for layer in layers:
                layer.causal = True

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """Rename what older checkpoints call otherwise, in place."""
        old_names.name_output_projection(state_dict, name, self.share_input_output_embed)
        old_names.rename_layer_norms(state_dict, name, self.num_layers, LAYER_NORMS)
        old_names.split_in_proj(state_dict, name)
        old_names.drop_missing_final_norm(self, state_dict, name, first_with_norm=3)
        return state_dict

"""Architectures ``ls_transformer*``: fairseq's transformer on the fused layers.

Options, defaults, parameter names, shapes and initial weights are those of fairseq's ``transformer``; checkpoints of
either load into the other.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModel, transformer_legacy
from torch import Tensor, nn

from fairseq_plugin.decoder import LSTransformerDecoder
from fairseq_plugin.encoder import LSTransformerEncoder
from fairseq_plugin.fused_model import FusedModel, as_reference
from fairseq_plugin.model_options import decoder_reasons, encoder_reasons
from ls_train import rng
from ls_train.packing import Packing


@register_model("ls_transformer")
class LSTransformerModel(FusedModel, TransformerModel):
    """fairseq's transformer with the fused encoder and decoder layers.

    Called as fairseq's models are, it returns what they return. A criterion that can work on packed rows passes
    ``packed_features=True``, see :meth:`forward`.
    """

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: nn.Embedding) -> nn.Module:
        """Return the fused encoder, or fairseq's own where an option asks for it."""
        cfg = TransformerConfig.from_namespace(args)
        reasons = encoder_reasons(cfg)
        if reasons:
            return as_reference(super().build_encoder(cfg, src_dict, embed_tokens), reasons)
        return LSTransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: nn.Embedding) -> nn.Module:
        """Return the fused decoder, or fairseq's own where an option asks for it."""
        cfg = TransformerConfig.from_namespace(args)
        reasons = decoder_reasons(cfg)
        if reasons:
            return as_reference(super().build_decoder(cfg, tgt_dict, embed_tokens), reasons)
        return LSTransformerDecoder(cfg, tgt_dict, embed_tokens)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None,
        prev_output_tokens: Tensor,
        return_all_hiddens: bool = False,
        features_only: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        packed_features: bool = False,
    ) -> tuple[Tensor, dict[str, list[Any]]] | tuple[Tensor, Packing, Tensor]:
        """Run encoder and decoder.

        Args:
            src_tokens: int64 (B, S), padded left or right.
            src_lengths: not needed, the padding tells.
            prev_output_tokens: int64 (B, T), the target shifted by one.
            return_all_hiddens: also return every layer's output (``inner_states``).
            features_only: return the decoder's features instead of logits.
            alignment_layer: also return the attention of this decoder layer to the source.
            alignment_heads: average only that many heads of it.
            packed_features: return packed features, their packing and the output weight instead.

        Returns:
            (logits (B, T, V), {"attn": [(B, T, S) or None], "inner_states": [T x B x C, ...]}), or with
            ``packed_features`` (features (N, C), :class:`~ls_train.packing.Packing` of the target, weight (V, C)).

        Raises:
            ValueError: packed features were asked of a model that does not have them.
        """
        if packed_features:
            self.check_packed_features()
        fused = isinstance(self.encoder, LSTransformerEncoder) and isinstance(self.decoder, LSTransformerDecoder)
        if fused and not return_all_hiddens and not self.decoder.wants_attention(alignment_layer):
            seed = self._draw_seed(src_tokens.device)
            source, target = _packings(self.decoder.padding_idx, src_tokens, prev_output_tokens)
            memory = None
            if not self.cfg.no_cross_attention:
                memory = self.encoder.forward_packed(source.pack(src_tokens), source, seed)
            x = self.decoder.forward_packed(target.pack(prev_output_tokens), target, memory, source, seed)
            if not packed_features:
                x, extra = target.unpack(x), {"attn": [None], "inner_states": []}
                return x if features_only else self.decoder.output_layer(x), extra
        else:
            encoder_out = self.encoder(src_tokens, src_lengths=src_lengths, return_all_hiddens=return_all_hiddens)
            x, extra = self.decoder(
                prev_output_tokens,
                encoder_out=encoder_out,
                features_only=features_only or packed_features,
                alignment_layer=alignment_layer,
                alignment_heads=alignment_heads,
                src_lengths=src_lengths,
                return_all_hiddens=return_all_hiddens,
            )
            if not packed_features:
                return x, extra
            (target,) = _packings(self.decoder.padding_idx, prev_output_tokens)
            x = target.pack(x)
        return x, target, self.decoder.output_projection.weight

    def _draw_seed(self, device: torch.device) -> Tensor | None:
        """Return one seed for all dropout masks of a forward, None where nothing is dropped.

        Without dropout torch's generator is left alone, so that LayerDrop draws what it draws in fairseq.
        """
        cfg = self.cfg
        drops = cfg.dropout or cfg.attention_dropout or cfg.activation_dropout or cfg.relu_dropout
        return rng.draw_seed(device) if self.training and drops else None


def _packings(padding_idx: int, *batches: Tensor) -> list[Packing]:
    """Return the packing of each int64 (B, T) batch; batches on a GPU cost one synchronisation together."""
    masks = [batch.eq(padding_idx) for batch in batches]
    parts = torch.cat([mask.flatten() for mask in masks]).cpu().split([mask.numel() for mask in masks])
    return [
        Packing.from_padding_mask(part.view(batch.shape), *batch.shape, batch.device)
        for part, batch in zip(parts, batches, strict=True)
    ]


def _register_architectures() -> None:
    """Register every architecture under fairseq's name with ``ls_`` before it, with fairseq's defaults."""
    for name, defaults in {
        "ls_transformer": transformer_legacy.base_architecture,
        "ls_transformer_tiny": transformer_legacy.tiny_architecture,
        "ls_transformer_iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
        "ls_transformer_wmt_en_de": transformer_legacy.transformer_wmt_en_de,
        "ls_transformer_vaswani_wmt_en_de_big": transformer_legacy.transformer_vaswani_wmt_en_de_big,
        "ls_transformer_vaswani_wmt_en_fr_big": transformer_legacy.transformer_vaswani_wmt_en_fr_big,
        "ls_transformer_wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
        "ls_transformer_wmt_en_de_big_t2t": transformer_legacy.transformer_wmt_en_de_big_t2t,
    }.items():
        register_model_architecture("ls_transformer", name)(defaults)


_register_architectures()

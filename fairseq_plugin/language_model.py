"""Architectures ``ls_transformer_lm*``: fairseq's decoder-only language model on the fused layers.

Options, defaults, parameter names, shapes and initial weights are those of fairseq's ``transformer_lm``; checkpoints of
either load into the other. Adaptive input and adaptive softmax (``ls_transformer_lm_wiki103``) and character embeddings
run on fairseq's own decoder.
"""

from __future__ import annotations

from typing import Any

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
)
from torch import Tensor

from fairseq_plugin.decoder import LSTransformerDecoder
from fairseq_plugin.errors import UserError
from fairseq_plugin.fused_model import FusedModel, as_reference
from fairseq_plugin.model_options import decoder_reasons
from ls_train.packing import Packing


@register_model("ls_transformer_lm", dataclass=TransformerLanguageModelConfig)
class LSTransformerLanguageModel(FusedModel, TransformerLanguageModel):
    """fairseq's Transformer language model with the fused decoder.

    Called as fairseq's models are, it returns what they return. A criterion that can work on packed rows passes
    ``packed_features=True``, see :meth:`forward`.
    """

    @classmethod
    def build_parts(cls, args: Any, task: Any) -> LSTransformerLanguageModel:
        """Return the model with the fused decoder, or with fairseq's own where an option asks for it.

        Raises:
            UserError: the task asks for other targets than the next word.
        """
        for target in getattr(task, "targets", None) or ():
            if target != "future":
                raise UserError(
                    f"--{target}-target: the Transformer language models, fairseq's as well, predict the next word "
                    "only; drop the flag"
                )
        reasons = _reasons(args)
        if reasons:
            model = super().build_parts(args, task)
            as_reference(model.decoder, reasons)
            return model
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.max_target_positions is None:
            args.max_target_positions = getattr(args, "tokens_per_sample", DEFAULT_MAX_TARGET_POSITIONS)
        cfg = TransformerConfig.from_namespace(args)
        cfg.no_cross_attention = True
        embed_tokens = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        return cls(LSTransformerDecoder(cfg, task.target_dictionary, embed_tokens))

    def forward(
        self, src_tokens: Tensor, packed_features: bool = False, **options: Any
    ) -> tuple[Tensor, dict[str, list[Any]]] | tuple[Tensor, Packing, Tensor]:
        """Run the decoder.

        Args:
            src_tokens: int64 (B, T), the text shifted by one, padded.
            packed_features: return packed features, their packing and the output weight instead.
            options: for the decoder's ``forward``; ``src_lengths`` is not needed, the padding tells.

        Returns:
            (logits (B, T, V), {"attn": [None], "inner_states": [T x B x C, ...]}), or with ``packed_features``
            (features (N, C), :class:`~ls_train.packing.Packing` of the text, weight (V, C)).

        Raises:
            ValueError: packed features were asked of a model that does not have them.
        """
        if not packed_features:
            return self.decoder(src_tokens, **options)
        self.check_packed_features()
        tokens, packing = self.decoder.pack(src_tokens)
        return self.decoder.forward_packed(tokens, packing), packing, self.decoder.output_projection.weight


def _reasons(args: Any) -> list[str]:
    """Return the options for which the decoder is fairseq's own. args: Namespace or DictConfig of model options."""
    reasons = decoder_reasons(TransformerConfig.from_namespace(args))
    reasons += [
        f"--{name.replace('_', '-')}"
        for name in ("adaptive_input", "character_embeddings", "scale_attn", "scale_heads", "scale_fc", "scale_resids")
        if getattr(args, name, False)
    ]
    return list(dict.fromkeys(reasons))


def _register_architectures() -> None:
    """Register every language model of fairseq under its name with ``ls_`` before it, with fairseq's defaults."""
    for name in ARCH_MODEL_INV_REGISTRY["transformer_lm"]:
        if name != "transformer_lm":
            register_model_architecture("ls_transformer_lm", f"ls_{name}")(ARCH_CONFIG_REGISTRY[name])


_register_architectures()

"""Which of fairseq's transformer options run on the fused layers.

An option that they do not cover is honoured through the reference path: fairseq's own modules for the whole encoder or
decoder, named in the one logged line that tells the causes. Options that neither path can serve are refused.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_plugin import option_values
from fairseq_plugin.errors import UserError
from ls_train.layers.config import TransformerConfig

HONOURED = frozenset(
    {
        *("activation_dropout", "attention_dropout", "checkpoint_activations", "decoder_attention_heads"),
        *("decoder_embed_dim", "decoder_embed_path", "decoder_ffn_embed_dim", "decoder_layerdrop", "decoder_layers"),
        *("decoder_layers_to_keep", "decoder_learned_pos", "decoder_normalize_before", "dropout"),
        *("encoder_attention_heads", "encoder_embed_dim", "encoder_embed_path", "encoder_ffn_embed_dim"),
        *("encoder_layerdrop", "encoder_layers", "encoder_layers_to_keep", "encoder_learned_pos"),
        *("encoder_normalize_before", "layernorm_embedding", "max_source_positions", "max_target_positions"),
        *("merge_src_tgt_embed", "no_cross_attention", "no_decoder_final_norm", "no_scale_embedding"),
        *("no_token_positional_embeddings", "relu_dropout", "share_all_embeddings"),
        "share_decoder_input_output_embed",
        # Without effect on fairseq's transformer, and here.
        *("adaptive_input", "char_inputs", "export"),
    }
)
"""Options of fairseq's transformer that the fused layers follow; ``activation_fn`` for the functions they compute."""

REFERENCE = frozenset(
    {
        *("activation_fn", "cross_self_attention", "decoder_output_dim", "offload_activations"),
        *("decoder_xformers_att_config", "encoder_xformers_att_config", "quant_noise_pq", "quant_noise_scalar"),
        *("adaptive_softmax_cutoff", "base_layers"),
        # They say more about one of the above.
        *("adaptive_softmax_dropout", "adaptive_softmax_factor", "tie_adaptive_proj", "tie_adaptive_weights"),
        *("base_shuffle", "base_sublayers", "min_params_to_wrap", "quant_noise_pq_block_size"),
    }
)
"""Options for which the encoder, the decoder or both are built of fairseq's own layers."""

_PIPELINE = "use fairseq's pipeline_parallel_transformer, or several GPUs with data parallelism"
REFUSED: dict[str, tuple[Any, str]] = {
    "tpu": (False, "the fused layers have no TPU implementation; use fairseq's architecture of the same name"),
    "model_parallel_size": (1, "use fairseq's model_parallel_transformer, or several GPUs with data parallelism"),
    "pipeline_model_parallel": (False, _PIPELINE),
    "pipeline_balance": (None, _PIPELINE),
    "pipeline_devices": (None, _PIPELINE),
    "pipeline_chunks": (0, _PIPELINE),
    "pipeline_checkpoint": ("never", _PIPELINE),
    "pipeline_encoder_balance": (None, _PIPELINE),
    "pipeline_encoder_devices": (None, _PIPELINE),
    "pipeline_decoder_balance": (None, _PIPELINE),
    "pipeline_decoder_devices": (None, _PIPELINE),
}
"""Options of the trainer that neither path can serve: the value that they may have, and what to do instead."""

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""fairseq's activation functions that the layers compute, with the layers' names."""


def refuse(args: Any) -> None:
    """Raise an error for the first option in ``args`` that the architectures cannot serve.

    Args:
        args: options of the model, or a section of fairseq's configuration; those it does not have pass.

    Raises:
        UserError: naming the option and what to do instead.
    """
    for name, (harmless, advice) in REFUSED.items():
        if getattr(args, name, harmless) not in (harmless, None):
            raise UserError(f"--{name.replace('_', '-')}: {advice}")


def install() -> None:
    """Refuse flags of ``ls_`` models before fairseq starts ranks for them; a second call does nothing."""
    from fairseq.distributed import utils as distributed_utils

    if not getattr(distributed_utils.call_main, "refuses", False):
        distributed_utils.call_main = _refusing(distributed_utils.call_main)


def _refusing(call_main: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call_main)
    def checked(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
        model = getattr(cfg, "model", None)
        name = getattr(model, "_name", None) or getattr(model, "arch", None) or ""
        if name.startswith("ls_"):
            for section in (cfg.common, cfg.distributed_training):
                refuse(section)
        # What the parser of a command was not asked: hydra's configuration, and options of plain fairseq's commands.
        option_values.check(
            cfg[name] for name in cfg if OmegaConf.is_dict(cfg[name]) or isinstance(cfg[name], Namespace)
        )
        call_main(cfg, main, **kwargs)

    checked.refuses = True
    return checked


_PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "label_smoothing")


def check_values(args: Any) -> None:
    """Raise an error where ``args``, options of the model, hold a bad size or probability.

    Raises:
        UserError: a size is no multiple of the number of heads, or a probability is not in [0, 1].
    """
    for name in _PROBABILITIES:
        value = getattr(args, name, None)
        if isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be between 0 and 1")
    for side in ("encoder", "decoder"):
        size, heads = (getattr(args, f"{side}_{name}", None) for name in ("embed_dim", "attention_heads"))
        if size is not None and heads is not None and (heads < 1 or size % heads):
            raise UserError(
                f"--{side}-attention-heads {heads}: --{side}-embed-dim {size} is no multiple of it; change one of them"
            )


def encoder_reasons(cfg: Any) -> list[str]:
    """Return the options in ``cfg`` (fairseq's TransformerConfig) for which the encoder is fairseq's own."""
    return _shared_reasons(cfg) + _attention_reasons("encoder", cfg.encoder)


def decoder_reasons(cfg: Any) -> list[str]:
    """Return the options in ``cfg`` (fairseq's TransformerConfig) for which the decoder is fairseq's own."""
    reasons = _shared_reasons(cfg) + _attention_reasons("decoder", cfg.decoder)
    if cfg.cross_self_attention:
        reasons.append("--cross-self-attention")
    if cfg.adaptive_softmax_cutoff is not None:
        reasons.append("--adaptive-softmax-cutoff")
    if cfg.base_layers:
        reasons.append("--base-layers")
    for size in ("input_dim", "output_dim"):
        if int(getattr(cfg.decoder, size)) != cfg.decoder.embed_dim:
            reasons.append(f"--decoder-{size.replace('_', '-')} other than --decoder-embed-dim")
    if cfg.__dict__.get("criterion") == "label_smoothed_cross_entropy_with_alignment":
        reasons.append("--criterion label_smoothed_cross_entropy_with_alignment")
    # NormFormer scaling; fairseq reads these from the options although the transformer's parser has none of them.
    reasons += [name for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids") if cfg.__dict__.get(name)]
    return reasons


def _shared_reasons(cfg: Any) -> list[str]:
    reasons = []
    if cfg.activation_fn not in ACTIVATIONS:
        reasons.append(f"--activation-fn {cfg.activation_fn}")
    if cfg.quant_noise.pq > 0:
        reasons.append("--quant-noise-pq")
    if cfg.quant_noise.scalar > 0:
        reasons.append("--quant-noise-scalar")
    if cfg.offload_activations:
        reasons.append("--offload-activations")
    if cfg.__dict__.get("ddp_backend") == "fully_sharded":
        reasons.append("--ddp-backend fully_sharded")
    return reasons


def _attention_reasons(side: str, cfg: Any) -> list[str]:
    return [f"--{side}-xformers-att-config"] if cfg.xformers_att_config else []


def layer_config(cfg: Any, dictionary: Dictionary) -> TransformerConfig:
    """Return what the fused layers take for fairseq's TransformerConfig ``cfg`` and one side's dictionary."""
    return TransformerConfig(
        vocab_size=len(dictionary),
        hidden_size=cfg.decoder.embed_dim,
        padding_idx=dictionary.pad(),
        attn_prob_dropout_ratio=float(cfg.attention_dropout),
        # --relu-dropout of old checkpoints stands in for --activation-dropout.
        activation_dropout_ratio=float(cfg.activation_dropout or cfg.relu_dropout or 0.0),
        hidden_dropout_ratio=float(cfg.dropout),
        activation_fn=ACTIVATIONS[cfg.activation_fn],
        max_seq_len=cfg.max_target_positions,
        source_max_seq_len=cfg.max_source_positions,
        learned_positions=cfg.decoder.learned_pos,
        source_learned_positions=cfg.encoder.learned_pos,
        positions=not cfg.no_token_positional_embeddings,
        scale_embedding=not cfg.no_scale_embedding,
        layer_norm_embedding=cfg.layernorm_embedding,
        share_decoder_input_output_embed=cfg.share_decoder_input_output_embed,
        encoder_layerdrop=float(cfg.encoder.layerdrop),
        decoder_layerdrop=float(cfg.decoder.layerdrop),
        cross_attention=not cfg.no_cross_attention,
        decoder_final_norm=not cfg.no_decoder_final_norm,
        checkpoint_activations=cfg.checkpoint_activations,
        num_encoder_layer=cfg.encoder.layers,
        num_decoder_layer=cfg.decoder.layers,
        encoder_layer=_layer_sizes(cfg.encoder),
        decoder_layer=_layer_sizes(cfg.decoder),
    )


def _layer_sizes(side: Any) -> dict[str, Any]:
    return {
        "hidden_size": side.embed_dim,
        "intermediate_size": side.ffn_embed_dim,
        "nhead": side.attention_heads,
        "pre_layer_norm": side.normalize_before,
    }

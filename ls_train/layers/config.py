"""Configurations of layers and models, with the field names of LightSeq's ``get_config``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ls_train.ops.bias_activation_dropout import ACTIVATIONS

PRESETS: dict[str, dict[str, Any]] = {
    "transformer-base": {"hidden_size": 512, "intermediate_size": 2048, "nhead": 8},
    "transformer-big": {"hidden_size": 1024, "intermediate_size": 4096, "nhead": 16},
    "bert-base": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "nhead": 12,
        "activation_fn": "gelu",
        "pre_layer_norm": False,
    },
    "bert-big": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "nhead": 16,
        "activation_fn": "gelu",
        "pre_layer_norm": False,
    },
}
"""Values that ``get_config(model=...)`` starts from."""


@dataclass
class LayerConfig:
    """One encoder or decoder layer.

    Attributes:
        hidden_size: C, a multiple of ``nhead``.
        intermediate_size: F, inner size of the feed-forward block.
        nhead: H, number of attention heads.
        attn_prob_dropout_ratio: dropout probability of attention weights.
        activation_dropout_ratio: dropout probability after the activation.
        hidden_dropout_ratio: dropout probability of the outputs of attention and feed-forward.
        pre_layer_norm: whether layer norm comes before each block (True) or after its residual sum (False).
        activation_fn: relu, gelu (error function), gelu_tanh or swish.
        layer_norm_eps: added to the variance.
        memory_size: decoder only, size of the encoder's output; None is ``hidden_size``.
        cross_attention: decoder only, whether it attends to an encoder.
        nlayer: decoder only, number of decoder layers of the model.
        max_batch_tokens: hint, no limit; workspaces grow when a batch needs it.
        max_seq_len: hint, no limit for layers.
        fp16: create the parameters in float16.
        local_rank: accepted for LightSeq's sake; move the module with ``.to(device)``.
    """

    hidden_size: int
    intermediate_size: int
    nhead: int
    attn_prob_dropout_ratio: float = 0.1
    activation_dropout_ratio: float = 0.1
    hidden_dropout_ratio: float = 0.1
    pre_layer_norm: bool = True
    activation_fn: str = "relu"
    layer_norm_eps: float = 1e-5
    memory_size: int | None = None
    cross_attention: bool = True
    nlayer: int = 1
    max_batch_tokens: int | None = None
    max_seq_len: int | None = None
    fp16: bool = False
    local_rank: int = 0

    def check(self) -> None:
        """Raise a ValueError that names the first field with a bad value."""
        check_positive(self, "hidden_size", "intermediate_size", "nhead", "nlayer")
        if self.hidden_size % self.nhead:
            raise ValueError(
                f"hidden_size = {self.hidden_size} must be a multiple of nhead = {self.nhead}; change one of them"
            )
        check_ratios(self, "attn_prob_dropout_ratio", "activation_dropout_ratio", "hidden_dropout_ratio")
        check_eps(self)
        if self.activation_fn not in ACTIVATIONS:
            raise ValueError(f"activation_fn = {self.activation_fn!r} is unknown; use one of {', '.join(ACTIVATIONS)}")


@dataclass
class EmbeddingConfig:
    """Token and position embedding.

    Attributes:
        vocab_size: V, number of token ids.
        embedding_dim: C.
        padding_idx: token id of padding; its row gets no gradient.
        max_seq_len: longest sequence of learned positions; sinusoidal ones reach any length.
        dropout: dropout probability of the result.
        learned_positions: learned instead of sinusoidal positions.
        positions: whether positions are added at all.
        scale: factor of token embeddings; None is sqrt(C).
        layer_norm: whether a layer norm comes before the dropout.
        layer_norm_eps: of that layer norm.
        max_batch_tokens: hint, no limit.
        fp16: create the parameters in float16.
        local_rank: accepted for LightSeq's sake; move the module with ``.to(device)``.
    """

    vocab_size: int
    embedding_dim: int
    padding_idx: int = 1
    max_seq_len: int = 1024
    dropout: float = 0.1
    learned_positions: bool = False
    positions: bool = True
    scale: float | None = None
    layer_norm: bool = False
    layer_norm_eps: float = 1e-5
    max_batch_tokens: int | None = None
    fp16: bool = False
    local_rank: int = 0

    def check(self) -> None:
        """Raise a ValueError that names the first field with a bad value."""
        check_positive(self, "vocab_size", "embedding_dim", "max_seq_len")
        check_ratios(self, "dropout")
        check_eps(self)
        check_padding(self)
        if self.positions and not self.learned_positions and self.embedding_dim < 4:
            raise ValueError(f"embedding_dim = {self.embedding_dim} must be at least 4 for sinusoidal positions")


@dataclass
class CrossEntropyConfig:
    """Label-smoothed cross entropy.

    Attributes:
        epsilon: label smoothing.
        padding_idx: target id whose positions are ignored.
        max_batch_tokens: hint, no limit.
        fp16: accepted for LightSeq's sake; the input decides.
        local_rank: accepted for LightSeq's sake; the input decides.
    """

    epsilon: float = 0.1
    padding_idx: int = 1
    max_batch_tokens: int | None = None
    fp16: bool = False
    local_rank: int = 0

    def check(self) -> None:
        """Raise a ValueError that names the first field with a bad value."""
        check_ratios(self, "epsilon")
        if not isinstance(self.padding_idx, int):
            raise ValueError(f"padding_idx = {self.padding_idx!r} must be an integer, -100 for example ignores no id")


@dataclass
class TransformerConfig:
    """An encoder-decoder Transformer.

    Attributes:
        vocab_size: V, number of target ids, and of source ids unless ``source_vocab_size`` says otherwise.
        hidden_size: C of the encoder and the decoder.
        intermediate_size: F.
        nhead: H.
        num_encoder_layer: number of encoder layers.
        num_decoder_layer: number of decoder layers.
        padding_idx: token id of padding.
        attn_prob_dropout_ratio: dropout probability of attention weights.
        activation_dropout_ratio: dropout probability after activations.
        hidden_dropout_ratio: dropout probability of embeddings and of the outputs of attention and feed-forward.
        pre_layer_norm: pre-norm (True) or post-norm (False) layers.
        activation_fn: relu, gelu, gelu_tanh or swish.
        max_seq_len: longest source and target for learned positions.
        source_max_seq_len: longest source; None is ``max_seq_len``.
        share_all_embeddings: one table for source, target and output projection.
        share_decoder_input_output_embed: one table for target and output projection.
        source_vocab_size: number of source ids; None is ``vocab_size``.
        learned_positions: learned instead of sinusoidal positions.
        source_learned_positions: the same for the source; None is ``learned_positions``.
        positions: whether positions are added at all.
        scale_embedding: whether token embeddings are multiplied by sqrt(C).
        layer_norm_embedding: whether embeddings pass a layer norm.
        encoder_layerdrop: probability of leaving out an encoder layer in training.
        decoder_layerdrop: probability of leaving out a decoder layer in training.
        cross_attention: whether the decoder attends to an encoder.
        decoder_final_norm: whether a pre-norm decoder ends with a layer norm.
        checkpoint_activations: compute each layer's forward again in the backward instead of saving its activations.
        encoder_layer: overrides of single fields of :class:`LayerConfig` for encoder layers.
        decoder_layer: overrides of single fields of :class:`LayerConfig` for decoder layers.
        layer_norm_eps: of all layer norms.
        max_batch_tokens: hint, no limit.
        fp16: create the parameters in float16.
        local_rank: accepted for LightSeq's sake; move the module with ``.to(device)``.
    """

    vocab_size: int
    hidden_size: int = 512
    intermediate_size: int = 2048
    nhead: int = 8
    num_encoder_layer: int = 6
    num_decoder_layer: int = 6
    padding_idx: int = 1
    attn_prob_dropout_ratio: float = 0.1
    activation_dropout_ratio: float = 0.1
    hidden_dropout_ratio: float = 0.1
    pre_layer_norm: bool = True
    activation_fn: str = "relu"
    max_seq_len: int = 1024
    source_max_seq_len: int | None = None
    share_all_embeddings: bool = False
    share_decoder_input_output_embed: bool = False
    source_vocab_size: int | None = None
    learned_positions: bool = False
    source_learned_positions: bool | None = None
    positions: bool = True
    scale_embedding: bool = True
    layer_norm_embedding: bool = False
    encoder_layerdrop: float = 0.0
    decoder_layerdrop: float = 0.0
    cross_attention: bool = True
    decoder_final_norm: bool = True
    checkpoint_activations: bool = False
    encoder_layer: dict[str, Any] | None = None
    decoder_layer: dict[str, Any] | None = None
    layer_norm_eps: float = 1e-5
    max_batch_tokens: int | None = None
    fp16: bool = False
    local_rank: int = 0

    def check(self) -> None:
        """Raise a ValueError that names the first field with a bad value."""
        check_positive(self, "vocab_size", "hidden_size", "max_seq_len")
        check_ratios(self, "encoder_layerdrop", "decoder_layerdrop")
        check_eps(self)
        check_padding(self)
        for name in ("num_encoder_layer", "num_decoder_layer"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} = {value!r} must be an integer and must not be negative")
        known = {field.name for field in fields(LayerConfig)}
        for name in ("encoder_layer", "decoder_layer"):
            unknown = sorted(set(getattr(self, name) or ()) - known)
            if unknown:
                raise ValueError(f"{name} has the unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
        if self.share_all_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"share_all_embeddings needs one vocabulary: source_vocab_size = {self.source_vocab_size} must equal "
                f"vocab_size = {self.vocab_size}"
            )

    def layer(self, overrides: dict[str, Any] | None) -> LayerConfig:
        """Return the configuration of a layer, ``overrides`` first, then the model's own fields."""
        shared = {field.name for field in fields(LayerConfig)} & {field.name for field in fields(self)}
        config = LayerConfig(**{name: getattr(self, name) for name in shared})
        return replace(config, **(overrides or {}))

    @property
    def encoder(self) -> LayerConfig:
        """Configuration of an encoder layer."""
        return self.layer(self.encoder_layer)

    @property
    def decoder(self) -> LayerConfig:
        """Configuration of a decoder layer."""
        config = self.layer(self.decoder_layer)
        return replace(config, memory_size=self.encoder.hidden_size, nlayer=self.num_decoder_layer)


def from_preset(kind: type, model: str | None, values: dict[str, Any]) -> Any:
    """Return a ``kind`` built from the preset ``model`` (or none) and ``values``, which win.

    Raises:
        ValueError: the model or a field name is unknown, a field is missing or has a bad value.
    """
    if model is not None and model not in PRESETS:
        raise ValueError(f"model = {model!r} is unknown; use one of {', '.join(PRESETS)}, or give the sizes")
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown configuration field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    preset = {name: value for name, value in PRESETS.get(model, {}).items() if name in known}
    try:
        config = kind(**{**preset, **values})
    except TypeError as error:
        raise ValueError(f"incomplete configuration: {error}; give it or model=") from error
    config.check()
    return config


def check_positive(config: Any, *names: str) -> None:
    """Raise a ValueError for the first field that is not a positive integer."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name} = {value!r} must be a positive integer")


def check_ratios(config: Any, *names: str) -> None:
    """Raise a ValueError for the first field that is not a number between 0 and 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} = {value!r} must be a number between 0 and 1")


def check_eps(config: Any) -> None:
    """Raise a ValueError unless ``layer_norm_eps`` is a positive number."""
    value = config.layer_norm_eps
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"layer_norm_eps = {value!r} must be a positive number")


def check_padding(config: Any) -> None:
    """Raise a ValueError unless ``padding_idx`` is an id of the vocabulary."""
    if not isinstance(config.padding_idx, int) or not 0 <= config.padding_idx < config.vocab_size:
        raise ValueError(f"padding_idx = {config.padding_idx!r} must be a token id, 0 to {config.vocab_size - 1}")

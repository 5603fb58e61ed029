"""Encoder-decoder Transformer with fairseq's parameter names, shapes and initialisation, packed inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_train.layers import modules
from ls_train.layers.call import SITES
from ls_train.layers.config import LayerConfig, TransformerConfig, from_preset
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.embedding import embed, position_embedding, token_embedding
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.layers.incremental import DecodingState, decode_layers
from ls_train.layers.norm import layer_norm
from ls_train.packing import Packing, TokenOrder

DECODER_OFFSET = 1 << 16
"""First dropout constant of a decoder; an encoder starts at 0. Eight belong to the embedding, then eight to a layer."""


class _Stack(nn.Module):
    """What encoder and decoder share: embeddings, layers, final layer norm.

    Further keyword arguments go to the next class of a multiple inheritance.
    """

    rng_offset = 0

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerConfig,
        embed_tokens: nn.Embedding,
        max_length: int,
        learned_positions: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        config.check()
        layer.check()
        size = layer.hidden_size
        if embed_tokens.embedding_dim != size:
            raise ValueError(f"embed_tokens has dimension {embed_tokens.embedding_dim}, the layers have {size}")
        self.register_buffer("version", torch.tensor([3.0]))
        self.padding_idx = embed_tokens.padding_idx
        self.embed_scale = math.sqrt(size) if config.scale_embedding else 1.0
        self.dropout = layer.hidden_dropout_ratio
        self.checkpoint_activations = config.checkpoint_activations
        self.max_length = max_length
        self.embed_tokens = embed_tokens
        self.embed_positions = None
        if config.positions:
            self.embed_positions = position_embedding(max_length, size, self.padding_idx, learned_positions)
        self.layernorm_embedding = nn.LayerNorm(size, layer.layer_norm_eps) if config.layer_norm_embedding else None

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the positions reach and the configuration names."""
        if self.embed_positions is None:
            return self.max_length
        return min(self.max_length, self.embed_positions.max_positions)

    @modules.check_kinds
    def pack(self, tokens: Tensor) -> tuple[Tensor, Packing]:
        """Return the real tokens (N,) of ``tokens`` int64 (B, T) and their packing; a GPU tensor costs one wait.

        Raises:
            ValueError: ``tokens`` are not two-dimensional.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (batch, length), got {tuple(tokens.shape)}")
        packing = Packing.from_padding_mask(tokens.eq(self.padding_idx), *tokens.shape, tokens.device)
        return packing.pack(tokens), packing

    def _embed(self, tokens: Tensor, packing: Packing, seed: Tensor | None, order: TokenOrder | None) -> Tensor:
        return embed(
            tokens,
            packing,
            self.embed_tokens,
            self.embed_positions,
            self.layernorm_embedding,
            self.embed_scale,
            self.dropout if self.training else 0.0,
            seed,
            self.rng_offset,
            order,
        )

    def _seed(self, seed: Tensor | None, tokens: Tensor) -> Tensor | None:
        rates = [self.dropout] + [
            rate for layer in self.layers for rate in (layer.dropout, layer.attention_dropout, layer.activation_dropout)
        ]
        return modules.dropout_seed(seed, rates if self.training else (), tokens)

    def _kept(self, layerdrop: float) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index, layer) of the layers that take part, drawn on the host as fairseq's LayerDrop does."""
        draw = torch.empty(len(self.layers)).uniform_() if self.training and layerdrop > 0 else None
        for i, layer in enumerate(self.layers):
            if draw is None or draw[i] > layerdrop:
                yield i, layer

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            # The seed is an argument: no generator state to restore.
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)

    def _site(self, layer: int) -> int:
        return self.rng_offset + SITES * (1 + layer)


class LSTransformerEncoder(_Stack):
    """Embeddings and encoder layers.

    Args:
        config: configuration of the model.
        embed_tokens: token table, shared or own; None builds one.
        arguments: for the next class of a multiple inheritance.
    """

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding | None = None, **arguments: Any) -> None:
        layer = config.encoder
        if embed_tokens is None:
            vocab_size = config.vocab_size if config.source_vocab_size is None else config.source_vocab_size
            embed_tokens = token_embedding(vocab_size, layer.hidden_size, config.padding_idx)
        learned = config.source_learned_positions
        super().__init__(
            config,
            layer,
            embed_tokens,
            config.max_seq_len if config.source_max_seq_len is None else config.source_max_seq_len,
            config.learned_positions if learned is None else learned,
            **arguments,
        )
        self.layerdrop = config.encoder_layerdrop
        self.layers = nn.ModuleList(LSTransformerEncoderLayer(layer) for _ in range(config.num_encoder_layer))
        self.layer_norm = nn.LayerNorm(layer.hidden_size, layer.layer_norm_eps) if layer.pre_layer_norm else None

    @modules.check_kinds
    def forward(self, tokens: Tensor, seed: Tensor | None = None) -> Tensor:
        """Return the encoder's output (B, S, C), zero where padded, for ``tokens`` int64 (B, S)."""
        rows, packing = self.pack(tokens)
        return packing.unpack(self.forward_packed(rows, packing, seed))

    @modules.check_kinds
    def forward_packed(
        self,
        tokens: Tensor,
        packing: Packing,
        seed: Tensor | None = None,
        states: list[Tensor] | None = None,
        order: TokenOrder | None = None,
    ) -> Tensor:
        """Return the encoder's output (N, C).

        Args:
            tokens: int64 (N,), packed.
            packing: where the sequences lie.
            seed: int64 (1,) on the device, of all dropout masks; None draws one from torch's generator.
            states: a list that the embeddings and each layer's output, (N, C), are appended to.
            order: of ``tokens``; None: the backward sorts them.
        """
        seed = self._seed(seed, tokens)
        x = self._embed(tokens, packing, seed, order)
        if states is not None:
            states.append(x)
        for i, layer in self._kept(self.layerdrop):
            x = self._run(layer.forward_packed, x, packing, seed, self._site(i))
            if states is not None:
                states.append(x)
        return x if self.layer_norm is None else layer_norm(self.layer_norm, x, packing.rows)


class LSTransformerDecoder(_Stack):
    """Embeddings, decoder layers and output projection.

    Args:
        config: configuration of the model.
        embed_tokens: token table, shared or own; None builds one.
        arguments: for the next class of a multiple inheritance.
    """

    rng_offset = DECODER_OFFSET

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding | None = None, **arguments: Any) -> None:
        layer = config.decoder
        if embed_tokens is None:
            embed_tokens = token_embedding(config.vocab_size, layer.hidden_size, config.padding_idx)
        super().__init__(config, layer, embed_tokens, config.max_seq_len, config.learned_positions, **arguments)
        self.layerdrop = config.decoder_layerdrop
        self.layers = nn.ModuleList(LSTransformerDecoderLayer(layer) for _ in range(config.num_decoder_layer))
        self._keep_together()
        final_norm = layer.pre_layer_norm and config.decoder_final_norm
        self.layer_norm = nn.LayerNorm(layer.hidden_size, layer.layer_norm_eps) if final_norm else None
        self.output_projection = nn.Linear(layer.hidden_size, config.vocab_size, bias=False)
        if config.share_all_embeddings or config.share_decoder_input_output_embed:
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, mean=0, std=layer.hidden_size**-0.5)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep_together()

    def _keep_together(self) -> None:
        modules.keep_cross_kv_together(layer for layer in self.layers if layer.encoder_attn is not None)

    @modules.check_kinds
    def forward(
        self,
        tokens: Tensor,
        memory: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V), those of a zero vector where padded.

        Args:
            tokens: int64 (B, T), the target shifted right.
            memory: (B, S, Ce), the encoder's output, or None without cross attention.
            memory_padding_mask: bool (B, S), True where padded; None: no padding.
            seed: int64 (1,) on the device, of all dropout masks; None draws one from torch's generator.
        """
        rows, packing = self.pack(tokens)
        source = None
        if memory is not None:
            source = Packing.from_padding_mask(memory_padding_mask, *memory.shape[:2], memory.device)
            memory = source.pack(memory)
        return self.output_layer(packing.unpack(self.forward_packed(rows, packing, memory, source, seed)))

    @modules.check_kinds
    def forward_packed(
        self,
        tokens: Tensor,
        packing: Packing,
        memory: Tensor | None = None,
        memory_packing: Packing | None = None,
        seed: Tensor | None = None,
        states: list[Tensor] | None = None,
        order: TokenOrder | None = None,
    ) -> Tensor:
        """Return features (N, C), the input of the output projection.

        Args:
            tokens: int64 (N,), packed, the target shifted right.
            packing: where the target sequences lie.
            memory: (Ns, Ce), the encoder's packed output, or None without cross attention.
            memory_packing: where the source sequences lie.
            seed: int64 (1,) on the device, of all dropout masks; None draws one from torch's generator.
            states: a list that the embeddings and each layer's output, (N, C), are appended to.
            order: of ``tokens``; None: the backward sorts them.
        """
        seed = self._seed(seed, tokens)
        x = self._embed(tokens, packing, seed, order)
        if states is not None:
            states.append(x)
        kept = list(self._kept(self.layerdrop))
        kv = None
        if memory is not None and kept:
            kv = cross_kv(memory, memory_packing, [layer for _, layer in kept])
        for place, (i, layer) in enumerate(kept):
            x, kv = self._run(layer.forward_packed, x, packing, kv, memory_packing, place, seed, self._site(i))
            if states is not None:
                states.append(x)
        return x if self.layer_norm is None else layer_norm(self.layer_norm, x, packing.rows)

    @modules.check_kinds
    def output_layer(self, features: Tensor) -> Tensor:
        """Return logits (..., V) of ``features`` (..., C)."""
        return F.linear(features, self.output_projection.weight)

    @modules.check_kinds
    def start(self, batch: int, memory: Tensor | None = None, memory_packing: Packing | None = None) -> DecodingState:
        """Return the state before the first token of ``batch`` hypotheses.

        Args:
            batch: B.
            memory: (Ns, Ce), packed output of the encoder for B sequences, or None without cross attention.
            memory_packing: where they lie.
        """
        return DecodingState(list(self.layers), batch, memory, memory_packing)

    @modules.check_kinds
    def step(
        self, tokens: Tensor, state: DecodingState, alignment_layer: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return features (B, T, C) of T new tokens and advance ``state``; for evaluation, without dropout.

        Args:
            tokens: int64 (B, T), usually T = 1.
            state: from :meth:`start` or an earlier step.
            alignment_layer: layer whose cross-attention weights are wanted, or None.

        Returns:
            features, and attention weights (H, B, T, S) or None.
        """
        x = F.embedding(tokens, self.embed_tokens.weight) * self.embed_scale
        if self.embed_positions is not None:
            end = state.length + tokens.shape[1]
            table = self.embed_positions.table(end)
            first = self.padding_idx + 1
            x = x + table[first + state.length : first + end].to(x.dtype)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x, weights = decode_layers(list(self.layers), x, state, alignment_layer)
        return x if self.layer_norm is None else self.layer_norm(x), weights


class LSTransformer(nn.Module):
    """Encoder-decoder Transformer.

    Args:
        config: from :meth:`get_config`.

    Raises:
        ValueError: a field has a bad value.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        config.check()
        source_size = config.vocab_size if config.source_vocab_size is None else config.source_vocab_size
        source = token_embedding(source_size, config.encoder.hidden_size, config.padding_idx)
        target = source
        if not config.share_all_embeddings:
            target = token_embedding(config.vocab_size, config.decoder.hidden_size, config.padding_idx)
        self.encoder = LSTransformerEncoder(config, source)
        self.decoder = LSTransformerDecoder(config, target)
        if config.fp16:
            self.half()

    @staticmethod
    def get_config(model: str | None = None, **values: Any) -> TransformerConfig:
        """Return a configuration from a preset (``transformer-base``, ...) and field values, which win.

        Raises:
            ValueError: the model or a field is unknown, missing or has a bad value.
        """
        return from_preset(TransformerConfig, model, values)

    @modules.check_kinds
    def forward(self, source: Tensor, target: Tensor, seed: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V), those of a zero vector where the target is padded.

        Args:
            source: int64 (B, S), padded left or right.
            target: int64 (B, T), the target shifted right, padded.
            seed: int64 (1,) on the device, of all dropout masks; None draws one from torch's generator.
        """
        features, packing = self.features(source, target, seed)
        return self.decoder.output_layer(packing.unpack(features))

    @modules.check_kinds
    def features(self, source: Tensor, target: Tensor, seed: Tensor | None = None) -> tuple[Tensor, Packing]:
        """Return the decoder's packed features (N, C), for a criterion with projection, and the target's packing."""
        if source.shape[0] != target.shape[0]:
            raise ValueError(f"source has batch {source.shape[0]}, target has {target.shape[0]}; they must be equal")
        seed = self.encoder._seed(seed, source)
        source_rows, source_packing = self.encoder.pack(source)
        memory = self.encoder.forward_packed(source_rows, source_packing, seed)
        rows, packing = self.decoder.pack(target)
        return self.decoder.forward_packed(rows, packing, memory, source_packing, seed), packing

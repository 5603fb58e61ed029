"""fairseq's own Transformer and ours with the same weights, and batches for both."""

from argparse import Namespace

import torch
from torch import Tensor, nn

from ls_train.layers.transformer import LSTransformer

PAD, EOS = 1, 2


def fairseq_transformer(vocab_size: int = 37, **overrides: object) -> nn.Module:
    """Return fairseq's encoder-decoder Transformer, dropout 0 unless overridden."""
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    dictionary = Dictionary()
    for i in range(vocab_size - len(dictionary)):
        dictionary.add_symbol(f"word{i}")
    settings = {
        "encoder_embed_dim": 16,
        "encoder_ffn_embed_dim": 24,
        "encoder_attention_heads": 4,
        "encoder_layers": 2,
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 24,
        "decoder_attention_heads": 4,
        "decoder_layers": 2,
        "dropout": 0.0,
        "max_source_positions": 64,
        "max_target_positions": 64,
        **overrides,
    }
    args = Namespace(**settings)
    base_architecture(args)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerModel.build_model(args, task)


def our_transformer(vocab_size: int = 37, **overrides: object) -> LSTransformer:
    """Return our Transformer built from fairseq's argument names (those the tests use)."""
    get = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": 4, **overrides}.get
    dropout = get("dropout", 0.0)
    return LSTransformer(
        LSTransformer.get_config(
            vocab_size=vocab_size,
            hidden_size=get("encoder_embed_dim"),
            intermediate_size=get("encoder_ffn_embed_dim"),
            nhead=get("encoder_attention_heads"),
            num_encoder_layer=get("encoder_layers", 2),
            num_decoder_layer=get("decoder_layers", 2),
            hidden_dropout_ratio=dropout,
            attn_prob_dropout_ratio=get("attention_dropout", 0.0),
            activation_dropout_ratio=get("activation_dropout", 0.0),
            pre_layer_norm=get("encoder_normalize_before", False),
            activation_fn=get("activation_fn", "relu"),
            max_seq_len=get("max_source_positions", 64),
            learned_positions=get("encoder_learned_pos", False),
            share_all_embeddings=get("share_all_embeddings", False),
            share_decoder_input_output_embed=get("share_decoder_input_output_embed", False),
            layer_norm_embedding=get("layernorm_embedding", False),
        )
    )


def batch(left: bool = True, vocab_size: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Return (source, source lengths, target): five sentences, source padded left or right, target right."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 7, 7, 4, 1])
    target_lengths = torch.tensor([6, 8, 1, 5, 3])
    source = torch.full((5, 9), PAD)
    target = torch.full((5, 8), PAD)
    for b, (s, t) in enumerate(zip(lengths.tolist(), target_lengths.tolist(), strict=True)):
        words = torch.randint(4, vocab_size, (s,), generator=generator)
        words[-1] = EOS
        source[b, 9 - s :] = words
        if not left:
            source[b] = PAD
            source[b, :s] = words
        target[b, :t] = torch.randint(4, vocab_size, (t,), generator=generator)
        target[b, 0] = EOS
    return source, lengths, target

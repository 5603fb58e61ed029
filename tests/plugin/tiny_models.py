"""Small models of ours and fairseq's from the same seed, and batches for them."""

import argparse

import torch
from fairseq import models
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary

import fairseq_plugin  # noqa: F401  registers the architectures

TINY = {
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}


class Task:
    """As much of a translation task as building a model needs."""

    def __init__(self, source: Dictionary, target: Dictionary):
        self.source_dictionary, self.target_dictionary = source, target


def dictionary(size: int) -> Dictionary:
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    return words


def build(arch: str, seed: int = 5, words: int = 23, **options) -> torch.nn.Module:
    torch.manual_seed(seed)
    source = dictionary(words)
    target = source if options.get("share_all_embeddings") else dictionary(words + 6)
    return models.build_model(argparse.Namespace(arch=arch, **{**TINY, **options}), Task(source, target))


def pair(**options) -> tuple[torch.nn.Module, torch.nn.Module]:
    return build("ls_transformer", **options), build("transformer", **options)


def batch(left_pad_source: bool = True, sizes=((7, 5), (3, 6), (1, 1), (4, 2))) -> dict[str, torch.Tensor]:
    """Sentence pairs of the given lengths; the target is right-padded, prev_output_tokens starts with eos."""
    generator = torch.Generator().manual_seed(1)
    longest = [max(column) for column in zip(*sizes)]
    source = torch.ones(len(sizes), longest[0], dtype=torch.int64)
    previous, target = (torch.ones(len(sizes), longest[1], dtype=torch.int64) for _ in range(2))
    for row, (s, t) in enumerate(sizes):
        words = torch.randint(4, 23, (s + t,), generator=generator)
        source[row, longest[0] - s :] if left_pad_source else source[row, :s]
        start = longest[0] - s if left_pad_source else 0
        source[row, start : start + s] = words[:s]
        target[row, :t] = words[s:]
        previous[row, 0] = 2
        previous[row, 1:t] = words[s:-1]
    lengths = torch.tensor([s for s, _ in sizes])
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
    return {"net_input": net_input, "target": target}


def loss_of(model: torch.nn.Module, sample: dict) -> torch.Tensor:
    lprobs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
    return label_smoothed_nll_loss(lprobs, sample["target"].unsqueeze(-1), 0.1, ignore_index=1)[0]

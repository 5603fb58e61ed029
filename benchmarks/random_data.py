"""A fairseq data-bin of random tokens with lengths as in WMT14 English-German."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def write_data(folder: Path, sentences: int, vocabulary: int) -> None:
    """Write the data-bin: lengths log-normal as in WMT14 en-de, words by Zipf's law; 100 sentences of validation."""
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for i in range(vocabulary - dictionary.nspecial):
        dictionary.add_symbol(f"w{i}", n=vocabulary - i)
    rng = np.random.default_rng(1)
    for split, count in (("valid", 100), ("train", sentences)):
        length = np.exp(rng.normal(3.22, 0.62, count))
        ratio = np.exp(rng.normal(0.02, 0.17, count))
        for language, lengths in (("en", length.clip(3, 200)), ("de", (length * ratio).clip(3, 220))):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            path = str(folder / f"{split}.en-de.{language}")
            builder = indexed_dataset.make_builder(path + ".bin", "mmap", vocab_size=vocabulary)
            words = lengths.astype(int)
            ids = torch.from_numpy((rng.zipf(1.15, words.sum()) - 1) % (vocabulary - 10) + dictionary.nspecial)
            end = torch.tensor([dictionary.eos()])
            for sentence in ids.split(words.tolist()):
                builder.add_item(torch.cat([sentence, end]))
            builder.finalize(path + ".idx")

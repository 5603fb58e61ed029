"""Command lines and data of the tests of single flags."""

import shutil

OURS = ["--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--criterion", "ls_cross_entropy"]
FAIRSEQS = ["--arch", "transformer_tiny", "--optimizer", "adam", "--criterion", "cross_entropy"]


def copy_split(folder, split, copy):
    for path in folder.glob(f"{split}.*en-de*"):
        shutil.copy(path, folder / path.name.replace(split, copy, 1))


def train_words(data, *flags):
    fixed = [data, "--cpu", "--lr", 1e-3, "--dropout", 0, "--num-workers", 0, "--seed", 4, "--max-tokens", 200]
    fixed += ["--log-format", "json", "--log-interval", 1, "--ignore-unused-valid-subsets"]
    fixed += ["--required-batch-size-multiple", 1]
    return [str(part) for part in (*fixed, *flags)]

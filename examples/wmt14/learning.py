"""Show that a run has learned: its loss curve, and its final loss against what token frequencies alone can reach.

learning.py train.log --target valid.de --plot loss.png

The unigram entropy of the target side (bits a token, end of sentence included) is the loss of the best model that
knows nothing but how frequent each token is. fairseq logs its losses to base 2, so both have the same unit. Exits with
1 when the last validation loss is not below it.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path


def unigram_entropy(text: Path) -> float:
    """Return the entropy of the token frequencies of ``text`` in bits a token, one end of sentence a line."""
    counts: Counter[str] = Counter()
    for line in text.read_text(encoding="utf-8").splitlines():
        counts.update([*line.split(), "</s>"])
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def read_curve(log: Path, subset: str) -> list[tuple[int, float, float]]:
    """Return (update, loss, nll_loss) of every logged line of ``subset``: ``"train_inner"`` or ``"valid"``.

    ``log`` was written by fairseq's ``--log-format simple``, which puts ``=`` between name and value in the middle of
    an epoch and a space in its summaries.
    """
    curve = []
    for line in log.read_text(encoding="utf-8").splitlines():
        if f"| {subset} |" in line:
            fields = dict(re.findall(r"(\w+)[= ](-?[\d.]+(?:e-?\d+)?)(?=[,\s]|$)", line.split(f"| {subset} |")[1]))
            if {"num_updates", "loss", "nll_loss"} <= fields.keys():
                curve.append((int(fields["num_updates"]), float(fields["loss"]), float(fields["nll_loss"])))
    return curve


def plot(curves: dict[str, list[tuple[int, float, float]]], entropy: float, output: Path) -> None:
    """Draw the losses over the updates, and the unigram entropy as a line, into the PNG ``output``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "o-")):
        axes.plot([point[0] for point in curve], [point[1] for point in curve], style, label=name, markersize=4)
    axes.axhline(entropy, color="grey", linestyle="--", label="unigram entropy of the target side")
    axes.set(xlabel="update", ylabel="label-smoothed loss, bits a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--target", type=Path, required=True, help="tokenised target side of the validation set")
    parser.add_argument("--plot", type=Path, required=True)
    arguments = parser.parse_args()
    valid = read_curve(arguments.log, "valid")
    if not valid:
        raise SystemExit(f"{arguments.log} holds no validation result")
    entropy = unigram_entropy(arguments.target)
    plot({"training": read_curve(arguments.log, "train_inner"), "validation": valid}, entropy, arguments.plot)
    update, loss, nll = valid[-1]
    print(f"unigram entropy of the validation target   {entropy:.3f} bits a token")
    print(f"validation loss after {update} updates          {loss:.3f} (label-smoothed), nll_loss {nll:.3f}")
    print(f"loss curve                                 {arguments.plot}")
    if not loss < entropy:
        raise SystemExit(f"the validation loss {loss:.3f} is not below the unigram entropy {entropy:.3f}")


if __name__ == "__main__":
    main()

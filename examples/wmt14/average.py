"""Average the weights of the last checkpoints of a run.

average.py CHECKPOINTS --last 10 --output averaged.pt

Takes the last of checkpointN.pt (one an epoch) when there are any, else of checkpoint_E_U.pt (one every so many
updates). The result is the newest checkpoint with averaged weights: it serves lightseq-generate and fairseq-generate.
"""

import argparse
import re
from pathlib import Path

import torch


def last_checkpoints(directory: Path, count: int) -> list[Path]:
    """Return the newest ``count`` checkpoints of a run, oldest first.

    Raises:
        ValueError: there are fewer; the message says how many.
    """
    for pattern in (r"checkpoint(\d+)\.pt", r"checkpoint_\d+_(\d+)\.pt"):
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := re.fullmatch(pattern, path.name))]
        if found:
            break
    if len(found) < count:
        raise ValueError(f"{directory} holds {len(found)} numbered checkpoints, fewer than --last {count}")
    return [path for _, path in sorted(found)[-count:]]


def average(paths: list[Path]) -> dict:
    """Return the last checkpoint of ``paths`` with the mean of all their weights, computed in float64.

    Raises:
        ValueError: two checkpoints have different parameters.
    """
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        # fairseq's checkpoints hold its configuration objects, so they need a full unpickler: load only your own.
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        weights = checkpoint["model"]
        if total and total.keys() != weights.keys():
            raise ValueError(
                f"{path} has other parameters than {paths[0]}: {sorted(total.keys() ^ weights.keys())[:5]}"
            )
        for name, weight in weights.items():
            wide = weight.double() if weight.is_floating_point() else weight
            total[name] = total[name] + wide if name in total and weight.is_floating_point() else wide
    for name, weight in checkpoint["model"].items():
        if weight.is_floating_point():
            total[name] = (total[name] / len(paths)).to(weight.dtype)
    checkpoint["model"] = total
    return checkpoint


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--last", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    paths = last_checkpoints(arguments.checkpoints, arguments.last)
    torch.save(average(paths), arguments.output)
    print(f"{arguments.output}: mean of {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()

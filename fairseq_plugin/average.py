"""``lightseq-average``: the mean of several checkpoints, with the options of fairseq's scripts/average_checkpoints.py.

The result has fairseq's bits (sum in float32, one division) and everything but the weights from the first checkpoint.
Files are read by the allow-list and written atomically. Checkpoints of an arch and of its ``ls_`` twin may be mixed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_plugin import checkpoint_io
from fairseq_plugin.checkpoint_io import State
from fairseq_plugin.errors import UserError, report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status. argv: arguments without the program's name."""
    parser = argparse.ArgumentParser(prog="lightseq-average", description="Average the weights of checkpoints.")
    parser.add_argument("--inputs", nargs="+", required=True, help="checkpoint files, or one folder of checkpoints")
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="the last N checkpoint<epoch>.pt")
    which.add_argument(
        "--num-update-checkpoints", type=int, metavar="N", help="the last N checkpoint_<epoch>_<update>.pt"
    )
    which.add_argument(
        "--num-best-checkpoints", type=int, metavar="N", help="the N best checkpoint.best_<metric>_<value>.pt"
    )
    parser.add_argument("--checkpoint-upper-bound", type=int, metavar="N", help="no epoch or update beyond this one")
    args = parser.parse_args(argv)
    try:
        paths = select(
            args.inputs,
            epochs=args.num_epoch_checkpoints,
            updates=args.num_update_checkpoints,
            best=args.num_best_checkpoints,
            upper_bound=args.checkpoint_upper_bound,
        )
        checkpoint_io.write(average(paths), args.output)
    except UserError as error:
        return report(error)
    print(f"{args.output}: average of {', '.join(paths)}")
    return 0


def select(
    inputs: Sequence[str],
    epochs: int | None = None,
    updates: int | None = None,
    best: int | None = None,
    upper_bound: int | None = None,
) -> list[str]:
    """Return the files to average: ``inputs`` themselves, or the last ones by number in the folder they name.

    Raises:
        UserError: a number without a single folder, or fewer checkpoints there than asked for.
    """
    count = epochs or updates or best
    if count is None:
        if upper_bound is not None:
            raise UserError("--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints")
        return list(inputs)
    if len(inputs) != 1 or not os.path.isdir(inputs[0]):
        raise UserError(f"--inputs {' '.join(inputs)}: give one folder of checkpoints to choose the last {count} from")
    folder = inputs[0]
    pattern = (
        r"checkpoint(\d+)\.pt" if epochs else r"checkpoint_\d+_(\d+)\.pt" if updates else r"checkpoint\.best_.+\.pt"
    )
    matches = [match for name in os.listdir(folder) if (match := re.fullmatch(pattern, name))]
    if best:
        names = sorted(match[0] for match in matches)
    else:
        numbers = sorted((int(match[1]), match[0]) for match in matches)
        names = [name for number, name in reversed(numbers) if upper_bound is None or number <= upper_bound]
    if len(names) < count:
        raise UserError(f"{folder}: {len(names)} checkpoints of that kind, fewer than the {count} asked for")
    return [os.path.join(folder, name) for name in names[:count]]


def average(paths: Sequence[str]) -> State:
    """Return the first checkpoint of ``paths`` with the mean of all their weights.

    Raises:
        UserError: a file cannot be loaded, or has other tensors than the first.
    """
    result: State = {}
    total: dict[str, Tensor] = {}
    for path in paths:
        state = checkpoint_io.read(path)
        model = {
            name: value.float() if value.dtype == torch.float16 else value for name, value in state["model"].items()
        }
        if not total:
            result, total = state, {name: value.clone() for name, value in model.items()}
            continue
        shapes = {name: value.shape for name, value in model.items()}
        if shapes != {name: value.shape for name, value in total.items()}:
            raise UserError(f"{path}: its tensors are not those of {paths[0]}; only checkpoints of one model average")
        for name, value in model.items():
            total[name] += value
    for value in total.values():
        if value.is_floating_point():
            value.div_(len(paths))
        else:
            value.floor_divide_(len(paths))
    result["model"] = total
    return result

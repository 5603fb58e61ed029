"""Normalise parallel text as Moses does, and drop pairs that no model should learn from.

clean.py normalise --language en raw.en normal.en
clean.py filter --max-ratio 1.5 --max-length 250 in.en in.de out.en out.de

`normalise` is Moses' normalize-punctuation and remove-non-printing-char (through sacremoses). `filter` works on
tokenised text: a pair stays when both sides have 1 to --max-length tokens and neither is --max-ratio times longer.
"""

import argparse
import unicodedata
from pathlib import Path


def normalise(language: str, source: Path, target: Path) -> None:
    """Write ``source`` to ``target`` with normal punctuation and without control characters, line by line."""
    from sacremoses import MosesPunctNormalizer

    normaliser = MosesPunctNormalizer(lang=language)
    with source.open(encoding="utf-8", newline="\n") as lines, target.open("w", encoding="utf-8") as output:
        for line in lines:
            text = normaliser.normalize(line.rstrip("\n"))
            printable = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in text)
            output.write(" ".join(printable.split()) + "\n")


def acceptable(first: int, second: int, max_ratio: float, max_length: int) -> bool:
    """Return whether a pair of ``first`` and ``second`` tokens stays."""
    if not (0 < first <= max_length and 0 < second <= max_length):
        return False
    return max(first, second) <= max_ratio * min(first, second)


def filter_pairs(sources: list[Path], targets: list[Path], max_ratio: float, max_length: int) -> tuple[int, int]:
    """Write the acceptable pairs of the two ``sources`` to the two ``targets``; return how many were read and kept."""
    read = kept = 0
    with (
        sources[0].open(encoding="utf-8") as first_in,
        sources[1].open(encoding="utf-8") as second_in,
        targets[0].open("w", encoding="utf-8") as first_out,
        targets[1].open("w", encoding="utf-8") as second_out,
    ):
        for first, second in zip(first_in, second_in, strict=True):
            read += 1
            if acceptable(len(first.split()), len(second.split()), max_ratio, max_length):
                kept += 1
                first_out.write(first)
                second_out.write(second)
    return read, kept


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("normalise")
    command.add_argument("--language", required=True)
    command.add_argument("source", type=Path)
    command.add_argument("target", type=Path)
    command = commands.add_parser("filter")
    command.add_argument("--max-ratio", type=float, default=1.5)
    command.add_argument("--max-length", type=int, default=250)
    command.add_argument("paths", type=Path, nargs=4)
    arguments = parser.parse_args()
    if arguments.command == "normalise":
        normalise(arguments.language, arguments.source, arguments.target)
    else:
        paths, limits = arguments.paths, (arguments.max_ratio, arguments.max_length)
        read, kept = filter_pairs(paths[:2], paths[2:], *limits)
        print(f"{paths[2]}: kept {kept} of {read} pairs")


if __name__ == "__main__":
    main()

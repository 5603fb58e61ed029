"""Put the output of lightseq-generate into the order of the test set.

hypotheses.py generated.log hypotheses.de [--samples 5 --source test.en --reference test.de]

Writes one hypothesis a line (what sacrebleu reads) and prints samples when asked to.
"""

import argparse
from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """Return the lines of ``path``; unlike ``str.splitlines`` only a newline ends one."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\n") for line in lines]


def read_hypotheses(log: Path) -> list[str]:
    """Return the best hypothesis of every sentence in the order of the test set.

    Raises:
        ValueError: a sentence is missing; the message says which.
    """
    best: dict[int, str] = {}
    for line in read_lines(log):
        if line.startswith("D-"):
            name, _, text = line.split("\t", 2)
            best.setdefault(int(name.removeprefix("D-")), text)
    if not best:
        raise ValueError(f"{log} holds no hypothesis (no line starts with D-); look at its end for an error")
    missing = sorted(set(range(max(best) + 1)) - set(best))
    if missing:
        raise ValueError(
            f"{log} lacks sentences {missing[:10]}: generate with --required-batch-size-multiple 1 and without "
            "--skip-invalid-size-inputs-valid-test"
        )
    return [best[number] for number in range(len(best))]


def print_samples(count: int, sources: list[str], references: list[str], hypotheses: list[str]) -> None:
    """Print ``count`` sentences of ordinary length, spread over the test set."""
    ordinary = [number for number, source in enumerate(sources) if 6 <= len(source.split()) <= 25]
    step = max(1, len(ordinary) // count)
    for number in ordinary[::step][:count]:
        print(f"\n  source     {sources[number]}")
        print(f"  reference  {references[number]}")
        print(f"  ours       {hypotheses[number]}")


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--reference", type=Path)
    arguments = parser.parse_args()
    hypotheses = read_hypotheses(arguments.log)
    arguments.output.write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    if arguments.samples:
        texts = [read_lines(path) for path in (arguments.source, arguments.reference)]
        if not len(texts[0]) == len(texts[1]) == len(hypotheses):
            raise SystemExit(f"{len(texts[0])} sources, {len(texts[1])} references, {len(hypotheses)} hypotheses")
        print_samples(arguments.samples, *texts, hypotheses)


if __name__ == "__main__":
    main()

"""Learn a joint byte-pair encoding with sentencepiece, and split text files into its pieces.

bpe.py learn --model work/bpe --vocab-size 2000 train.en train.de
bpe.py encode --model work/bpe raw/train.en work/train.en
"""

import argparse
from pathlib import Path

import sentencepiece

SENTENCES_FOR_LEARNING = 4_000_000


def learn(model: Path, vocab_size: int, texts: list[Path]) -> None:
    """Write ``model``.model and ``model``.vocab, learned from all ``texts`` together."""
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(map(str, texts)),
        model_prefix=str(model),
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.9999,
        input_sentence_size=SENTENCES_FOR_LEARNING,
        shuffle_input_sentence=True,
        minloglevel=2,
    )


def encode(model: Path, source: Path, target: Path) -> None:
    """Write ``source`` to ``target``, one line a line, pieces separated by spaces."""
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as output:
        for line in lines:
            output.write(" ".join(processor.encode(line.rstrip("\n"), out_type=str)) + "\n")


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("learn")
    command.add_argument("--model", type=Path, required=True)
    command.add_argument("--vocab-size", type=int, required=True)
    command.add_argument("texts", type=Path, nargs="+")
    command = commands.add_parser("encode")
    command.add_argument("--model", type=Path, required=True)
    command.add_argument("source", type=Path)
    command.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "learn":
        learn(arguments.model, arguments.vocab_size, arguments.texts)
    else:
        encode(arguments.model, arguments.source, arguments.target)


if __name__ == "__main__":
    main()

"""``lightseq-train`` and its sisters: fairseq's command lines with the plugin loaded.

Every option is fairseq's. The launchers add ``--user-dir <this package>`` and carry the user's own one along
(:mod:`fairseq_plugin.user_dir`); nothing else on the command line changes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from fairseq_plugin import compat, user_dir
from fairseq_plugin.errors import report


def train(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-train``. argv: arguments without the program's name, by default those of the process."""
    _run("fairseq_cli.train", argv)


def generate(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-generate``."""
    _run("fairseq_cli.generate", argv)


def interactive(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-interactive``."""
    _run("fairseq_cli.interactive", argv)


def validate(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-validate``."""
    _run("fairseq_cli.validate", argv)


def preprocess(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-preprocess``."""
    _run("fairseq_cli.preprocess", argv)


def score(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-score``; ``--sacrebleu`` works with the sacrebleu of today as well."""
    with compat.sacrebleu_reads_files():
        _call("fairseq_cli.score", list(sys.argv[1:] if argv is None else argv))


def _run(module: str, argv: Sequence[str] | None) -> None:
    arguments, users = user_dir.split(sys.argv[1:] if argv is None else argv)
    user_dir.carry(users)
    user_dir.import_carried()
    _call(module, [user_dir.OPTION, user_dir.PLUGIN_DIR, *arguments])


def _call(module: str, arguments: list[str]) -> None:
    main: Callable[[], None] = importlib.import_module(module).cli_main
    previous = sys.argv
    sys.argv = [previous[0], *arguments]
    try:
        main()
    except Exception as error:
        raise SystemExit(report(error)) from error
    finally:
        sys.argv = previous

"""``lightseq-train`` and its sisters: fairseq's command lines with the plugin loaded.

Every option is fairseq's. The launchers add ``--user-dir <this package>`` and carry the user's own one along
(:mod:`fairseq_plugin.user_dir`); nothing else on the command line changes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairseq_plugin import compat, user_dir
from fairseq_plugin.errors import UserError, report

# With it hydra raises what is wrong with overrides and yaml files, instead of printing several lines and ending.
_HYDRA_FULL_ERROR = "HYDRA_FULL_ERROR"


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


def eval_lm(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-eval-lm``."""
    _run("fairseq_cli.eval_lm", argv)


def preprocess(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-preprocess``."""
    _run("fairseq_cli.preprocess", argv)


def hydra_train(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-hydra-train``; ``common.user_dir`` of the command line or a yaml file is imported as well."""
    from fairseq_cli import hydra_train as command

    run = command._hydra_main

    def carry_user_dir(cfg: Any, **kwargs: Any) -> Any:
        # Inside hydra, which would print the overrides above the error.
        with _reported():
            given = cfg.common.user_dir
            user_dir.carry(None if given is None or user_dir.is_plugin(given) else user_dir.resolve(given))
            user_dir.import_carried()
            cfg.common.user_dir = user_dir.PLUGIN_DIR
            return run(cfg, **kwargs)

    # fairseq registers its defaults under the name of the user's yaml file, whatever that is.
    warnings.filterwarnings("ignore", r"\s*'.*' is validated against ConfigStore schema with the same name")
    command._hydra_main = carry_user_dir
    full_error = os.environ.get(_HYDRA_FULL_ERROR)
    os.environ[_HYDRA_FULL_ERROR] = "1"
    try:
        _call("fairseq_cli.hydra_train", list(sys.argv[1:] if argv is None else argv))
    finally:
        command._hydra_main = run
        del os.environ[_HYDRA_FULL_ERROR]
        if full_error is not None:
            os.environ[_HYDRA_FULL_ERROR] = full_error


def score(argv: Sequence[str] | None = None) -> None:
    """Run ``fairseq-score``; ``--sacrebleu`` works with the sacrebleu of today as well."""
    from fairseq_cli.score import get_parser

    arguments = list(sys.argv[1:] if argv is None else argv)
    with _reported():
        _check_score(get_parser().parse_args(arguments))
    with compat.sacrebleu_reads_files():
        _call("fairseq_cli.score", arguments)


def _check_score(options: Any) -> None:
    """Refuse files that give no score, or one of other sentences than the user thinks.

    Raises:
        UserError: a file is empty, or the two differ in their number of lines, or ``--order`` is not 1 to 4.
        OSError: a file cannot be read.
    """
    if not 1 <= options.order <= 4:
        raise UserError(f"--order {options.order}: must be between 1 and 4")
    counts = {}
    for name, path in (("--sys", options.sys), ("--ref", options.ref)):
        if name == "--sys" and path == "-":
            continue
        with open(path, encoding="utf-8") as stream:
            try:
                counts[name] = sum(1 for _ in stream)
            except UnicodeDecodeError as error:
                raise UserError(f"{name} {path}: not UTF-8 text ({error})") from None
        if not counts[name]:
            raise UserError(f"{name} {path}: the file is empty, there is nothing to score")
    if len(set(counts.values())) > 1:
        raise UserError(
            f"--sys {options.sys} has {counts['--sys']} lines but --ref {options.ref} has {counts['--ref']}; give one "
            "line a sentence in both, in the same order"
        )


def _run(module: str, argv: Sequence[str] | None) -> None:
    with _reported():
        arguments, users = user_dir.split(sys.argv[1:] if argv is None else argv)
        user_dir.carry(users)
        user_dir.import_carried()
    _call(module, [user_dir.OPTION, user_dir.PLUGIN_DIR, *arguments])


def _call(module: str, arguments: list[str]) -> None:
    main: Callable[[], None] = importlib.import_module(module).cli_main
    previous = sys.argv
    sys.argv = [previous[0], *arguments]
    try:
        with _reported():
            main()
    finally:
        sys.argv = previous


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """End the program with exit status 1 and one ``error:`` line where an exception comes out of the block."""
    try:
        yield
    except Exception as error:
        raise SystemExit(report(error)) from error

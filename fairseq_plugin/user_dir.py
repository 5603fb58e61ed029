"""The user's own ``--user-dir`` beside the plugin's.

fairseq keeps only the last ``--user-dir`` and imports it again in every spawned rank, so the launchers pass the
plugin's folder and carry the user's in the environment, which spawned ranks inherit; the plugin imports it from there.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq_plugin.errors import UserError

OPTION = "--user-dir"
VARIABLE = "LS_TRAIN_USER_DIR"
PLUGIN_DIR = str(Path(__file__).resolve().parent)


def split(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the arguments without any ``--user-dir``, and the last one given that is not the plugin's own folder.

    Raises:
        UserError: ``--user-dir`` is the last argument and has no value.
    """
    rest: list[str] = []
    chosen: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        if argument == OPTION:
            value = next(remaining, None)
            if value is None:
                raise UserError(f"{OPTION} needs a folder after it")
        elif argument.startswith(OPTION + "="):
            value = argument[len(OPTION) + 1 :]
        else:
            rest.append(argument)
            continue
        if not is_plugin(value):
            chosen = resolve(value)
    return rest, chosen


def resolve(folder: str) -> str:
    """Return ``folder`` as an absolute path where it exists; otherwise fairseq looks for it beside its own package."""
    return os.path.abspath(folder) if os.path.exists(folder) else folder


def is_plugin(folder: str) -> bool:
    """Return whether ``folder`` is the folder of this package."""
    return os.path.exists(folder) and os.path.samefile(folder, PLUGIN_DIR)


def carry(folder: str | None) -> None:
    """Put ``folder`` where this process and every rank it starts will find it; None clears it."""
    if folder is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = folder


def import_carried() -> None:
    """Import the carried folder, once, the way fairseq imports a ``--user-dir``.

    Raises:
        UserError: neither the folder nor one of that name beside fairseq exists.
        ImportError: another module already has the folder's name.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        from fairseq.utils import import_user_module

        try:
            import_user_module(Namespace(user_dir=folder))
        except FileNotFoundError as error:
            if error.filename is not None:  # raised by the user's own code
                raise
            raise UserError(f"{OPTION} {folder}: no such folder; give the folder of your plugin") from error

"""Errors that are the user's to mend, and the one line that reports them."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException


class UserError(Exception):
    """A mistake in what the user gave; the message names the option or file, the value, and what to do."""


# What fairseq raises with a text for the user.
_TOLD = (AssertionError, ValueError, ImportError, NotImplementedError)


def report(error: BaseException) -> int:
    """Print one ``error:`` line for ``error`` on stderr and return the exit status, 1.

    An error that is not known to be the user's gets its traceback above the line. Errors of spawned ranks, which arrive
    as text inside the launcher's exception, are recognised too.
    """
    message = _known(error)
    if message is None:
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return 1


def _known(error: BaseException) -> str | None:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FloatingPointError):
        return _not_finite(str(error))
    if isinstance(error, FileNotFoundError) and str(error).startswith("Dataset not found"):
        return f"{error}; is the data folder whole, and are the languages and the subset's name right?"
    if isinstance(error, IndexError) and "ids must be between" in str(error):
        return f"{error}: the data folder holds ids that its dictionary lacks; write it anew with lightseq-preprocess"
    if "since max_positions=" in str(error) and "--skip-invalid-size-inputs-valid-test" in str(error):
        return f"{error}, or raise --max-source-positions, --max-target-positions or --tokens-per-sample"
    broken = re.search(r"Connection (closed|reset) by peer", str(error)) if isinstance(error, RuntimeError) else None
    if broken:
        return f"the connection to another rank broke ({broken[0]}): it has probably ended, and its own output says why"
    if type(error) is RuntimeError and "due to dataloader mismatch" in str(error):
        return (
            "the checkpoint's place in its epoch is beyond the end with the present data and batch sizes; give those "
            "of its run, or --reset-dataloader to begin with the data of the first epoch"
        )
    if type(error) is RuntimeError and not error.args and _raised_by(error) == "parse_args_and_arch":
        return "no architecture is chosen; give one with --arch, --arch ls_transformer for example"
    if type(error) is KeyError and error.args == (None,) and _raised_by(error) == "parse_args_and_arch":
        return "no task is chosen; give that of the training with --task, --task translation for example"
    if type(error) is KeyError and _raised_by(error) in ("get_valid_stats", "validate"):
        return f"--best-checkpoint-metric {error.args[0]}: validation logs no such value; loss and ppl always exist"
    if type(error) is KeyError and _raised_by(error) in ("_upgrade_state_dict", "load_checkpoint"):
        return f"the checkpoint has no entry {error.args[0]!r}, which training saves; start from a whole checkpoint"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"a text file is not UTF-8 ({error}); convert it, with iconv for example"
    told = isinstance(error, _TOLD) or type(error) is Exception
    if told and error.args and _raised_by_fairseq(error):
        return str(error)
    if isinstance(error, FileExistsError) and error.args:
        return f"{error.args[0]}: exists already; remove it or give another folder"
    if isinstance(error, OSError) and len(error.args) == 1:
        return str(error)
    if isinstance(error, (OmegaConfBaseException, HydraException)):
        return _of_configuration(error)
    option = _parsed_option(error)
    if option is not None:
        return f"{option}: not a value of this option ({error})"
    if isinstance(error, torch.multiprocessing.ProcessRaisedException):
        for kind, meaning in ((UserError, str), (FloatingPointError, _not_finite)):
            found = re.findall(rf"^(?:[\w.]+\.)?{kind.__name__}: (.*)$", str(error), re.MULTILINE)
            if found:
                return meaning(found[-1])
    return None


def _of_configuration(error: BaseException) -> str:
    """Return the lines of an error of hydra or omegaconf and its cause that say something about the options, as one."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = dict.fromkeys(line.strip().rstrip(".") for line in text.splitlines())
    told = [line for line in lines if line and not re.match(r"reference_type=|object_type=|See https:", line)]
    return f"the configuration is not valid: {'; '.join(told)}"


def _raised_by_fairseq(error: BaseException) -> bool:
    """Return whether a function of fairseq itself raised ``error``, so that its message is about the options."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not {"fairseq", "fairseq_cli"}.isdisjoint(Path(frames[-1].filename).parts)


def _parsed_option(error: BaseException) -> str | None:
    """Return option and value where ``error`` was raised while argparse converted a value, else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_get_value" and frame.f_code.co_filename == argparse.__file__:
            return f"{frame.f_locals['action'].option_strings[-1]} {frame.f_locals['arg_string']}"
    return None


def _raised_by(error: BaseException) -> str | None:
    """Return the name of the function that raised ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name if frames else None


def _not_finite(message: str) -> str:
    return (
        f"training stopped, the loss or its gradient is not finite ({message}): lower --lr, set --clip-norm or look at "
        "the data; the checkpoints are those from before, crash.pt holds the state that failed"
    )

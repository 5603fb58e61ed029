"""Checkpoint files: never left half written by a kill or a full disk, read without running code from them."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fairseq_plugin.errors import UserError
from fairseq_plugin.save_dir import TEMPORARY_PREFIX

logger = logging.getLogger(__name__)

State = dict[str, Any]


class DamagedCheckpoint(UserError):
    """A checkpoint file that is truncated, overwritten or otherwise not whole."""


def write(state: State, path: str) -> None:
    """Write ``state`` to ``path`` so that the name holds the old file or the new one, whole, whatever happens.

    Raises:
        UserError: the disk is full or the folder cannot be written; ``path`` and every other file are as before.
    """
    with _replacing(path) as stream:
        torch.save(state, stream)


def copy(source: str, target: str) -> None:
    """Copy ``source`` to ``target`` with the promises of :func:`write`.

    A hard link would be quicker, but plain fairseq, should it go on in the same folder, overwrites
    ``checkpoint_last.pt`` in place and would so change the file it is linked to.
    """
    with _replacing(target) as stream, open(source, "rb") as original:
        shutil.copyfileobj(original, stream, 1 << 24)


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[IO[bytes]]:
    target = Path(path)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}.{target.name}")
    errors: list[OSError] = []
    try:
        with open(temporary, "wb") as file:
            yield _KeepsError(file, errors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        # torch's writer turns an error of the stream into a RuntimeError of its own.
        reason = errors[0] if errors else error
        if not isinstance(reason, OSError):
            raise
        raise UserError(
            f"{path}: cannot be written ({reason.strerror or reason}); the checkpoints written before are whole: make "
            "room or choose another --save-dir, then start the same command again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class _KeepsError:
    """The part of a binary file that torch.save and shutil need, remembering the first error of a write."""

    def __init__(self, file: IO[bytes], errors: list[OSError]) -> None:
        self._file = file
        self._errors = errors

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._errors.append(error)
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut; file systems that cannot are left as they are."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | IO[bytes], mmap: bool = False) -> State:
    """Load a checkpoint to the CPU; only tensors, containers, numbers and :func:`allowed_types` come to life.

    mmap: leave the tensors on the disk until they are used, where the file's format allows it; only for a path.

    Raises:
        DamagedCheckpoint: the file is not a whole checkpoint.
        UserError: there is no such file, or it holds a type that is not allowed.
    """
    name = path if isinstance(path, str) else getattr(path, "name", "checkpoint")
    try:
        with torch.serialization.safe_globals(allowed_types()):
            mmap = mmap and zipfile.is_zipfile(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such checkpoint") from error
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from error
    except pickle.UnpicklingError as error:
        refused = re.search(r"nsupported (?:global: )?GLOBAL (\w+(?:\.\w+)*) ", str(error))
        if refused is None:
            raise _damaged(name) from error
        raise UserError(
            f"{name}: holds {refused[1]}, which is no type of a fairseq checkpoint, and is not loaded; if you trust "
            "the file, write it again without that object"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(name) from error
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"{name}: not a fairseq checkpoint, it has no entry 'model'")
    return state


def _damaged(name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{name}: not a whole checkpoint, its {os.path.getsize(name)} bytes are cut off or overwritten"
    )


def allowed_types() -> list[Callable[..., Any]]:
    """Return the types beyond torch's own that fairseq versions since 0.9 put into checkpoints.

    Options are an ``argparse.Namespace`` or an OmegaConf tree, meters hold numpy numbers, some tasks keep a dictionary.
    None of them runs code that the file brings along.
    """
    import typing

    from fairseq.data import Dictionary
    from numpy._core import multiarray
    from omegaconf import base, dictconfig, listconfig, nodes

    return [
        argparse.Namespace,
        collections.defaultdict,
        *(bool, int, float, str, dict, list, tuple, set),
        np.ndarray,
        np.dtype,
        multiarray._reconstruct,
        multiarray.scalar,
        (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        (multiarray.scalar, "numpy.core.multiarray.scalar"),
        *(kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")),
        Dictionary,
        typing.Any,
        base.Metadata,
        base.ContainerMetadata,
        dictconfig.DictConfig,
        listconfig.ListConfig,
        *(getattr(nodes, name) for name in ("AnyNode", "IntegerNode", "FloatNode", "StringNode", "BooleanNode")),
    ]


_TRAINING_STATE = re.compile(r"checkpoint(_best|_\d+_\d+|\d+|_last|\.best_.+)?(.*)\.pt")


def newest_whole(save_dir: str, suffix: str = "", besides: Sequence[str] = ()) -> str | None:
    """Return the path of the whole checkpoint with the most updates in ``save_dir``, or None.

    suffix: fairseq's ``--checkpoint-suffix``; besides: paths not to consider. Tensors are not read, so a file whose
    bytes were changed in place can still turn out damaged when it is loaded.
    """
    found: list[tuple[int, str]] = []
    for name in sorted(os.listdir(save_dir) if os.path.isdir(save_dir) else ()):
        match = _TRAINING_STATE.fullmatch(name)
        path = os.path.join(save_dir, name)
        if match is None or match[2] != suffix or path in besides:
            continue
        with contextlib.suppress(UserError):
            found.append((updates(read(path, mmap=True)), path))
    return max(found)[1] if found else None


def updates(state: State) -> int:
    """Return the number of updates the run of ``state`` had done; 0 for files from before fairseq counted them."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))

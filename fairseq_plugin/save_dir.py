"""The folder checkpoints go to: writable, and written to by one run only."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
from pathlib import Path

from fairseq_plugin.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = ".ls_train.lock"
# A file under this prefix is being written; whoever holds the lock may remove what a killed run left.
TEMPORARY_PREFIX = ".ls_train.tmp."

_writes = True
_held: dict[tuple[int, Path], int] = {}


def expect_writes(writes: bool) -> None:
    """Say whether this run will write checkpoints; with ``--no-save`` the folder is neither locked nor tried."""
    global _writes
    _writes = writes


def prepare(save_dir: str) -> None:
    """Create ``save_dir``, check that files can be written there, and hold its lock until the process ends.

    Files that a killed run was writing are removed. Takes the place of
    ``fairseq.checkpoint_utils.verify_checkpoint_directory``, which rank 0 calls before anything is built.

    Raises:
        UserError: the folder cannot be created or written, or another process holds its lock.
    """
    if not _writes or "://" in save_dir:
        return
    try:
        os.makedirs(save_dir, exist_ok=True)
        with tempfile.TemporaryFile(prefix=TEMPORARY_PREFIX, dir=save_dir):
            pass
    except OSError as error:
        raise UserError(
            f"--save-dir {save_dir}: cannot write there ({error.strerror}); choose a folder you may write to"
        ) from error
    lock(save_dir)
    for leftover in Path(save_dir).glob(TEMPORARY_PREFIX + "*"):
        leftover.unlink(missing_ok=True)


def lock(save_dir: str) -> None:
    """Take the lock of ``save_dir`` for the rest of this process; again in the same process it does nothing.

    It is a POSIX record lock: the kernel frees it when the process dies, however it dies, and children forked from it
    (the data loader's workers outlive a killed parent by seconds) do not hold it, as they would a ``flock``. It also
    works across machines on NFS. The file stays behind and means nothing by itself.

    Raises:
        UserError: another process holds it; the message names the folder and the process.
    """
    folder = Path(save_dir).resolve()
    if (os.getpid(), folder) in _held:
        return
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning(f"--save-dir {save_dir} cannot be locked ({error.strerror}): see that no other run uses it")
            return
        raise UserError(
            f"--save-dir {save_dir} is in use by {holder}: wait for that run, stop it, or give this run a --save-dir "
            "of its own"
        ) from error
    # Closing any descriptor of the file would free the lock, so this one stays open and nothing else opens the file.
    _held[os.getpid(), folder] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

"""Forks of this process in the place of new interpreters: what it has imported, torch and fairseq, is there at once."""

from __future__ import annotations

import gc
import logging
import os
import runpy
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, NoReturn


def fork(function: Callable[[], object], stdin: int, stdout: int, stderr: int) -> int:
    """Run ``function`` in a fork and return its pid; the fork leads a process group and ends as an interpreter would.

    Args:
        function: called without arguments; its integer result, or that of ``SystemExit``, is the exit code.
        stdin: descriptor that becomes the fork's standard input, and so on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(function, stdin, stdout, stderr)
    return pid


def wait(pid: int, limit: float | None) -> int | None:
    """Return the exit code of a fork, or None if it has not ended after ``limit`` seconds."""
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], limit)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


def _run(function: Callable[[], object], stdin: int, stdout: int, stderr: int) -> NoReturn:
    # Garbage of the parent may own threads that do not exist here; the fork leaves it alone.
    gc.freeze()
    code = 1
    try:
        os.setsid()
        for descriptor, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(descriptor, target)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r"), os.fdopen(1, "w"), os.fdopen(2, "w")
        _fresh_logging()
        code = _exit_code(function)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(function: Callable[[], object]) -> int:
    try:
        result = function()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return result if isinstance(result, int) else 0


def _fresh_logging() -> None:
    """Configure logging as ``fairseq_cli.train`` does on import, on this process's own stdout."""
    for handler in list(logging.root.handlers):
        logging.root.removeHandler(handler)
    logging.basicConfig(format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", level="INFO", stream=sys.stdout)


class ForkedPython:
    """What the benchmarks use of ``subprocess.Popen``, for Python programs.

    Args:
        command: the interpreter, ``-c`` and a program or ``-m`` and a module, and its arguments.
        stdin: ``subprocess.PIPE`` or ``subprocess.DEVNULL``.
        stdout: file for standard output and standard error.
        env: the whole environment.
        options: others of ``subprocess.Popen``, with the values that the benchmarks give.
    """

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: IO[str], env: Mapping[str, str], **options: object
    ) -> None:
        assert options.items() <= {"stderr": subprocess.STDOUT, "start_new_session": True, "text": True}.items()
        kind, program, *arguments = command[1:]
        reads, writes = os.pipe()

        def run() -> None:
            os.close(writes)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [kind, *arguments]
            if kind == "-c":
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)

        self.pid = fork(run, reads, stdout.fileno(), stdout.fileno())
        os.close(reads)
        self.stdin = os.fdopen(writes, "w")
        if stdin == subprocess.DEVNULL:
            self.stdin.close()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the program has not ended after ``timeout`` seconds.
        """
        if self.returncode is None:
            self.returncode = wait(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            self.returncode = wait(self.pid, 0)
        return self.returncode


SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPython})
"""In the place of the module ``subprocess`` in a benchmark."""

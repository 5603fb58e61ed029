"""Processes that are made ready together and then measured one after another.

Importing torch and fairseq, building a model and compiling take ten seconds to minutes and any number of processes can
do it at a time; a measurement must be alone. A process prints :data:`READY` when everything before the measurement is
done, and waits for a line on its standard input.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

READY = "ready to be measured"
RESULT = "measured:"
_POLL_SECONDS = 0.05


_Key = TypeVar("_Key", bound=Hashable)


def wait_for_go() -> None:
    """Say that this process is ready, and wait until it may be measured; called by the process itself."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("not measured: whoever started this process has gone")


def results_in(output: str) -> list[Any]:
    """Return what a process printed in JSON on the lines that start with :data:`RESULT`."""
    return [json.loads(line) for line in re.findall(rf"^{RESULT} (.*)$", output, re.M)]


class Prepared:
    """A Python program in a process group of its own, whose output goes to a file.

    Use as a context manager: at the end the whole group is killed.

    Args:
        arguments: for the interpreter, for example ``["-m", "module", "--flag"]``.
        environment: variables in addition to those of this process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.NamedTemporaryFile("w+", suffix=".log", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """Everything the process has printed so far."""
        return Path(self._output.name).read_text(errors="replace")

    def wait_ready(self, limit: float) -> None:
        """Wait until the process is ready.

        Raises:
            RuntimeError: it ended, or was not ready within ``limit`` seconds and was killed.
        """
        end = time.monotonic() + limit
        while READY not in self.output:
            if self._process.poll() is not None:
                raise RuntimeError(f"ended with code {self._process.returncode} before it was ready:\n{self._tail()}")
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"not ready after {limit:.0f} seconds:\n{self._tail()}")
            time.sleep(_POLL_SECONDS)

    def go(self) -> None:
        """Let a process that is ready go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def finish(self, limit: float) -> str:
        """Wait for the end and return all output.

        Raises:
            RuntimeError: it failed, or had not ended after ``limit`` seconds and was killed.
        """
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"killed after {limit:.0f} seconds:\n{self._tail()}") from None
        if code != 0:
            raise RuntimeError(f"ended with code {code}:\n{self._tail()}")
        return self.output

    def kill(self) -> None:
        """End the process and those it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tail(self) -> str:
        return self.output[-2000:]


def in_turn(
    runs: Mapping[_Key, Sequence[Prepared]], limit: float, start_limit: float
) -> Iterator[tuple[_Key, list[str]]]:
    """Wait until all are ready, then let one run after the other go; yield its key and the outputs of its processes.

    While the caller has the control nothing runs. A run that fails or takes too long is printed and left out.

    Args:
        runs: the processes of each run, one a rank.
        limit: seconds a run may take once it goes.
        start_limit: seconds until all must be ready.
    """
    end = time.monotonic() + start_limit
    ready = []
    for key, processes in runs.items():
        try:
            for process in processes:
                process.wait_ready(max(0.0, end - time.monotonic()))
            ready.append(key)
        except RuntimeError as error:
            _give_up(key, processes, error)
    for key in ready:
        try:
            for process in runs[key]:
                process.go()
            outputs = [process.finish(limit) for process in runs[key]]
        except (RuntimeError, OSError) as error:
            _give_up(key, runs[key], error)
            continue
        yield key, outputs


def _give_up(key: Hashable, processes: Sequence[Prepared], error: Exception) -> None:
    print(f"{key}: {error}", flush=True)
    for process in processes:
        process.kill()

"""Ports at which the ranks of one host meet."""

from __future__ import annotations

import contextlib
import random
import socket

from fairseq_plugin.errors import UserError

_FIRST, _END = 10000, 32768  # from there on Linux gives ports to outgoing connections, by default
_TRIES = 100


def free_port() -> int:
    """Return a TCP port that nothing on this host uses, and that no outgoing connection gets.

    Raises:
        UserError: none was found.
    """
    for port in random.SystemRandom().sample(range(_FIRST, _END), _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise UserError(f"no port for the ranks to meet: {_TRIES} below {_END} are in use; pass --distributed-port")

"""The socket on which the ranks of one run find each other: on loopback, at a free port unless one is asked for."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from phalanx.errors import InputError

_LISTENING = "0A"  # net/tcp_states.h


def listen(port: str | None) -> socket.socket:
    """A listening socket on loopback, at `port` or, if None, at a free one.

    Raises InputError, naming the holder if the system shows it, if the port is in use or not a port.
    """
    number = 0 if port is None else parse_port(port)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", number))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise InputError(f"cannot listen on port {number}: {error.strerror}", where="MASTER_PORT") from error
        raise in_use(number) from error
    return listener


def parse_port(text: str) -> int:
    """A port number from 1 to 65535. Raises InputError for anything else."""
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise InputError(f"'{text}' is not a port", where="MASTER_PORT", instead="give a number from 1 to 65535")
    return int(text)


def in_use(port: int) -> InputError:
    """The error that says who holds `port`."""
    holder = _holder(port)
    return InputError(
        f"port {port} is in use" + (f" by {holder}" if holder else ""),
        where="MASTER_PORT",
        instead="leave MASTER_PORT unset to have a free port chosen, set another one, or end that process",
    )


def _holder(port: int) -> str | None:
    """As `process 4711 (python3)`, of the process that listens on `port`; None where the system does not show it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in sockets:
                process = descriptor.parent.parent
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # another user's process, or one that has just ended
            continue
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    inodes.add(rest[5])
    return inodes

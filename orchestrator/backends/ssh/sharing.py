"""One connection to a host for all commands of a user: a master process of the system's ssh, which
outlives the command that logs in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import make_private_folder

#: Flags of every connection: a host that does not answer ends it within a minute and a quarter.
KEEP_ALIVE_FLAGS = (
    "-o",
    "ConnectTimeout=20",
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=4",
)
#: Seconds for which the connection stays open without a command that uses it.
_PERSIST_S = 300
#: Seconds within which a master that works answers whether it does.
_CHECK_S = 5.0
#: Bytes of a socket's path, without the final zero, that every system takes.
_LONGEST_SOCKET = 103
#: ssh names the socket by a hash in hex (%C), and gives it a random suffix while it makes it.
_SOCKET_NAME = 1 + 40 + 17
#: Paths that need no quotes in an option of ssh.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@-]+")


def sockets_folder(home: Path) -> Path:
    """Returns the folder of the sockets by which commands reach the master. `home`: orch's home."""
    return home / "ssh"


def sharing_flags(host: str, folder: Path) -> list[str]:
    """Returns flags with which ssh uses the shared connection, which is opened first if there is
    none. Returns none where connections cannot be shared, or where the user's configuration of ssh
    already says how they are.

    Raises OrchError: 76 if the host cannot be reached, 78 if others may write to `folder`.
    """
    is_short = len(os.fsencode(folder)) + _SOCKET_NAME <= _LONGEST_SOCKET
    if not is_short or not _PLAIN_PATH.fullmatch(str(folder)) or _has_own_sharing(host):
        return []
    make_private_folder(folder)
    flags = ["-o", f"ControlPath={folder}/%C"]
    try:
        with _locked(folder / f"{host}.lock"):
            if _is_open(host, flags):
                return flags
            _try_socket(folder)
            _open(host, flags)
    except (OSError, subprocess.TimeoutExpired):  # no sockets here, or a master that was stopped
        return []
    return flags


def _has_own_sharing(host: str) -> bool:
    """Whether the user's configuration names a socket for this host, or cannot be read."""
    argv = ["ssh", "-G", "--", host]
    settings = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    return settings.returncode != 0 or b"\ncontrolpath " in settings.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one command at a time open the connection; the others then find it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_open(host: str, flags: list[str]) -> bool:
    """Whether a master answers. Raises TimeoutExpired if it neither answers nor is gone."""
    null = subprocess.DEVNULL
    argv = ["ssh", *flags, "-O", "check", "--", host]
    check = subprocess.run(
        argv,
        stdin=null,
        stdout=null,
        stderr=null,
        timeout=_CHECK_S,
    )
    return check.returncode == 0


def _try_socket(folder: Path) -> None:
    """Raises OSError where the file system does not have what ssh needs: sockets, and links to
    them."""
    probe = folder / f".{os.urandom(8).hex()}"
    link = probe.with_suffix(".link")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
        os.link(probe, link)
    finally:
        probe.unlink(missing_ok=True)
        link.unlink(missing_ok=True)


def _open(host: str, flags: list[str]) -> None:
    """Logs in, and leaves a master in the background. Raises OrchError (76)."""
    argv = ["ssh", "-N", "-f", *KEEP_ALIVE_FLAGS, *flags]
    argv += ["-o", "ControlMaster=auto", "-o", f"ControlPersist={_PERSIST_S}"]
    argv += ["-o", "ClearAllForwardings=yes", "--", host]
    with _errors() as errors:
        login = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        if errors:
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="backslashreplace"))
    if login.returncode:
        raise OrchError(
            f"ssh {host} cannot reach the host (exit code {login.returncode})", Exit.CAPACITY
        )


@contextlib.contextmanager
def _errors() -> Iterator[IO[bytes] | None]:
    """Yields a file for the messages of the login, or None if they go to a terminal.

    The master of OpenSSH before 8.5 keeps its standard error. Whoever reads this command's errors
    through a pipe would wait for the master's end.
    """
    if os.isatty(2):
        yield None
        return
    with tempfile.TemporaryFile() as file:
        yield file

"""A conversation with the orch of another host: one process of the system's ssh, which lives as
long as this command, over a connection that may outlive it (`sharing`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from orchestrator import __version__
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.start import BY_NAME

from . import wire
from .sharing import KEEP_ALIVE_FLAGS, sharing_flags

#: A host as ssh takes it; its user, port and keys are for ~/.ssh/config, or `user@host`.
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}")
#: The interpreter with orch on the host, absolute or relative to the home folder. No shell needs
#: quotes for it.
PYTHON = re.compile(r"(~/)?[A-Za-z0-9_./+-]{1,400}")
_NOISE = 1 << 20  # bytes that a login shell may print before orch answers
#: Lets ssh ignore the terminal's Ctrl-C, which would end it in the middle of an answer. It ends
#: when this process closes its pipe.
_IGNORING_CTRL_C = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


class ConnectionLost(OrchError):
    """The connection was lost before the host answered, which may or may not have acted."""


class _Unreachable(OrchError):
    """ssh has not come as far as to start orch on the host."""


class Session:
    """Starts ssh at the first `ask`. OrchError (65) for an invalid host or interpreter.

    ssh ends with `close`, with the last reference to the session, or with this process.

    `sockets`: the folder by which commands share a connection; None: they do not. Several threads
    may ask; each waits for the answer of the one before.
    """

    def __init__(
        self,
        host: str,
        python: str,
        sockets: Path | None = None,
    ):
        if not HOST.fullmatch(host):
            raise OrchError(
                f"backend.options.ssh={host!r} is not a host as ssh takes it", Exit.CONFIG
            )
        if not PYTHON.fullmatch(python) or ".." in python.split("/"):
            raise OrchError(
                f"backend.options.ssh_python={python!r} is not the path of an interpreter",
                Exit.CONFIG,
            )
        self.host = host
        self.python = python
        self._sockets = sockets
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: wire.Question, payload: bytes = b"") -> tuple[wire.Answer, bytes]:
        """Sends a question; returns the answer with its payload.

        OrchError: what the other side refuses, with its exit code; 64 for a question with text
        that is not UTF-8; 76 when the host does not answer, as ConnectionLost (76) when it may
        have received the question.
        """
        with self._lock:
            answer = self._ask(question, payload)
        if isinstance(answer[0], wire.Refused):
            codes = {int(code): code for code in Exit}
            raise OrchError(
                f"{self.host}: {answer[0].message}",
                codes.get(answer[0].exit, Exit.INTERNAL),
            )
        return answer

    def _ask(self, question: wire.Question, payload: bytes) -> tuple[wire.Answer, bytes]:
        try:
            encoded = wire.encode(question)
        except UnicodeEncodeError:  # its message would show the text, which may be a secret
            raise OrchError(
                f"ssh {self.host}: an argument or a path is not UTF-8 and cannot be sent",
                Exit.USAGE,
            ) from None
        process = self._process or self._start()
        assert process.stdin and process.stdout
        try:
            wire.write(process.stdin, encoded, payload)  # type: ignore[arg-type]
            answer = wire.read_answer(process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            self.close()
            raise ConnectionLost(
                f"ssh {self.host}: the connection was lost ({error})", Exit.CAPACITY
            ) from None
        except BaseException:  # the next answer would be that of this question
            self.close()
            raise
        if answer is None:
            raise ConnectionLost(
                f"ssh {self.host}: the connection was lost ({self._close_and_describe_exit()})",
                Exit.CAPACITY,
            )
        return answer

    def close(self) -> None:
        """Closes the connection; the process on the host ends with its standard input."""
        if self._process is not None:
            self._process = None
            self._finalizer()

    def _start(self) -> subprocess.Popen[bytes]:
        if shutil.which("ssh") is None:
            raise OrchError("ssh cannot be started: it is not on PATH", Exit.CAPACITY)
        flags = sharing_flags(self.host, self._sockets) if self._sockets else []
        if flags:
            with suppress(_Unreachable):  # the master has died; ssh has printed how
                return self._connect(flags)
        return self._connect([])

    def _connect(self, sharing: list[str]) -> subprocess.Popen[bytes]:
        # A login shell, because a site sets PATH and modules there. The line holds no text of a
        # user that would need quotes.
        shell_line = f"exec sh -lc 'exec {self.python} -P {' '.join(BY_NAME)} {wire.MODULE}'"
        argv = ["ssh", "-T", *KEEP_ALIVE_FLAGS, *sharing, "--", self.host, shell_line]
        # An ssh that uses a master asks for no password, and heeds Ctrl-C whatever it inherits: it
        # gets no terminal.
        process = subprocess.Popen(
            argv if sharing else [*_IGNORING_CTRL_C, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=bool(sharing),
        )
        self._finalizer = weakref.finalize(self, _end, process)
        self._process = process
        assert process.stdout
        bytes_read = 0
        while output_line := process.stdout.readline():
            bytes_read += len(output_line)
            if output_line.startswith(wire.GREETING):
                return self._check_version(output_line, process)
            if bytes_read > _NOISE:
                break
        code = self._close_and_describe_exit()
        if code.endswith(" 255"):  # ssh's own exit code; ssh has printed the reason
            raise _Unreachable(f"ssh {self.host} cannot reach the host ({code})", Exit.CAPACITY)
        advice = "install the same version there, or set backend.options.ssh_python=PATH"
        raise OrchError(
            f"{self.host} has no orch under {self.python} ({code}): {advice}", Exit.CAPACITY
        )

    def _check_version(
        self,
        greeting: bytes,
        process: subprocess.Popen[bytes],
    ) -> subprocess.Popen[bytes]:
        versions = greeting.removeprefix(wire.GREETING).decode(errors="replace").split()
        if versions[:1] == [str(wire.VERSION)]:
            return process
        self.close()
        host_version = versions[1] if len(versions) > 1 else "another version"
        raise OrchError(
            f"{self.host} has orch {host_version}, this is {__version__}: install the same there",
            Exit.CAPACITY,
        )

    def _close_and_describe_exit(self) -> str:
        process = self._process
        self.close()
        return f"exit code {process.returncode}" if process else "it was closed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipes of ssh, which then ends; kills it if it does not."""
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            stream and stream.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

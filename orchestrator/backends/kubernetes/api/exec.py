"""A command in a running pod, over a WebSocket: `pods/exec`, as `kubectl exec -i` does it.

RFC 6455, and the subprotocols v5.channel.k8s.io and v4.channel.k8s.io: the first byte of a message is its channel
(https://pkg.go.dev/k8s.io/apimachinery/pkg/util/remotecommand). The right that it needs: get and create on pods/exec.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode, urlsplit

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api_errors import complaint, unreachable

_CONNECT_S = 10.0
_PROTOCOLS = "v5.channel.k8s.io, v4.channel.k8s.io"
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_STDIN, _STDOUT, _STDERR, _ERROR, _END = 0, 1, 2, 3, 255
_LONGEST = 1 << 20


class Command:
    """One that runs in the pod until it ends by itself, or `close` ends its standard input."""

    def __init__(
        self,
        host: str,
        path: str,
        argv: Sequence[str],
        container: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        server_name: str = "",
    ):
        """`path`: of the pod. OrchError as of every request: 76 unreachable or gone, 78 without the right."""
        self.errors = b""  # what it has written to its standard error
        self._said, self._status = b"", b""
        query = [("command", word) for word in argv]
        query += [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        at = urlsplit(host)
        try:
            self._socket = _connect(at.hostname, at.port or (443 if tls else 80), tls, server_name)
        except OSError as error:
            raise unreachable(host, error) from None
        try:
            target = f"{at.path}{path}/exec?{urlencode(query)}"
            self._answer = _upgrade(self._socket, at.netloc, target, headers)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError | http.client.HTTPException):
                raise unreachable(host, error) from None
            raise

    @property
    def _hears_ends(self) -> bool:
        return self._answer.headers.get("Sec-WebSocket-Protocol", "").startswith("v5")

    def line(self, timeout_s: float) -> bytes:
        """The first line of its output, b"" when it ends without one. OrchError (76) when it takes too long."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._said and self._hear(end - time.monotonic()):
            pass
        return self._said.partition(b"\n")[0]

    def complaint(self) -> OrchError:
        """Why it ended without a word."""
        text = self.errors.decode(errors="replace").strip().splitlines()
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(self._status or b"{}", type=dict)
            text += [str(found.get("message", ""))]
        return OrchError(
            f"exec into the pod: {' '.join(' '.join(text[-2:]).split())[:400] or 'no word'}", Exit.CAPACITY
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """End its standard input, and wait for it to leave. May be called again."""
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError, OrchError):
            if self._hears_ends:  # else its input ends with the connection
                self._send(_BINARY, bytes([_END, _STDIN]))
                end = time.monotonic() + timeout_s
                while self._hear(end - time.monotonic()):
                    pass
            self._send(_CLOSE, struct.pack(">H", 1000))
        self._answer.close()
        self._socket.close()

    # ---------------------------------------------------------------------------------- frames

    def _hear(self, timeout_s: float) -> bool:
        """One message; False when it was the last one."""
        self._socket.settimeout(max(0.01, timeout_s))
        try:
            kind, content = self._message()
        except TimeoutError:
            raise OrchError("exec into the pod: no answer in time", Exit.CAPACITY) from None
        except (OSError, EOFError):
            return False
        if kind == _CLOSE:
            return False
        if kind == _PING:
            self._send(_PONG, content)
        elif content[:1] == bytes([_STDOUT]):
            self._said += content[1:]
        elif content[:1] == bytes([_STDERR]):
            self.errors = (self.errors + content[1:])[-_LONGEST:]
        elif content[:1] == bytes([_ERROR]):
            self._status = content[1:]
            return False
        return True

    def _message(self) -> tuple[int, bytes]:
        kind, content, last = 0, b"", False
        while not last:
            first, second = self._read(2)
            size = second & 0x7F
            if size > 125:
                (size,) = struct.unpack(">H" if size == 126 else ">Q", self._read(2 if size == 126 else 8))
            if size > _LONGEST:
                raise EOFError
            content += self._read(size)
            kind, last = kind or first & 0x0F, bool(first & 0x80)
        return kind, content

    def _read(self, size: int) -> bytes:
        found = self._answer.fp.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def _send(self, kind: int, content: bytes) -> None:
        """Short ones alone; what a client sends is masked."""
        mask = os.urandom(4)
        hidden = bytes(byte ^ mask[index % 4] for index, byte in enumerate(content))
        self._socket.sendall(bytes([0x80 | kind, 0x80 | len(content)]) + mask + hidden)


def _connect(host: str, port: int, tls: ssl.SSLContext | None, server_name: str) -> socket.socket:
    found = socket.create_connection((host, port), timeout=_CONNECT_S)
    return tls.wrap_socket(found, server_hostname=server_name or host) if tls else found


def _upgrade(sock: socket.socket, host: str, target: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """The answer; its `fp` is what the server sends from now on."""
    connection = http.client.HTTPConnection(host)
    connection.sock = sock
    ours = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13", "User-Agent": "orch"}
    ours |= {"Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(), "Sec-WebSocket-Protocol": _PROTOCOLS}
    connection.request("GET", target, headers={**ours, **headers})
    answer = connection.getresponse()
    if answer.status != 101:
        raise complaint(answer.status, answer.read().decode(errors="replace"))
    return answer

"""Runs a command in a running pod: `pods/exec`, as `kubectl exec -i` does it, by the kubernetes
package's own client.

It needs the permissions get and create on pods/exec. The package takes 0.4 s to import, which only
drills pay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kubernetes.stream import ws_client
from websocket import WebSocketBadStatusException, WebSocketException

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api_errors import api_error, unreachable


class PodCommand:
    """A command that runs in the pod until it ends by itself, or `close` ends its standard
    input."""

    def __init__(
        self,
        settings: Any,
        pod_url: str,
        headers: Mapping[str, str],
        container: str,
        argv: Sequence[str],
    ):
        """Starts the command. `settings`: a kubernetes.client.Configuration. OrchError: 76 if the
        pod is unreachable or gone, 78 without the permission."""
        query = [("command", list(argv)), ("container", container)]
        query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
        url = ws_client.get_websocket_url(f"{pod_url}/exec", query)
        try:
            self._socket = ws_client.WSClient(
                settings,
                url,
                headers,
                capture_all=False,
                binary=True,
            )
        except WebSocketBadStatusException as error:
            body = (error.resp_body or b"").decode(errors="replace")
            raise api_error(error.status_code, body) from None
        except (OSError, WebSocketException) as error:
            raise unreachable(pod_url, error) from None

    def line(self, timeout_s: float) -> bytes:
        """Returns the first line of its output, b"" if it ends without one. OrchError (76) if it
        takes too long."""
        end = time.monotonic() + timeout_s
        line = b""
        with contextlib.suppress(OSError, WebSocketException):  # the connection has ended
            line = self._socket.readline_stdout(timeout_s)
        if not line and time.monotonic() >= end:
            raise OrchError("exec into the pod: no answer in time", Exit.CAPACITY)
        # a line without a newline may have come with the connection's end
        return line or self._rest(ws_client.STDOUT_CHANNEL).partition(b"\n")[0]

    def failure(self) -> OrchError:
        """Explains why the command ended without a line of output."""
        raw = self._rest(ws_client.ERROR_CHANNEL)
        lines = self._rest(ws_client.STDERR_CHANNEL).decode(errors="replace").strip().splitlines()
        with contextlib.suppress(msgspec.MsgspecError):
            status = msgspec.json.decode(raw or b"{}", type=dict)
            lines.append(str(status.get("message", "")))
        reason = " ".join(" ".join(lines[-2:]).split())[:400] or "no output"
        return OrchError(f"exec into the pod: {reason}", Exit.CAPACITY)

    def _rest(self, channel: int) -> bytes:
        """Reads what has arrived on a channel, and waits a moment for it."""
        with contextlib.suppress(OSError, WebSocketException):
            return self._socket.read_channel(channel, timeout=1.0)
        return b""

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends its standard input and waits until it ends. May be called more than once."""
        with contextlib.suppress(OSError, WebSocketException):
            # in an older protocol its input ends only with the connection
            if self._socket.subprotocol == ws_client.V5_CHANNEL_PROTOCOL:
                self._socket.close_channel(ws_client.STDIN_CHANNEL)
                end = time.monotonic() + timeout_s
                while self._socket.is_open() and time.monotonic() < end:
                    self._socket.update(end - time.monotonic())
        self._socket.close()

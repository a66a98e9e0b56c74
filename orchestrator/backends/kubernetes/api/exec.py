"""A command in a running pod: `pods/exec`, as `kubectl exec -i` does it, by the kubernetes
package's own client.

The right that it needs: get and create on pods/exec. The package takes 0.4 s to import, which only
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
    """One that runs in the pod until it ends by itself, or `close` ends its standard input."""

    def __init__(
        self,
        settings: Any,
        pod_url: str,
        headers: Mapping[str, str],
        container: str,
        argv: Sequence[str],
    ):
        """`settings`: a kubernetes.client.Configuration. OrchError: 76 unreachable or gone, 78
        without the right."""
        query = [("command", list(argv)), ("container", container)]
        query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
        url = ws_client.get_websocket_url(f"{pod_url}/exec", query)
        try:
            self._socket = ws_client.WSClient(
                settings, url, headers, capture_all=False, binary=True
            )
        except WebSocketBadStatusException as error:
            raise api_error(
                error.status_code, (error.resp_body or b"").decode(errors="replace")
            ) from None
        except (OSError, WebSocketException) as error:
            raise unreachable(pod_url, error) from None

    def line(self, timeout_s: float) -> bytes:
        """The first line of its output, b"" when it ends without one. OrchError (76) when it takes
        too long."""
        end = time.monotonic() + timeout_s
        found = b""
        with contextlib.suppress(OSError, WebSocketException):  # it ends there
            found = self._socket.readline_stdout(timeout_s)
        if not found and time.monotonic() >= end:
            raise OrchError("exec into the pod: no answer in time", Exit.CAPACITY)
        return (
            found or self._rest(ws_client.STDOUT_CHANNEL).partition(b"\n")[0]
        )  # came with the connection's end

    def failure(self) -> OrchError:
        """Why it ended without a line of output."""
        raw = self._rest(ws_client.ERROR_CHANNEL)
        text = self._rest(ws_client.STDERR_CHANNEL).decode(errors="replace").strip().splitlines()
        with contextlib.suppress(msgspec.MsgspecError):
            text += [str(msgspec.json.decode(raw or b"{}", type=dict).get("message", ""))]
        why = " ".join(" ".join(text[-2:]).split())[:400] or "no output"
        return OrchError(f"exec into the pod: {why}", Exit.CAPACITY)

    def _rest(self, channel: int) -> bytes:
        """What has come on a channel and was not read; waits a moment for it."""
        with contextlib.suppress(OSError, WebSocketException):
            return self._socket.read_channel(channel, timeout=1.0)
        return b""

    def close(self, timeout_s: float = 10.0) -> None:
        """End its standard input, and wait for it to leave. May be called again."""
        with contextlib.suppress(OSError, WebSocketException):
            if (
                self._socket.subprotocol == ws_client.V5_CHANNEL_PROTOCOL
            ):  # else its input ends with the connection
                self._socket.close_channel(ws_client.STDIN_CHANNEL)
                end = time.monotonic() + timeout_s
                while self._socket.is_open() and time.monotonic() < end:
                    self._socket.update(end - time.monotonic())
        self._socket.close()

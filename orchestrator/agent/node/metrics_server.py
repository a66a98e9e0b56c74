"""Serves a node's metrics page over HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from .metrics import NodeMetrics

_REQUEST_S = 5.0
_MAX_CONNECTIONS = 64  # a further one closes the oldest
_READ_LIMIT = 1 << 14  # bytes of a request
_RESPONSE = (
    "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\nConnection:"
    " close\r\n\r\n"
)


async def serve(
    metrics: NodeMetrics,
    host: str,
    port: int,
    fd: int | None = None,
    targets: Path | None = None,
) -> asyncio.Server:
    """Serves GET /metrics on `host`:`port`, and GET /targets for Prometheus's http_sd.

    Port 0, or a port that is taken, gives any free one. `fd` is a socket that listens already,
    perhaps in another network namespace; the server takes it over. `targets` is the file of the
    endpoints of all nodes, which exists on the coordinator's node. Raises OSError if `host` is not
    an address of this machine.
    """
    page = _Page(metrics.registry, targets)
    if fd is not None:
        listening = socket.socket(fileno=fd)
        return await asyncio.start_server(page.serve, sock=listening, limit=_READ_LIMIT)
    try:
        return await asyncio.start_server(page.serve, host, port, limit=_READ_LIMIT)
    except OSError:
        if port == 0:
            raise
        return await asyncio.start_server(page.serve, host, 0, limit=_READ_LIMIT)


class _Page:
    def __init__(self, registry: CollectorRegistry, targets: Path | None):
        self._registry = registry
        self._targets = targets
        self._connections: dict[asyncio.StreamWriter, None] = {}  # oldest first

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request and closes the connection."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            with contextlib.suppress(
                OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
                writer.write(self._response(request.decode("latin-1")))
                await asyncio.wait_for(writer.drain(), _REQUEST_S)
        finally:
            self._connections.pop(writer, None)
            writer.close()

    def _response(self, request: str) -> bytes:
        request_line, *header_lines = request.split("\r\n")
        method, path, *_ = [*request_line.split(" "), "", ""]
        path = path.split("?")[0]
        status = "200 OK"
        kind = "text/plain"
        if path not in ("/metrics", "/targets"):
            status = "404 Not Found"
            body = b"see /metrics and /targets\n"
        elif method != "GET":
            status = "405 Method Not Allowed"
            body = b"GET only\n"
        elif path == "/targets":
            kind = "application/json"
            body = b"[]\n"
            if self._targets is not None and self._targets.exists():
                body = self._targets.read_bytes()
        else:
            encode, kind = choose_encoder(_header(header_lines, "accept"))
            body = encode(self._registry)
        return (
            _RESPONSE.format(
                status=status,
                kind=kind,
                size=len(body),
            ).encode()
            + body
        )


def _header(lines: list[str], name: str) -> str:
    pairs = [line.partition(":") for line in lines]
    headers = {key.strip().lower(): content.strip() for key, _, content in pairs}
    return headers.get(name, "")

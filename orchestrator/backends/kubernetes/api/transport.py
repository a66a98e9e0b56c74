"""HTTP requests to one API server over connections that urllib3 keeps open."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, InsecureRequestWarning, SSLError

from .api_errors import NoResponse

_CONNECT_S = 5.0
#: Uploads are given the time that they need at this rate; four may share a link.
_LEAST_BYTES_PER_S = 25_000
_CHUNK = 1 << 16
_IDLE_CONNECTIONS = 16  # as many as threads send requests at once


class Response:
    """A response whose status is known and whose body is still to be read. The caller reads it to
    its end, or closes it."""

    def __init__(self, response: urllib3.BaseHTTPResponse):
        self.status = response.status
        self._response = response

    def read(self) -> bytes:
        """Reads the whole body. NoResponse if the connection breaks first."""
        try:
            return self._response.read(decode_content=False)
        except (OSError, HTTPError) as error:
            self._response.close()
            raise _no_response(error) from None

    def chunks(self) -> Iterator[bytes]:
        """Yields the body as it arrives, until the server ends it or the connection breaks."""
        try:
            # ValueError: closed by another thread
            with contextlib.suppress(OSError, HTTPError, ValueError):
                while chunk := self._response.read1(_CHUNK, decode_content=False):
                    yield chunk
        finally:
            self._response.close()

    def close(self) -> None:
        self._response.close()


class Transport:
    """Sends requests to `host`: https://name:port, or http, perhaps with a path. Several threads
    may use it."""

    def __init__(self, host: str, pool: urllib3.PoolManager):
        self._host = host.rstrip("/")
        self._pool = pool

    def request(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        read_s: float | None,
    ) -> Response:
        """Sends a request. `target`: path and query. NoResponse if the server was not reached, or
        did not begin to answer within `read_s`."""
        # urllib3 holds sending to the limit for connecting
        connect_s = _CONNECT_S + len(body or b"") / _LEAST_BYTES_PER_S
        try:
            response = self._pool.urlopen(
                method,
                self._host + target,
                redirect=False,
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=connect_s, read=read_s),
                retries=False,
                preload_content=False,
            )
        except (OSError, HTTPError) as error:
            raise _no_response(error) from None
        return Response(response)


def connect(host: str, tls: ssl.SSLContext | None, server_name: str = "") -> Transport:
    """Opens a transport. `server_name`: the name in the server's certificate if that is not the
    host."""
    named: dict[str, Any] = {"server_hostname": server_name} if server_name else {}
    if tls and tls.verify_mode == ssl.CERT_NONE:
        # the kubeconfig wants it so: urllib3 would warn with every request
        urllib3.disable_warnings(InsecureRequestWarning)
    pool = urllib3.PoolManager(
        maxsize=_IDLE_CONNECTIONS,
        ssl_context=tls,
        **named,
    )
    return Transport(host, pool)


def _no_response(error: Exception) -> NoResponse:
    wrong_certificate = isinstance(error, SSLError) and "certificate" in str(error)
    return NoResponse(str(error) or type(error).__name__, permanent=wrong_certificate)

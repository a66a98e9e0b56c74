"""HTTP requests to one API server, over connections that urllib3 keeps open."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, InsecureRequestWarning, SSLError

from .api_errors import NoResponse

_CONNECT_S = 5.0
_CHUNK = 1 << 16
_KEPT = 16  # idle connections; more threads than this never ask at once


class Response:
    """One that has begun; `status` is known. To be read to its end, or closed."""

    def __init__(self, found: urllib3.BaseHTTPResponse):
        self.status = found.status
        self._found = found

    def read(self) -> bytes:
        """The whole body. NoResponse when the connection breaks first."""
        try:
            return self._found.read(decode_content=False)
        except (OSError, HTTPError) as error:
            self._found.close()
            raise _no_response(error) from None

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes, until the server ends it or the connection breaks."""
        try:
            with contextlib.suppress(
                OSError, HTTPError, ValueError
            ):  # ValueError: closed by another thread
                while chunk := self._found.read1(_CHUNK, decode_content=False):
                    yield chunk
        finally:
            self._found.close()

    def close(self) -> None:
        self._found.close()


class Transport:
    """`host`: https://name:port, or http, perhaps with a path. For use from several threads."""

    def __init__(self, host: str, pool: urllib3.PoolManager):
        urllib3.disable_warnings(
            InsecureRequestWarning
        )  # where the kubeconfig says so: one line a request
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
        """`target`: path and query. NoResponse: the server was not reached, or did not begin to
        answer in `read_s`."""
        times = urllib3.Timeout(connect=_CONNECT_S, read=read_s)
        how = {"body": body, "headers": headers, "timeout": times}
        try:
            found = self._pool.urlopen(
                method,
                self._host + target,
                redirect=False,
                retries=False,
                preload_content=False,
                **how,
            )
        except (OSError, HTTPError) as error:
            raise _no_response(error) from None
        return Response(found)


def connect(host: str, tls: ssl.SSLContext | None, server_name: str = "") -> Transport:
    """`server_name`: the one in the server's certificate where that is not the host."""
    named: dict[str, Any] = {"server_hostname": server_name} if server_name else {}
    return Transport(host, urllib3.PoolManager(maxsize=_KEPT, ssl_context=tls, **named))


def _no_response(error: Exception) -> NoResponse:
    return NoResponse(
        str(error) or type(error).__name__,
        isinstance(error, SSLError) and "certificate" in str(error),
    )

"""Requests to one API server, over connections that stay open. HTTP/1.1 by the standard library.

urllib3 does it too, but takes 75 ms to import where these modules take 32 (processor time, `python -c`, best of
eleven), of 170 for all of `orch submit`. Only through a proxy is it asked.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_CONNECT_S = 5.0
_CHUNK = 1 << 16


class Lost(Exception):
    """No answer, or not the whole of it. `hopeless`: nor will there be one to another try."""

    def __init__(self, error: Exception):
        super().__init__(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        self.hopeless = isinstance(error, ssl.SSLError) and "certificate" in str(error).lower()


class Answer:
    """One that has begun; `status` is known. To be read to its end, or closed."""

    def __init__(self, status: int, response: http.client.HTTPResponse, end: Callable[[bool], None]):
        self.status, self._response, self._end = status, response, end

    def read(self) -> bytes:
        """All of it."""
        whole = False
        try:
            content = self._response.read()
            whole = True
        except (OSError, http.client.HTTPException) as error:
            raise Lost(error) from None
        finally:
            self._end(whole)
        return content

    def chunks(self) -> Iterator[bytes]:
        """As they come, until the server ends it or the connection breaks."""
        try:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # closed by another thread
                while chunk := self._response.read1(_CHUNK):
                    yield chunk
        finally:
            self._end(False)

    def close(self) -> None:
        self._end(False)


class Pool:
    """`host`: https://name:port, or http. For use from several threads."""

    def __init__(self, host: str, tls: ssl.SSLContext | None, server_name: str = ""):
        self._at, self._tls, self._server_name = urlsplit(host), tls, server_name
        self._idle: list[_Connection] = []

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], read_s: float | None
    ) -> Answer:
        """Lost: the server was not reached, or did not begin to answer in `read_s`. `target`: path and query."""
        connection = self._take()
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(read_s)
            connection.request(method, self._at.path.rstrip("/") + target, body, dict(headers))
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Lost(error) from None

        def end(whole: bool) -> None:
            if whole and connection.sock is not None:
                self._idle.append(connection)
            else:
                response.close()
                connection.close()

        return Answer(response.status, response, end)

    def _take(self) -> _Connection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                at = self._at
                return _Connection(at.hostname or "", at.port, self._tls, self._server_name)
            if not _is_readable(connection.sock):  # else the server has closed it
                return connection
            connection.close()


class Proxied:
    """The same through a proxy, which only the kubernetes package's pool knows."""

    def __init__(self, host: str, pool: Any):
        self._host, self._pool = host.rstrip("/"), pool

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], read_s: float | None
    ) -> Answer:
        import urllib3

        times = urllib3.Timeout(connect=_CONNECT_S, read=read_s)
        how = {"body": body, "headers": headers, "timeout": times, "retries": False, "preload_content": False}
        try:
            found = self._pool.request(method, self._host + target, **how)
        except urllib3.exceptions.HTTPError as error:
            raise Lost(error) from None
        return Answer(found.status, _Urllib3(found), lambda whole: found.release_conn() if whole else found.close())


class _Urllib3:
    """Its answer with the errors of http.client."""

    def __init__(self, response: Any):
        self._response = response

    def read(self) -> bytes:
        return self._whole(lambda: self._response.read(decode_content=False))

    def read1(self, count: int) -> bytes:
        return self._whole(lambda: self._response.read1(count, decode_content=False))

    def _whole(self, get: Callable[[], bytes]) -> bytes:
        import urllib3

        try:
            return get()
        except urllib3.exceptions.HTTPError as error:
            raise http.client.HTTPException(str(error)) from None


class _Connection(http.client.HTTPConnection):
    """With the certificate checked for another name than the host's, where that is wanted."""

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext | None, server_name: str):
        self.default_port = 80 if tls is None else 443
        super().__init__(host, port, timeout=_CONNECT_S)
        self._tls, self._server_name = tls, server_name or host

    def connect(self) -> None:
        self.sock = socket.create_connection((_known(self.host), self.port), self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=_known(self._server_name))


def _known(host: str) -> str | bytes:
    """As bytes where it can be: text goes through the codec of international names, which is large."""
    return host.encode() if host.isascii() else host


def _is_readable(sock: Any) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))

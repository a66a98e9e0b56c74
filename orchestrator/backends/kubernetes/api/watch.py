"""Keeps the current objects of one kind: lists them once, then watches them, and reports every
change by its key.

A list has a version, and the watch starts at that version; a watch that ends is continued from its
last event or bookmark, and if the server has forgotten that version (410), everything is listed
again. So no change is missed, and a reader never waits. Source:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from orchestrator.errors import OrchError
from orchestrator.plan.codec import decoder

from .client import Cluster

_WATCH_S = 300
_PAGE = "2000"
_PAUSE_S = (0.2, 1.0, 3.0, 10.0)

log = logging.getLogger("orch.watch")


class _Object(Protocol):
    @property
    def metadata(self) -> Any: ...


T = TypeVar("T", bound=_Object)


class _ListMeta(Struct):
    version: str = field(default="", name="resourceVersion")
    continue_token: str = field(default="", name="continue")


class _Page(Struct, Generic[T]):
    items: list[T] | None = None
    metadata: _ListMeta = field(default_factory=_ListMeta)


class _Event(Struct):
    type: str
    object: msgspec.Raw


class _Version(Struct):
    version: str = field(default="", name="resourceVersion")


class _Bare(Struct):
    metadata: _Version = field(default_factory=_Version)


class _Expired(Exception):
    """The server has forgotten the version to continue from."""


class Watch(Generic[T]):
    """Watches one kind. `object_type`: a struct with `metadata`, into which each object is decoded.
    `changed(key, before, after)` is called in the watching thread for each change; None: absent."""

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        object_type: type[T],
        changed: Callable[[str, T | None, T | None], None],
        labels: str = "",
    ):
        self._cluster = cluster
        self._kind = kind
        self._changed = changed
        page_of: Any = _Page
        self._pages = decoder(page_of[object_type])
        self._object = decoder(object_type)
        self._event = decoder(_Event)
        self._bare = decoder(_Bare)
        self._query = {"labelSelector": labels} if labels else {}
        self._objects: dict[str, T] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._end = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"watch-{self._kind}", daemon=True).start()

    def stop(self) -> None:
        """Stops reporting changes. The thread, which waits for the server, ends with the watch or
        the process."""
        self._end.set()

    def wait(self, seconds: float) -> bool:
        """Waits until everything has been listed, at most for `seconds`. Returns whether it has."""
        return self._ready.wait(seconds)

    def get(self, key: str) -> T | None:
        """Returns the object `namespace/name`, or `name` if the kind has no namespaces."""
        with self._lock:
            return self._objects.get(key)

    def all(self) -> list[T]:
        with self._lock:
            return list(self._objects.values())

    # -------------------------------------------------------------------------- the watching thread

    def _run(self) -> None:
        version = ""
        tries = 0
        while not self._end.is_set():
            try:
                if not version:
                    version = self._list()
                    self._ready.set()
                # `version` is where the next watch continues
                for version in self._events(version):  # noqa: B007, B020
                    tries = 0
            except _Expired:
                version = ""
            except (OrchError, msgspec.MsgspecError) as error:
                if not self._end.is_set():
                    log.warning("%s: %s", self._kind, error)
                if getattr(error, "status", None) == 410:
                    version = ""
                self._end.wait(_PAUSE_S[min(tries, len(_PAUSE_S) - 1)] * random.uniform(0.8, 1.2))
                tries += 1

    def _list(self) -> str:
        """Replaces all known objects by a new list, and returns its version."""
        listed: dict[str, T] = {}
        query: dict[str, str] = {**self._query, "limit": _PAGE}
        while True:
            page = self._pages.decode(self._cluster.page(self._kind, query))
            listed |= {_key(body): body for body in page.items or ()}
            if not page.metadata.continue_token:
                break
            query["continue"] = page.metadata.continue_token
        with self._lock:
            previous = self._objects
            self._objects = listed
        for key in previous.keys() | listed.keys():
            old = previous.get(key)
            new = listed.get(key)
            if not _same_version(old, new):
                self._changed(key, old, new)
        return page.metadata.version

    def _events(self, version: str) -> Iterator[str]:
        """Yields the version after each event, until the server ends the watch."""
        query: Mapping[str, str] = {
            **self._query,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        response = self._cluster.events(self._kind, query, _WATCH_S + 30.0)
        rest = b""
        with contextlib.closing(response):
            for chunk in response.chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines if not self._end.is_set() else ():
                    yield self._take(self._event.decode(line))

    def _take(self, event: _Event) -> str:
        if event.type == "ERROR":
            raise _Expired
        if event.type == "BOOKMARK":
            return self._bare.decode(event.object).metadata.version
        new: T = self._object.decode(event.object)
        key = _key(new)
        with self._lock:
            old = self._objects.pop(key, None)
            if event.type != "DELETED":
                self._objects[key] = new
        self._changed(key, old, None if event.type == "DELETED" else new)
        return str(new.metadata.resource_version)


def _key(body: _Object) -> str:
    metadata = body.metadata
    return f"{metadata.namespace}/{metadata.name}" if metadata.namespace else str(metadata.name)


def _same_version(old: _Object | None, new: _Object | None) -> bool:
    if old is None or new is None:
        return False
    return bool(old.metadata.resource_version == new.metadata.resource_version)

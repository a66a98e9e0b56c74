"""`python -m tests.beds.kubernetes.bound SELECTOR COUNT [NAMESPACE]`, inside a bed: says when COUNT
pods have a node.

Prints `watching` when it begins to see what happens, pods and their Job (again, after a watch that
broke off), then the monotonic clock's seconds when the Job was there (nan: none was seen), and at
that moment. Told by the API server: nothing is polled, and both kinds of run are seen by the same
eye.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct, field

from . import bed_conf as conf

T = TypeVar("T")


class Meta(Struct):
    name: str
    namespace: str
    uid: str
    leaving: str = field(default="", name="deletionTimestamp")
    annotations: dict[str, str] = {}


Container = msgspec.defstruct("Container", [("name", str)])
Status = msgspec.defstruct("Status", [("phase", str, "")])
_Event = msgspec.defstruct("_Event", [("type", str), ("object", msgspec.Raw)])
_Job = msgspec.defstruct("_Job", [("metadata", Meta)])


class Spec(Struct):
    containers: list[Container]
    node: str = field(default="", name="nodeName")


class Pod(Struct):
    """What is looked at of one. They come by the hundred while their cluster is timed: nothing else
    is unpacked."""

    metadata: Meta
    spec: Spec
    status: Status


def main(selector: str, count: int, namespace: str = "default") -> None:
    nodes: dict[str, str] = {}
    jobs: list[float] = []  # when one was seen
    query = {"labelSelector": selector}
    ready = threading.Event()

    def await_job() -> None:
        for _ in watched(
            f"/apis/batch/v1/namespaces/{namespace}/jobs", query, ready.set, kind=_Job
        ):
            jobs.append(time.monotonic())

    threading.Thread(target=await_job, daemon=True).start()
    ready.wait()
    while len(nodes) < count:
        for pod in watched(
            f"/api/v1/namespaces/{namespace}/pods", query, lambda: print("watching", flush=True)
        ):
            if pod.spec.node:
                nodes[pod.metadata.name] = pod.spec.node
            if len(nodes) == count:
                break
        else:
            time.sleep(0.2)
    print(next(iter(jobs), math.nan), time.monotonic(), flush=True)


def watched(
    path: str,
    query: Mapping[str, str],
    begun: Callable[[], object] = lambda: None,
    seconds: int = 3600,
    kind: type[T] = Pod,
) -> Iterator[T]:
    """Objects, mostly pods, that are there, then each that comes or changes, until the server ends
    it, at the latest after `seconds`.

    From what its cache holds (version 0): a watch that asks for the newest is refused while that
    cache waits for a sign of life, and is told so only after some seconds.
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    server = http.client.HTTPSConnection(conf.HOST, 6443, context=tls, timeout=seconds + 60)
    query = {"watch": "1", "resourceVersion": "0", "timeoutSeconds": str(seconds), **query}
    with contextlib.closing(server):
        server.request(
            "GET",
            f"{path}?{urlencode(query)}",
            headers={"Authorization": f"Bearer {conf.TOKENS['admin']}"},
        )
        answer = server.getresponse()
        if answer.status != 200:
            raise OSError(answer.read().decode())
        begun()
        while line := answer.readline():
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                print(bytes(event.object).decode(), file=sys.stderr, flush=True)
                return
            if event.type != "DELETED":
                yield msgspec.json.decode(event.object, type=kind)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""`python -m tests.kubernetes.bound SELECTOR COUNT`, inside a bed: says when COUNT pods have a node.

Prints `watching` when it begins to see what happens (again, after a watch that broke off), then the monotonic clock's
seconds at that moment. Told by the API server: nothing is polled, and both kinds of run are seen by the same eye.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator
from urllib.parse import quote

from . import bed_conf as conf


def main(selector: str, count: int, namespace: str = "default") -> None:
    nodes: dict[str, str] = {}
    while len(nodes) < count:
        for event in watched(namespace, selector):
            pod = event["object"]
            if node := pod["spec"].get("nodeName"):
                nodes[pod["metadata"]["name"]] = node
            if len(nodes) == count:
                break
    print(time.monotonic(), flush=True)


def watched(namespace: str, selector: str) -> Iterator[dict]:
    """Events until the server ends them. From what its cache holds (version 0): a watch that asks for the newest is
    refused while that cache waits for a sign of life, and says so only after some seconds."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    server = http.client.HTTPSConnection(conf.HOST, 6443, context=tls)
    path = f"/api/v1/namespaces/{namespace}/pods?watch=1&resourceVersion=0&labelSelector={quote(selector)}"
    server.request("GET", path, headers={"Authorization": f"Bearer {conf.TOKENS['admin']}"})
    answer = server.getresponse()
    if answer.status != 200:
        sys.exit(answer.read().decode())
    print("watching", flush=True)
    while line := answer.readline():
        event = json.loads(line)
        if event["type"] == "ERROR":
            print(json.dumps(event["object"]), file=sys.stderr)
            return
        yield event


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

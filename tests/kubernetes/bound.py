"""`python -m tests.kubernetes.bound SELECTOR COUNT`, inside a bed: says when COUNT pods have a node.

Prints `watching` once it sees what happens, then the monotonic clock's seconds at that moment. Told by the API server
(a watch), so that nothing is polled and both kinds of run are seen by the same eye.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from urllib.parse import quote

from . import bed_conf as conf


def main(selector: str, count: int, namespace: str = "default") -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    server = http.client.HTTPSConnection(conf.HOST, 6443, context=tls)
    path = f"/api/v1/namespaces/{namespace}/pods?watch=1&labelSelector={quote(selector)}"
    server.request("GET", path, headers={"Authorization": f"Bearer {conf.TOKENS['admin']}"})
    answer = server.getresponse()
    print("watching", flush=True)
    nodes: dict[str, str] = {}
    while len(nodes) < count:
        event = json.loads(answer.readline() or '{"type": "ERROR", "object": "the watch has ended"}')
        if event["type"] == "ERROR":
            sys.exit(json.dumps(event["object"]))
        pod = event["object"]
        if node := pod["spec"].get("nodeName"):
            nodes[pod["metadata"]["name"]] = node
    print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

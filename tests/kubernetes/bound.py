"""`python -m tests.kubernetes.bound SELECTOR COUNT`, inside a bed: says when COUNT pods have a node.

Prints `watching` once it sees what happens, then the monotonic clock's seconds at that moment. Told by the API server
(a watch, in its short table form), so that nothing is polled and both kinds of run are seen by the same eye.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from urllib.parse import quote

from . import bed_conf as conf

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


def main(selector: str, count: int, namespace: str = "default") -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    server = http.client.HTTPSConnection(conf.HOST, 6443, context=tls)
    path = f"/api/v1/namespaces/{namespace}/pods?watch=1&labelSelector={quote(selector)}"
    server.request("GET", path, headers={"Authorization": f"Bearer {conf.TOKENS['admin']}", "Accept": TABLE})
    answer = server.getresponse()
    print("watching", flush=True)
    column, nodes = -1, {}
    while len(nodes) < count:
        line = answer.readline()
        if not line:
            sys.exit("the watch has ended")
        table = json.loads(line)["object"]
        names = [one["name"] for one in table.get("columnDefinitions") or ()]  # told with the first event only
        column = names.index("Node") if names else column
        for row in table["rows"]:
            name, node = row["cells"][0], row["cells"][column]
            if node and node != "<none>":
                nodes[name] = node
    print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Commands in pods, against a server that speaks WebSocket byte by byte; and what a drill does with
a pod."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from contextlib import closing, suppress

import pytest

from orchestrator.backends.base import get_backend
from orchestrator.backends.kubernetes.api.exec import PodCommand
from orchestrator.drill.targets import Targets, targets_of
from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder
from tests.beds.bundles import make_bundle, refusal
from tests.beds.plans import make_plan


class Server:
    """One connection: the request, an answer, frames as told; what the client sends is unmasked."""

    def __init__(self, *frames: bytes, refusal: str = ""):
        self._frames = frames
        self._refusal = refusal
        self.request = ""
        self.heard = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with (
            suppress(ConnectionResetError),
            self._listener,
            self._listener.accept()[0] as peer,
            peer.makefile("rb") as file,
        ):
            while (line := file.readline().decode()).strip():
                self.request += line
            if self._refusal:
                body = json.dumps({"message": self._refusal})
                peer.sendall(
                    f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                return
            key = (
                re.search(r"Sec-WebSocket-Key: (\S+)", self.request)[1]
                + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            )
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            upgrade = (
                f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n"
            )
            upgrade = (
                f"HTTP/1.1 101 Switching\r\n{upgrade}Sec-WebSocket-Protocol:"
                " v5.channel.k8s.io\r\n\r\n"
            )
            peer.sendall(upgrade.encode() + b"".join(self._frames))  # in one piece
            while head := file.read(2):
                mask = file.read(4)
                size = head[1] & 0x7F
                self.heard.append(bytes(b ^ mask[i % 4] for i, b in enumerate(file.read(size))))
                if self.heard[-1] == b"\xff\x00":
                    return peer.sendall(frame(b'\x03{"status":"Success"}') + END)

    def join(self) -> None:
        self._thread.join(10)


def frame(content: bytes, first: int = 0x82) -> bytes:
    return bytes([first, len(content)]) + content


END = frame(b"\x03\xe8", 0x88)


def run(server: Server) -> PodCommand:
    from kubernetes.client import Configuration

    url = f"{server.host}/api/v1/namespaces/n/pods/p"
    return PodCommand(Configuration(), url, {"authorization": "x"}, "agent", ["a b", "c"])


def test_a_command_says_its_line_and_leaves_when_its_input_ends():
    server = Server(frame(b"\x02warned"), frame(b"\x01hello\nmore"))
    with closing(run(server)) as command:
        assert command.line(10.0) == b"hello"
    command.close()
    server.join()
    assert server.heard[0] == b"\xff\x00", "its standard input ends, and then the connection does"
    line, *headers = server.request.splitlines()
    assert line.startswith(
        "GET /api/v1/namespaces/n/pods/p/exec?command=a+b&command=c&container=agent&stdin=true"
    )
    assert "authorization: x" in headers


def test_a_line_that_comes_with_the_end_of_the_command_is_heard():
    with closing(
        run(Server(frame(b"\x01hello\n"), frame(b'\x03{"status":"Success"}'), END))
    ) as command:
        assert command.line(10.0) == b"hello"


def test_why_a_command_could_not_be_run():
    failed = Server(frame(b"\x02no such file"), frame(b'\x03{"message":"exit code 127"}'), END)
    with closing(run(failed)) as command:
        assert command.line(10.0) == b""
        assert "no such file exit code 127" in command.failure().message
    with closing(run(Server())) as command, pytest.raises(OrchError, match="no answer in time"):
        command.line(0.05)
    forbidden = (
        'pods "p" is forbidden: User "u" cannot get resource "pods/exec" in API group "" in the'
        ' namespace "n"'
    )
    with refusal(r"the rule to add: .*pods/exec.*get", 78):
        run(Server(refusal=forbidden))


# ------------------------------------------------------------------------------------------ drills


class Pods:
    """Stands in for the cluster: which calls a fault becomes."""

    def __init__(self):
        self.calls = []
        self.reply = {"at": 5.0}

    def delete(self, kind, name, grace_s):
        self.calls.append(("delete", name, grace_s))

    def evict(self, name, grace_s):
        self.calls.append(("evict", name, grace_s))

    def command(self, pod, container, argv):
        self.calls.append((pod, container, argv))
        return self

    def line(self, timeout_s):
        return json.dumps(self.reply).encode()

    def close(self):
        self.calls.append("closed")


def targets(tmp_path, monkeypatch, **options) -> tuple[Targets, Pods]:
    backend_spec = {"name": "kubernetes", "options": {"image": "orch:1", **options}}
    request = make_bundle(make_plan(dp=2, nodes=2), tmp_path, backend=backend_spec).request
    pods = Pods()
    backend = get_backend("kubernetes")
    names = {"node-0.pod-0": "p0", "node-0.pod-1": "p1"}
    monkeypatch.setattr(backend, "_pod_of", lambda folder, node: (pods, names[node]))
    return targets_of(backend, RunFolder(tmp_path / "r"), request, 60.0), pods


def test_what_a_fault_becomes_on_kubernetes(tmp_path, monkeypatch):
    drill, pods = targets(tmp_path, monkeypatch, claim="runs")
    drill.inject("kill_node", "node-0.pod-1", 3, 5.0, 0.0)
    drill.inject("notice", "node-0.pod-0", 0, 20.0, 0.0)
    assert pods.calls == [("delete", "p1", 0), ("evict", "p0", 20)]
    injected = drill.inject("stop_worker", "node-0.pod-1", 3, 5.0, 0.0)
    injected.undo()
    (pod, container, argv), closed = pods.calls[2:]
    assert injected.at == 5.0 and (pod, container, closed) == ("p1", "agent", "closed")
    assert argv[:5] == ["python3", "-P", "-m", "orch_start", "orchestrator.drill.node_command"]
    assert {"--run-dir=/orch/runs/r", "--agent=1", "--fault=stop_worker", "--rank=3"} <= set(argv)
    pods.reply = {"exit": 76, "problem": "rank 3 does not run on its node now"}
    with pytest.raises(OrchError, match="does not run on its node"):
        drill.inject("kill_worker", "node-0.pod-1", 3, 5.0, 0.0)
    assert pods.calls[-1] == "closed"


def test_what_kubernetes_cannot_have_is_refused(tmp_path, monkeypatch):
    drill, pods = targets(tmp_path, monkeypatch)
    for fault, reason in (
        ("partition", "rights on the node"),
        ("stop_agent", "process 1"),
        ("kill_node", "options.claim"),
        ("bit_flip", "options.claim"),
    ):
        with refusal(reason, 64):
            drill.check(fault)
    drill.check("kill_worker")
    assert pods.calls == []

"""Clusters in network namespaces: real namespaces, bridges and shaped links, where root and
iproute2 are there."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local import namespaces
from orchestrator.backends.local.backend import LocalBackend, LocalRecord, read_options
from orchestrator.backends.local.namespaces import Network, Wiring
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.beds.bundles import make_bundle, no_namespaces, submit, wait_end, wait_for, wait_step
from tests.beds.plans import make_plan

SHAPED = {"options": {"network": "namespaces", "link_gbit_per_s": 0.5}}
LONG = {"ORCH_TEST_STEPS": "9", "ORCH_TEST_SAVE": "1", "ORCH_TEST_HOLD": "1"}


real = [pytest.mark.process, pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())]


@contextmanager
def network(nodes: int = 2, mbit: float = 16, leaves: int = 1, uplink: float = 1.0):
    """`nodes` nodes, spread over `leaves` leaf switches, with one link each."""
    share = nodes // leaves
    leaf = tuple(tuple(range(i * share, (i + 1) * share)) for i in range(leaves))
    built = Network(
        Wiring(
            tuple("abcdefgh"[:nodes]), mbit * 1e6 / 8, (leaf, (tuple(range(nodes)),)), (uplink, 1.0)
        )
    )
    try:
        yield built
    finally:
        built.close()


def on(net: Network, node: str, code: str, *arguments: str) -> subprocess.Popen:
    """A Python process on a node; `code` finds `arguments` in `sys.argv[1:]` and may use socket and
    time."""
    argv = [sys.executable, "-S", "-c", f"import socket, sys, time\n{code}", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, **pipes, preexec_fn=net.enter(node))


RECEIVE = """
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    peer, _ = server.accept()
    size = len(peer.recv(1))  # the sender has connected, and waits for the others
    start = time.monotonic()
    while chunk := peer.recv(1 << 20):
        size += len(chunk)
    print(size, time.monotonic() - start, flush=True)
"""
SEND = """
peer = socket.create_connection((sys.argv[1], 5000), 60)
print("ready", flush=True)
sys.stdin.readline()
peer.sendall(bytes(int(sys.argv[2])))
"""


def transfers(net: Network, pairs: list[tuple[str, str]], size: int) -> list[float]:
    """Seconds that each of several transfers of `size` bytes took, all of them at once."""
    receivers = [on(net, target, RECEIVE, net.wiring.address(target), "1") for _, target in pairs]
    for receiver in receivers:
        assert receiver.stdout.readline() == "ready\n"
    senders = [
        on(net, source, SEND, net.wiring.address(target), str(size)) for source, target in pairs
    ]
    for sender in senders:
        assert sender.stdout.readline() == "ready\n"
    for sender in senders:
        sender.stdin.write("go\n")
        sender.stdin.flush()
    durations_s = []
    for receiver, sender in zip(receivers, senders, strict=True):
        received_bytes, seconds = receiver.communicate(timeout=300)[0].split()
        assert int(received_bytes) == size and sender.wait(300) == 0
        durations_s.append(float(seconds))
    return durations_s


def slowest(net: Network, pairs: list[tuple[str, str]], size: int, hoped_s: float) -> float:
    """Seconds of the slowest transfer, tried again while it takes longer than hoped: a machine that
    stands still makes a line slow, nothing makes one fast."""
    for _ in range(5):
        if (slowest_s := max(transfers(net, pairs, size))) < hoped_s:
            break
    return slowest_s


def test_wiring_follows_the_plan():
    wiring = Wiring.of(make_plan(dp=4, nodes=2, node_names=["x", "y"]), 0.2)
    assert wiring.nodes == ("x", "y") and wiring.link == 0.2e9 / 8
    assert wiring.levels[-1] == ((0, 1),) and set(wiring.uplink) == {1.0}
    assert [wiring.address(node) for node in wiring.nodes] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"network": "namespaces"}, "link_gbit_per_s"),
        ({"network": "bridge"}, "Invalid enum value"),
        ({"netwrok": "host"}, "did you mean 'network'"),
        ({"network": "namespaces", "link_gbit_per_s": 0}, "link_gbit_per_s"),
    ],
)
def test_options_that_are_wrong_are_named(options, says, tmp_path):
    request = make_bundle(make_plan(), tmp_path, backend={"options": options}).request
    with pytest.raises(OrchError, match=re.escape(says)) as refused:
        read_options(request)
    assert refused.value.exit == Exit.CONFIG


def test_without_iproute2_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(
        namespaces.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}"
    )
    with pytest.raises(OrchError, match=r"needs root and iproute2.*no tc on PATH") as refused:
        namespaces.check()
    assert refused.value.exit == Exit.CAPACITY


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="drops root, so needs it")
def test_without_root_one_line_says_so():
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            namespaces.check()
        except OrchError as error:
            code = (
                int(error.exit)
                if "needs root" in error.message and "permitted" in error.message
                else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == Exit.CAPACITY


class TestNetwork:
    pytestmark = [*real, pytest.mark.timing]

    def test_inside_a_node_is_fast_and_between_nodes_as_slow_as_asked(self):
        size = 1 << 20
        with network(mbit=16) as net:
            (across,) = transfers(net, [("a", "b")], size)
            inside = slowest(net, [("a", "a")], size, across)
        assert across > 0.8 * size / 2e6  # 2 MB/s, less what one burst and the buffers swallow
        assert inside < across

    def test_two_flows_share_an_oversubscribed_uplink_and_not_the_links(self):
        size = 1 << 21
        with network(nodes=4, mbit=16, leaves=2, uplink=0.5) as net:
            limit = 1.6 * size / 2e6
            near = slowest(net, [("a", "b"), ("c", "d")], size, limit)
            far = max(transfers(net, [("a", "c"), ("b", "d")], size))
        assert far > limit > near

    def test_a_cut_link_loses_packets_silently_until_it_is_healed(self):
        ping = """
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
line.bind((sys.argv[1], 6000))
line.settimeout(0.2)
while True:
    line.sendto(b"ping", (sys.argv[2], 6000))  # never an error: the node does not see what happened
    try:
        print(line.recv(9).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
    time.sleep(0.02)
"""
        with network() as net:
            hosts = [net.wiring.address("a"), net.wiring.address("b")]
            near = on(net, "a", ping, *hosts)
            far = on(net, "b", ping, *reversed(hosts))
            try:
                printed_lines = iter(near.stdout.readline, "")
                for state, act in (
                    ("ping", None),
                    ("silence", namespaces.cut),
                    ("ping", namespaces.heal),
                ):
                    if act:
                        act([os.getpid()], net.switches, 1)
                    assert any(
                        line.strip() == state
                        for line, _ in zip(printed_lines, range(1000), strict=False)
                    ), state
            finally:
                for process in (near, far):
                    process.kill()
                    process.communicate()

    def test_the_wires_are_gone_when_nobody_holds_them(self):
        with network() as net:
            survivor = on(net, "a", "print('here', flush=True)\ntime.sleep(60)")
            assert survivor.stdout.readline() == "here\n"
            assert "eth0" in Path(f"/proc/{survivor.pid}/net/dev").read_text()
        try:  # a process that outlives its run keeps an empty namespace, not a link
            wait_for(
                lambda: "eth0" not in Path(f"/proc/{survivor.pid}/net/dev").read_text(),
                120,
                "removal of the link",
            )
        finally:
            survivor.kill()
            survivor.communicate()


class TestRuns:
    pytestmark = real

    def test_two_at_once_with_the_same_addresses_and_nothing_of_them_on_the_host(self, runs):
        before = {name for _, name in socket.if_nameindex()}
        folders = [
            submit(make_plan(dp=4, nodes=2), runs, run_id=name, env=LONG, backend=SHAPED)
            for name in ("one", "two")
        ]
        for folder in folders:
            wait_step(folder, 3, timeout_s=120)
        records = [read_record(folder, LocalRecord) for folder in folders]
        homes = {
            os.stat(f"/proc/{pid}/ns/net").st_ino
            for record in records
            for pid in record.agents.values()
        }
        assert len(homes) == 4 and os.stat("/proc/self/ns/net").st_ino not in homes
        coordinators = [json.loads(folder.coordinator.read_text())["host"] for folder in folders]
        assert coordinators == ["10.0.0.1", "10.0.0.1"]
        for node in read_state(folders[0]).nodes.values():  # the metrics page is read from outside
            with urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=30) as page:
                assert b"orch_workers" in page.read()
        assert {name for _, name in socket.if_nameindex()} == before
        for folder in folders:
            LocalBackend().cancel(folder, force=False)
        assert [wait_end(folder, 120).state for folder in folders] == ["cancelled", "cancelled"]
        assert all(len(list(folder.path.glob("saved-*"))) == 4 for folder in folders)

    def test_killing_the_supervisor_leaves_the_network_up_until_the_run_has_saved(self, runs):
        folder = submit(make_plan(dp=4, nodes=2), runs, env=LONG, backend=SHAPED)
        wait_step(folder, 2, timeout_s=120)
        os.kill(read_record(folder, LocalRecord).supervisor[0], signal.SIGKILL)
        state = wait_end(folder, 120)
        assert (state.state, state.exit_code) == ("stopped", 75)
        assert len(list(folder.path.glob("saved-*"))) == 4

    def test_a_cut_node_is_lost_to_the_run(self, runs):
        backend = {**SHAPED, "heartbeat_timeout_s": 4.0, "grace_s": 1.0}
        folder = submit(make_plan(dp=4, nodes=2), runs, env=LONG, backend=backend)
        wait_step(folder, 2, timeout_s=120)
        record = read_record(folder, LocalRecord)
        assert list(record.agents) == ["node0", "node1"]
        namespaces.cut([record.supervisor[0], *record.agents.values()], record.switches, 1)
        state = wait_end(folder, 120)
        assert (state.state, state.exit_code, state.cause.kind) == ("failed", 76, "node_lost")
        assert state.cause.node == "node1"

    def test_a_network_that_cannot_be_built_fails_the_run_with_its_reason(self, runs, tmp_path):
        bundle = make_bundle(make_plan(dp=4, nodes=2), runs, backend=SHAPED)
        tools = tmp_path / "bin"  # a `tc` that only the supervisor finds
        tools.mkdir()
        (tools / "tc").write_text(
            "#!/bin/sh\necho 'RTNETLINK answers: Operation not supported' >&2\nexit 1\n"
        )
        (tools / "tc").chmod(0o755)
        LocalBackend().submit(bundle, os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"})
        state = wait_end(RunFolder(runs / "test-run"), 120)
        assert (state.state, state.exit_code) == ("failed", 76)
        assert "Operation not supported" in state.reason

"""The socket of rank 0's store: bound, kept, handed over, and deaf to machines that are not of the
run."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.leader.epoch import assignment
from orchestrator.agent.leader.membership import Member
from orchestrator.agent.node.agent import Agent, NodeFacts
from orchestrator.agent.node.connection import FixedCoordinator
from orchestrator.agent.node.fork_server import STORE_FD
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.protocol.messages import Join, Prepare, Ready
from orchestrator.run import store_socket
from orchestrator.run.store_socket import (
    StoreSocket,
    attach,
    covering_networks,
    drop_others,
    own_addresses,
)
from tests.beds.bundles import make_bundle
from tests.beds.coordinated import PLAN, make_folder

from .test_workers import Harness

V4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)


def passes(program: bytes, sender: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """What the kernel would make of a packet of that sender, by the rules of classic BPF."""
    header = {4: bytes(12), 6: bytes(8)}[sender.version] + sender.packed
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, yes, no, operand = instructions[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("!I", header, operand - 0xFFF00000)
        elif code == 0x54:
            value &= operand
        elif code == 0x15:
            at += yes if value == operand else no
        else:
            assert code == 0x06
            return operand > 0


@given(
    st.sampled_from([V4, V6]).flatmap(
        lambda addresses: st.tuples(st.sets(addresses, max_size=40), addresses, st.integers(0, 31))
    )
)
def test_only_the_named_addresses_pass(drawn):
    admitted, stranger, near = drawn
    version = stranger.version
    program = drop_others(covering_networks(admitted, version), version)
    assert all(passes(program, address) for address in admitted)
    neighbours = {type(stranger)(int(address) ^ (1 << near)) for address in admitted}
    assert not any(passes(program, address) for address in (neighbours | {stranger}) - admitted)


def test_more_nodes_than_a_program_can_name_are_let_in_by_networks():
    nodes = [ipaddress.IPv4Address(0x0A000000 + 300 * index) for index in range(16384)]
    networks = covering_networks(nodes, 4)
    assert len(networks) <= 512 and len(drop_others(networks, 4)) // 8 <= 4096
    program = drop_others(networks, 4)
    assert all(passes(program, address) for address in nodes[::97]) and not passes(
        program, ipaddress.IPv4Address("11.1.1.1")
    )


@pytest.mark.parametrize("filtered", [True, False])
def test_nobody_connects_before_the_filter_is_there(monkeypatch, filtered):
    """Whoever did would stay in the queue, and be served."""
    seen = []

    def attached(bound, program):
        seen.append(bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        attach(bound, program)

    monkeypatch.setattr(store_socket, "attach", attached)
    for address in own_addresses()[:2] or ["127.0.0.1"]:
        with StoreSocket(address, filtered=filtered) as store:
            assert store._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            assert store._socket.getsockname()[0] == address
    assert not any(seen) and (seen or not filtered or not own_addresses())


def _reaches(port: int, sender: str) -> bool:
    with socket.socket() as peer:
        peer.bind((sender, 0))
        peer.settimeout(0.3)
        try:
            peer.connect(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_the_kernel_drops_what_others_send_and_what_was_let_in_can_be_changed():
    """Any address of 127/8 may be a sender here."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        attach(listening, drop_others([], 4))
        assert not _reaches(port, "127.0.0.1")
        many = {ipaddress.ip_address(0x0A000000 + 2 * index) for index in range(400)}
        attach(
            listening,
            drop_others(covering_networks(many | {ipaddress.ip_address("127.0.0.2")}, 4), 4),
        )
        assert _reaches(port, "127.0.0.2") and not _reaches(port, "127.0.0.3")


def test_it_is_bound_to_the_nodes_address_and_nobody_takes_its_port():
    with StoreSocket("127.0.0.1") as store:
        with socket.socket(fileno=os.dup(store.fileno())) as duplicate:
            assert duplicate.getsockname() == ("127.0.0.1", store.port)
        for reuse in (0, 1):
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                thief.bind(("", store.port))
        assert _reaches(store.port, "127.0.0.1")


def test_the_filter_is_set_before_anybody_knows_the_port_and_can_be_left_out(monkeypatch):
    """The address here is not the loopback's. An agent takes `backend.store_filter` from its
    request."""
    set_to: list[int] = []
    monkeypatch.setattr(ipaddress.IPv4Address, "is_loopback", False)
    monkeypatch.setattr(store_socket, "attach", lambda _, program: set_to.append(len(program) // 8))
    with StoreSocket("127.0.0.1") as store:
        assert set_to == [1], "drops everything"
        store.admit(["10.0.0.2", "not an address", "fd00::1"])
        assert set_to == [1, 2 * 4 + 1]
    with StoreSocket("127.0.0.1", filtered=False) as store:
        store.admit(["10.0.0.2"])
    assert len(set_to) == 2


def test_a_port_that_is_kept_for_a_program_is_the_programs_alone():
    with StoreSocket("127.0.0.1", listens=False) as store:
        for address in ("", "127.0.0.1", "127.0.0.9"):
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                thief.bind((address, store.port))
            with socket.create_server((address, store.port)):  # sets SO_REUSEADDR, as torch does
                assert _reaches(store.port, "127.0.0.1") or address == "127.0.0.9"


def test_the_addresses_of_a_machine(tmp_path):
    (tmp_path / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 2 0 2\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |--"
        " 10.1.2.3\n        /32 host LOCAL\n     |-- 10.1.2.255\n        /32 link BROADCAST\n    "
        " |-- 127.0.0.1\n        /32 host LOCAL\n"
    )
    (tmp_path / "if_inet6").write_text(
        "fd000000000000000000000000000002 02 40 00 80 eth0\n" + "0" * 31 + "1 01 80 10 lo\n"
    )
    assert own_addresses(tmp_path) == ["10.1.2.3", "fd00::2"]
    assert own_addresses(tmp_path / "none") == []
    services = "".join(f"     |-- 10.96.0.{index}\n        /32 host LOCAL\n" for index in range(65))
    (tmp_path / "fib_trie").write_text(services)
    assert own_addresses(tmp_path) == [], "the address of the node itself is known without them"


@pytest.mark.parametrize("command", [(), ("python", "mine.py")], ids=["trainer", "program"])
async def test_an_agent_keeps_the_port_that_it_has_promised_until_the_next_epoch(tmp_path, command):
    sent_messages: list[Ready] = []
    folder = make_folder(tmp_path)
    request = make_bundle(PLAN, tmp_path / "elsewhere", command=command).request
    recorder = Recorder(folder, "node0", PLAN)
    facts = NodeFacts("host", "127.0.0.1", 1, 2, 0)
    connector = FixedCoordinator(folder, "node0", b"k" * 32, 1.0)
    agent = Agent(folder, PLAN, request, "node0", facts, recorder, None, connector)
    agent._channel = SimpleNamespace(send=lambda epoch, message: sent_messages.append(message))
    for epoch in range(2):
        agent._handle(epoch, Prepare())
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", sent_messages[-1].port))
    with socket.socket() as next_owner:
        next_owner.bind(("127.0.0.1", sent_messages[0].port))
    agent._control.close()
    recorder.close()


def test_rank_0_s_node_is_told_who_may_connect():
    def member(name: str, peer: str, *addresses: str):
        join = Join(node=name, host=name, address=f"10.0.0.{name[-1]}", pid=1, gpus=2, nics=0,
                    plan_hash="", metrics=None, addresses=list(addresses))  # fmt: skip
        return Member(SimpleNamespace(address=peer), join, ready=Ready(port=7))

    first = member("node0", "")
    second_member = member("node1", "192.0.2.7", "10.1.0.1", "fd00::1")
    assignments = [
        assignment(PLAN, name, index, first, [first, second_member])
        for index, name in enumerate(("node0", "node1"))
    ]
    assert assignments[0].peers == ["10.0.0.0", "10.0.0.1", "10.1.0.1", "192.0.2.7", "fd00::1"]
    assert assignments[1].peers == [] and assignments[1].master_address == "10.0.0.0"


@pytest.mark.process
@pytest.mark.parametrize("forked", [False, True])
async def test_a_worker_finds_the_socket_of_its_store_and_others_find_none(tmp_path, forked):
    code = f"""
import json, os, socket
try:
    with socket.socket(fileno=os.dup({STORE_FD})) as found:
        print(json.dumps(found.getsockname()[1]), flush=True)
except OSError:
    print("none", flush=True)
os.fstat(3), os.write(3, b"reports\\n")
"""
    with StoreSocket("127.0.0.1") as store:
        async with Harness(tmp_path, forked) as harness:
            harness.start(code)
            await harness.until_empty()
            assert harness.log().read_text().strip() == "none"
            harness.workers.start(
                1, harness.argv(code), {}, str(tmp_path), harness.log(1), store=store.fileno()
            )
            await harness.until_empty()
            assert json.loads(harness.log(1).read_text()) == store.port
            assert harness.lines == [(0, b"reports"), (1, b"reports")]

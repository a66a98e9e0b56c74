"""A cluster's network on one machine: a network namespace a node, bridges for switches, links of a
given rate. Linux.

Every node of a run gets a namespace of its own with two interfaces: `lo`, over which its ranks
reach each other at the speed of memory, and `eth0`, whose packets leave and arrive at the rate of
the link (`tbf`, a token bucket, on both ends). A further namespace holds the switches: one bridge
for each switch of each level of the plan, joined by links of the rate that the plan's
oversubscription leaves. So bandwidth is as on a cluster; latency is not (that would need `netem`,
which not every kernel has).

Nothing here has a name that another run or the host could see: namespaces live as long as a process
or a descriptor holds them, and take their interfaces, bridges and addresses with them. So every run
uses the same addresses, and there is nothing to sweep, whoever was killed in whatever order.
Supervisor and agents hold the namespace of the switches; the descriptor has the same number in
each, by which `cut` and `heal` find it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.exits import Exit

INTERFACE = "eth0"  # in every node's namespace
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_FIRST_ADDRESS = IPv4Address("10.0.0.1")
_PREFIX = 8
_BURST_S = (
    4e-3  # of the rate may pass at once: a busy machine serves a link that late, and catches up
)
_LEAST_BURST = 32 << 10  # bytes
_QUEUE = 16 << 20  # bytes that wait before a link drops packets: hardly any is
#: TCP of a node: least, first and most bytes of a connection's buffers. It sends little ahead, or
#: acknowledgements wait behind it in the queue of the link; it takes much in, since gloo does not
#: read while it has something to write. With both, two ways at once get what each gets alone.
_TCP = {"tcp_wmem": "4096 16384 131072", "tcp_rmem": "4096 8388608 8388608"}
_REQUIREMENT = (
    "a cluster in network namespaces (cluster=local_shaped) needs root and iproute2; cluster=local"
    " runs without them"
)


class Wiring(Struct, frozen=True):
    """What is to be built: nodes under switches. Rates in bytes/s, one direction."""

    nodes: tuple[str, ...]
    link: float  # of each node
    levels: tuple[
        tuple[tuple[int, ...], ...], ...
    ]  # innermost first: node indices under each switch
    uplink: tuple[
        float, ...
    ]  # by level: how much of its nodes' links a switch has towards the next one, 0 to 1

    @classmethod
    def of(cls, plan: Plan, gbit_per_s: float) -> Wiring:
        """The plan's nodes and switches, every node with one link of `gbit_per_s`."""
        cluster = plan.cluster
        return cls(
            nodes=tuple(cluster.node_names),
            link=gbit_per_s * 1e9 / 8,
            levels=tuple(
                tuple(tuple(switch) for switch in level.switches) for level in cluster.levels
            ),
            uplink=tuple(1 / level.oversubscription for level in cluster.levels),
        )

    def address(self, node: str) -> str:
        return str(_FIRST_ADDRESS + self.nodes.index(node))


class Network:
    """The network of one run, up from construction to `close`, and longer while a process runs in
    it."""

    def __init__(self, wiring: Wiring):
        """Raises OrchError (76) when this process may not, or this kernel cannot. Single-threaded
        callers only."""
        self.wiring = wiring
        self._descriptors: list[int] = []
        try:
            self.switches = self._namespace()
            self._node_namespaces = {node: self._namespace() for node in wiring.nodes}
            self._build()
        except BaseException:
            self.close()
            raise

    def enter(self, node: str) -> Callable[[], None]:
        """What a child calls between fork and exec to stand on that node."""
        descriptor = self._node_namespaces[node]
        return lambda: _enter_namespace(descriptor)

    def close(self) -> None:
        """Closes the namespaces. A process that runs on a node keeps that node's; a holder of
        `switches` the links."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _namespace(self) -> int:
        """A new, empty network namespace, by descriptor; this process stays where it is."""
        own_namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _system_call("unshare", _CLONE_NEWNET)
            descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            with contextlib.suppress(
                OSError
            ):  # a container's read-only /proc: a less even network, but one
                for name, value in _TCP.items():
                    Path("/proc/sys/net/ipv4", name).write_text(value)
            _enter_namespace(own_namespace)
            return descriptor
        finally:
            os.close(own_namespace)

    def _build(self) -> None:
        wiring = self.wiring
        inside = self._node_namespaces
        links = []
        limits = []  # lines for `ip -batch` and `tc -batch` outside the switches

        def limit(name: str, rate: float) -> str:
            burst = max(_LEAST_BURST, round(rate * _BURST_S))
            return (
                f"qdisc add dev {name} root tbf rate {round(rate * 8)}bit burst {burst} limit"
                f" {_QUEUE}"
            )

        def plug(port: str, level: int, switch: int) -> None:
            links.append(f"link set dev {port} addrgenmode none master {_bridge(level, switch)} up")

        above = [
            {node: s for s, members in enumerate(level) for node in members}
            for level in wiring.levels
        ]
        for level, switches in enumerate(wiring.levels):
            for switch, members in enumerate(switches):
                links.append(f"link add {_bridge(level, switch)} type bridge")
                links.append(f"link set dev {_bridge(level, switch)} addrgenmode none up")
                if not level or not members:
                    continue
                for below in sorted({above[level - 1][node] for node in members}):
                    up = f"u{level}-{below}"
                    down = f"d{level}-{below}"
                    links.append(f"link add {up} type veth peer name {down}")
                    plug(up, level - 1, below)
                    plug(down, level, switch)
                    rate = (
                        len(wiring.levels[level - 1][below])
                        * wiring.link
                        * wiring.uplink[level - 1]
                    )
                    limits += [limit(up, rate), limit(down, rate)]
        for index, node in enumerate(wiring.nodes):
            links.append(
                f"link add {_port(index)} type veth peer name {INTERFACE} netns"
                f" /proc/self/fd/{inside[node]}"
            )
            plug(_port(index), 0, above[0][index])
            limits.append(limit(_port(index), wiring.link))
        _batch("ip", self.switches, links, list(inside.values()))
        _batch("tc", self.switches, limits)
        for node, descriptor in inside.items():
            address = f"{wiring.address(node)}/{_PREFIX}"
            interface_lines = ["link set dev lo up", f"link set dev {INTERFACE} addrgenmode none"]
            interface_lines += [
                f"address add {address} dev {INTERFACE}",
                f"link set dev {INTERFACE} up",
            ]
            _batch("ip", descriptor, interface_lines)
            _batch("tc", descriptor, [limit(INTERFACE, wiring.link)])


def cut(holders: Iterable[int], switches: int, index: int) -> None:
    """Pull node `index`'s cable: packets to and from it are lost without a word, as when a switch
    port fails.

    `holders`: pids of the run's supervisor and agents; `switches`: the descriptor under which they
    hold that namespace. Raises OrchError (76) when none of them runs.
    """
    _set_port(holders, switches, index, "down")


def heal(holders: Iterable[int], switches: int, index: int) -> None:
    """Plug the cable in again."""
    _set_port(holders, switches, index, "up")


def check() -> None:
    """Try it: a network of two nodes, built and dropped by a child. Raises OrchError (76) with what
    is in the way."""
    if sys.platform != "linux":
        raise OrchError(f"{_REQUIREMENT}; this is {sys.platform}", Exit.CAPACITY)
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise OrchError(
            f"{_REQUIREMENT}; there is no {' and no '.join(missing)} on PATH", Exit.CAPACITY
        )
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        problem = "it did not finish"
        try:
            Network(Wiring(("a", "b"), 1e8, (((0,), (1,)), ((0, 1),)), (1.0, 1.0)))
            problem = ""
        except BaseException as error:
            problem = str(error)
        finally:
            os.write(write, problem.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as output:
        problem = output.read().decode()
    os.waitpid(child, 0)
    if problem:
        raise OrchError(problem, Exit.CAPACITY)


def _bridge(level: int, switch: int) -> str:
    return f"s{level}-{switch}"


def _port(index: int) -> str:
    return f"p{index}"


def _set_port(holders: Iterable[int], switches: int, index: int, state: str) -> None:
    for pid in holders:
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{switches}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            _batch("ip", descriptor, [f"link set dev {_port(index)} {state}"])
            return
        except OrchError:  # another process has that number by now
            continue
        finally:
            os.close(descriptor)
    raise OrchError("nothing of the run holds its network any more", Exit.CAPACITY)


def _batch(
    tool: str, namespace: int, lines: Sequence[str], descriptors: Sequence[int] = ()
) -> None:
    """Run `tool` on many lines in a namespace, keeping `descriptors` open for it. Raises OrchError
    (76)."""
    try:
        completed = subprocess.run(
            [tool, "-batch", "-"],
            input="\n".join([*lines, ""]).encode(),
            capture_output=True,
            pass_fds=descriptors,
            preexec_fn=lambda: _enter_namespace(namespace),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise OrchError(f"{_REQUIREMENT} ({tool}: {error})", Exit.CAPACITY) from None
    if completed.returncode:
        errors = " ".join(completed.stderr.decode(errors="replace").split())
        raise OrchError(f"{tool} refuses a line of the run's network: {errors}", Exit.CAPACITY)


def _enter_namespace(namespace: int) -> None:
    _system_call("setns", namespace, _CLONE_NEWNET)


def _system_call(name: str, *arguments: int) -> None:
    """A system call of this thread, through libc. Raises OrchError (76)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_int(value) for value in arguments)):
        problem = os.strerror(ctypes.get_errno())
        raise OrchError(f"{_REQUIREMENT} ({name}: {problem})", Exit.CAPACITY)

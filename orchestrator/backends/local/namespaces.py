"""Simulates a cluster's network on one Linux machine: a network namespace per node, bridges for
switches, and links of a given rate.

Every node of a run gets a namespace of its own with two interfaces: `lo`, over which its ranks
reach each other at the speed of memory, and `eth0`, whose packets leave and arrive at the rate of
the link (`tbf`, a token bucket, on both ends). A further namespace holds the switches: one bridge
for each switch of each level of the plan, joined by links of the rate that the plan's
oversubscription leaves. Bandwidth is therefore as on a cluster; latency is not (that would need
`netem`, which not every kernel has).

Nothing here has a name that another run or the host could see. A namespace exists as long as a
process or a descriptor holds it, and its interfaces, bridges and addresses vanish with it. So every
run uses the same addresses, and nothing has to be cleaned up, whichever process was killed first.
Supervisor and agents hold the namespace of the switches under the same descriptor number, by which
`cut` and `heal` find it.
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
#: Seconds' worth of traffic that may pass at once: a busy machine serves a link that late.
_BURST_S = 4e-3
_LEAST_BURST = 32 << 10  # bytes
_QUEUE = 16 << 20  # bytes that wait before a link drops packets, which hardly ever happens
#: Minimum, initial and maximum bytes of a TCP connection's buffers on a node. The send buffer is
#: small, or acknowledgements would wait behind its data in the queue of the link. The receive
#: buffer is large, since gloo does not read while it has something to write. With both, traffic in
#: two directions at once is as fast as in one.
_TCP = {"tcp_wmem": "4096 16384 131072", "tcp_rmem": "4096 8388608 8388608"}
_REQUIREMENT = (
    "a cluster in network namespaces (cluster=local_shaped) needs root and iproute2; cluster=local"
    " runs without them"
)


class Wiring(Struct, frozen=True):
    """The network to build: nodes under switches. Rates are in bytes/s, in one direction."""

    nodes: tuple[str, ...]
    link: float  # rate of each node's link
    #: Node indices under each switch of each level, innermost level first.
    levels: tuple[tuple[tuple[int, ...], ...], ...]
    #: By level: the rate from a switch to the next level, as a share (0 to 1) of its nodes' links.
    uplink: tuple[float, ...]

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
    """The network of one run, which is up from construction to `close`, and longer while a process
    runs in it."""

    def __init__(self, wiring: Wiring):
        """Builds the network. OrchError (76) when this process may not, or this kernel cannot.

        The caller must be single-threaded.
        """
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
        """A function that a child calls between fork and exec to move to that node."""
        descriptor = self._node_namespaces[node]
        return lambda: _enter_namespace(descriptor)

    def close(self) -> None:
        """Closes the namespaces.

        A process that runs on a node keeps that node's namespace alive; a holder of `switches`
        keeps the links.
        """
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _namespace(self) -> int:
        """Creates an empty network namespace, which this process does not enter.

        Returns its descriptor.
        """
        own_namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _system_call("unshare", _CLONE_NEWNET)
            descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            # a container's /proc may be read-only: then the network is less even, but works
            with contextlib.suppress(OSError):
                for name, value in _TCP.items():
                    Path("/proc/sys/net/ipv4", name).write_text(value)
            _enter_namespace(own_namespace)
            return descriptor
        finally:
            os.close(own_namespace)

    def _build(self) -> None:
        """Creates bridges and links, sets their rates, and configures the nodes' interfaces."""
        wiring = self.wiring
        namespaces = list(self._node_namespaces.values())
        switch_of_node = [
            {node: switch for switch, members in enumerate(level) for node in members}
            for level in wiring.levels
        ]
        links: list[str] = []  # lines for `ip -batch` in the namespace of the switches
        limits: list[str] = []  # lines for `tc -batch` there
        for level, switches in enumerate(wiring.levels):
            for switch, members in enumerate(switches):
                links += _bridge_lines(level, switch)
                if not level:
                    continue
                for lower in sorted({switch_of_node[level - 1][node] for node in members}):
                    self._join(level, switch, lower, links, limits)
        for index, namespace in enumerate(namespaces):
            links.append(
                f"link add {_port(index)} type veth peer name {INTERFACE} netns"
                f" /proc/self/fd/{namespace}"
            )
            links.append(_plug_line(_port(index), 0, switch_of_node[0][index]))
            limits.append(_limit_line(_port(index), wiring.link))
        _batch("ip", self.switches, links, namespaces)
        _batch("tc", self.switches, limits)
        for node, namespace in self._node_namespaces.items():
            self._configure_node(node, namespace)

    def _join(
        self,
        level: int,
        switch: int,
        lower: int,
        links: list[str],
        limits: list[str],
    ) -> None:
        """Adds the lines that join a switch with the switch `lower` of the level below it."""
        wiring = self.wiring
        up = f"u{level}-{lower}"
        down = f"d{level}-{lower}"
        links.append(f"link add {up} type veth peer name {down}")
        links.append(_plug_line(up, level - 1, lower))
        links.append(_plug_line(down, level, switch))
        nodes = len(wiring.levels[level - 1][lower])
        rate = nodes * wiring.link * wiring.uplink[level - 1]
        limits += [_limit_line(up, rate), _limit_line(down, rate)]

    def _configure_node(self, node: str, namespace: int) -> None:
        address = f"{self.wiring.address(node)}/{_PREFIX}"
        interface_lines = [
            "link set dev lo up",
            f"link set dev {INTERFACE} addrgenmode none",
            f"address add {address} dev {INTERFACE}",
            f"link set dev {INTERFACE} up",
        ]
        _batch("ip", namespace, interface_lines)
        _batch("tc", namespace, [_limit_line(INTERFACE, self.wiring.link)])


def cut(holders: Iterable[int], switches: int, index: int) -> None:
    """Pulls node `index`'s cable: packets to and from it are lost silently, as when a switch port
    fails.

    `holders`: pids of the run's supervisor and agents; `switches`: the descriptor under which they
    hold that namespace. Raises OrchError (76) when none of them runs.
    """
    _set_port(holders, switches, index, "down")


def heal(holders: Iterable[int], switches: int, index: int) -> None:
    """Plugs the node's cable in again."""
    _set_port(holders, switches, index, "up")


def check() -> None:
    """Tries it: a child process builds and drops a network of two nodes.

    OrchError (76) names the obstacle.
    """
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
            Network(
                Wiring(
                    ("a", "b"),
                    1e8,
                    (((0,), (1,)), ((0, 1),)),
                    (1.0, 1.0),
                )
            )
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


def _bridge_lines(level: int, switch: int) -> list[str]:
    bridge = _bridge(level, switch)
    return [f"link add {bridge} type bridge", f"link set dev {bridge} addrgenmode none up"]


def _plug_line(port: str, level: int, switch: int) -> str:
    """A line of `ip -batch` that attaches a port to a switch."""
    return f"link set dev {port} addrgenmode none master {_bridge(level, switch)} up"


def _limit_line(interface: str, rate: float) -> str:
    """A line of `tc -batch` that limits what an interface sends to `rate` bytes/s."""
    burst = max(_LEAST_BURST, round(rate * _BURST_S))
    bits = round(rate * 8)
    return f"qdisc add dev {interface} root tbf rate {bits}bit burst {burst} limit {_QUEUE}"


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
    raise OrchError("no live process of the run holds its network", Exit.CAPACITY)


def _batch(
    tool: str,
    namespace: int,
    lines: Sequence[str],
    descriptors: Sequence[int] = (),
) -> None:
    """Runs `tool` on many lines in a namespace, with `descriptors` open. OrchError (76) if it
    fails."""
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
    """Makes a system call for this thread through libc. OrchError (76) if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_int(value) for value in arguments)):
        problem = os.strerror(ctypes.get_errno())
        raise OrchError(f"{_REQUIREMENT} ({name}: {problem})", Exit.CAPACITY)

"""The socket of rank 0's key-value store (torch's TCPStore): opened by the agent, used by rank 0.

It listens from the moment its port is chosen until the next epoch, so nobody else can take the
port in between. It is bound to the node's address, not to all interfaces. torch's store has no
authentication: any host that can connect may list, write and delete keys. So the kernel drops
every packet that does not come from a node of the run (a classic BPF program on the socket,
which connections inherit). The nodes of the run are those whose agents have proven the run's key
to the coordinator, with all addresses of their machines. Until they are known, every packet is
dropped, and sent again by its sender.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import logging
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_BACKLOG = 4096
_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_MAX_NETWORKS = 512  # a program has at most 4096 instructions, and 20 KiB on older kernels
_MAX_ADDRESSES = 64  # addresses of one node
_NETWORK_HEADER = 0xFFF00000  # offsets of the IP header are counted from here
_SOURCE = {4: 12, 6: 8}  # IP version -> offset of the sender's address in the header
_LOAD = 0x20
_AND = 0x54
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_DROP = 0
_PASS = 0xFFFFFFFF
_INSTRUCTION = struct.Struct("=HBBI")  # code, jump if true, jump if false, operand

log = logging.getLogger("orch.store")


class StoreSocket:
    """Opens the port. `address`: where the other nodes reach this one. `port`: where it listens.

    `listens`: if false, the port is only reserved, on all addresses, for a program that opens it
    by its number with SO_REUSEADDR, as torch does. The kernel gives it to nobody who asks for a
    free port or does not set that option. `filtered`: packets of senders that were not admitted
    are dropped; not needed on the loopback.
    """

    def __init__(self, address: str, listens: bool = True, filtered: bool = True):
        self.listens = listens
        self._filtered = filtered
        self._socket = _bound(address) if listens else _reserved()
        self.port: int = self._socket.getsockname()[1]
        self._own = ipaddress.ip_address(self._socket.getsockname()[0].split("%")[0])
        self._filter([])
        if listens:  # only now: connections made before the filter would stay in the queue
            self._socket.listen(_BACKLOG)

    def __enter__(self) -> StoreSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def admit(self, addresses: Iterable[str]) -> None:
        """Admits connections from these addresses, and from this node's own; all others are not
        answered."""
        admitted = {self._own}
        for address in addresses:
            with contextlib.suppress(ValueError):
                admitted.add(ipaddress.ip_address(address.split("%")[0]))
        self._filter(covering_networks(admitted, self._own.version))
        log.info(
            "the store on %s:%d, for %d addresses (filter: %s)",
            self._own,
            self.port,
            len(admitted),
            self._filtered,
        )

    def _filter(self, admitted: list[Network]) -> None:
        if self._own.is_loopback or not self.listens or not self._filtered:
            return
        try:
            attach(self._socket, drop_others(admitted, self._own.version))
        except OSError as error:
            log.warning(
                "the store on port %d is open to every host that can reach this one: %s",
                self.port,
                error,
            )

    def close(self) -> None:
        self._socket.close()


def _bound(address: str) -> socket.socket:
    """Returns a socket that is bound to this address alone, and does not listen yet."""
    family, kind, protocol, _, socket_address = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(socket_address)
    except OSError:
        bound.close()
        raise
    return bound


def _reserved() -> socket.socket:
    """Returns a socket that is bound on all addresses and does not listen."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    return reserved


def covering_networks(
    addresses: Iterable[ipaddress.IPv4Address | ipaddress.IPv6Address], version: int
) -> list[Network]:
    """Returns the fewest networks that contain exactly these addresses; if those are more than
    512, larger ones that contain them."""
    networks: list[Network] = [
        ipaddress.ip_network(address) for address in addresses if address.version == version
    ]
    # all networks are of one version
    networks = list(ipaddress.collapse_addresses(networks))  # type: ignore[type-var]
    while len(networks) > _MAX_NETWORKS:
        longest = max(network.prefixlen for network in networks)
        wider = [
            network.supernet() if network.prefixlen == longest else network for network in networks
        ]
        networks = list(ipaddress.collapse_addresses(wider))  # type: ignore[type-var]
    return networks


def drop_others(admitted: list[Network], version: int) -> bytes:
    """Returns a classic BPF program that drops every packet whose sender is in none of the
    networks, all of one IP version."""
    program: list[tuple[int, int, int, int]] = []
    for network in admitted:
        address_words = struct.iter_unpack("!I", network.network_address.packed)
        masks = struct.iter_unpack("!I", network.netmask.packed)
        tests = [
            (4 * index, address_word, mask)
            for index, ((address_word,), (mask,)) in enumerate(
                zip(address_words, masks, strict=True)
            )
        ]
        tests = [test for test in tests if test[2]]  # words with an empty mask do not count
        for remaining, (offset, address_word, mask) in zip(
            range(len(tests) - 1, -1, -1),
            tests,
            strict=True,
        ):
            program.append((_LOAD, 0, 0, _NETWORK_HEADER + _SOURCE[version] + offset))
            program.append((_AND, 0, 0, mask))
            program.append(
                (_JUMP_EQUAL, 0, 3 * remaining + 1, address_word)
            )  # unequal: to the next network
        program.append((_RETURN, 0, 0, _PASS))
    program.append((_RETURN, 0, 0, _DROP))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def attach(listening: socket.socket, program: bytes) -> None:
    """Makes the kernel pass every packet for this socket through the program, which replaces an
    earlier one. OSError."""
    content = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack(
        "HL",
        len(program) // _INSTRUCTION.size,
        ctypes.addressof(content),
    )
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)


def own_addresses(proc: Path = Path("/proc/self/net")) -> list[str]:
    """Returns all IP addresses of this machine's interfaces (in this network namespace), without
    those of the loopback.

    Returns none if there are more than 64: some cluster networks give every node the addresses
    of all services.
    """
    addresses: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (proc / "fib_trie").read_text().splitlines()
        for line, next_line in itertools.pairwise(lines):
            if next_line.strip() == "/32 host LOCAL":
                addresses.add(line.split()[-1])
    with contextlib.suppress(OSError):
        for line in (proc / "if_inet6").read_text().splitlines():
            addresses.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    reachable = sorted(
        address for address in addresses if not ipaddress.ip_address(address).is_loopback
    )
    return reachable if len(reachable) <= _MAX_ADDRESSES else []

"""Packets between agent, warden and nursery: one JSON object each, over a Unix socketpair of type SEQPACKET."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

LARGEST_PACKET = 1 << 17  # bytes


def waiting_packets(peer: socket.socket) -> Iterator[dict | None]:
    """What can be read without waiting, in order; None, the last, says that the peer is gone."""
    while True:
        try:
            packet = peer.recv(LARGEST_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            yield None
            return
        yield json.loads(packet)

"""The cheapest path that each axis could have on a cluster, whatever the nesting order: a lower bound of its cost.

Tensor-parallel groups lie inside one NVLink domain (a rule, unless they may leave), so a block of G GPUs holds at most
G / tp members of any other group. A group with more members leaves the block; how often at least, over how many NICs at
most and with what latency follows from that number, tier by tier.
"""

from __future__ import annotations

from orchestrator.plan.cluster import NVLINK
from orchestrator.planner.cost.fabric import NOWHERE, Fabric, Path


class BestPaths:
    def __init__(self, fabric: Fabric, confined: bool):
        """`confined`: tensor-parallel groups may not leave their NVLink domain."""
        self.confined = confined
        self.blocks = [int(gpus.max()) for gpus in fabric.gpus]  # GPUs of the largest block of each tier
        self.inside = 1.0 / float(fabric.rate[0])
        self.share = 1.0 / float(fabric.rate[1:].max())  # over one GPU's share of the NICs, nothing else in the way
        self.own_nic = self.share / max(1.0, 1.0 / fabric.nics_per_gpu)
        self._rings: dict[tuple[int, int, int], Path] = {}
        self._chains: dict[tuple[int, int, bool], Path] = {}
        self.latency = [float(fabric.latency[tier:].min()) for tier in range(len(self.blocks))]  # of this tier or above

    def mates(self, tp: int, tier: int = 0) -> int:
        """Most members of a group, of any axis but tp, in one block."""
        return max(1, self.blocks[tier] // tp) if self.confined else self.blocks[tier]

    def ring(self, members: int, tp: int, beside: int = 1) -> Path:
        """Members of one domain share its NICs; at least one hop of each ring leaves each block that cannot hold it.

        `beside`: members of another axis that have their places in the same domain.
        """
        key = members, tp, beside
        if key not in self._rings:
            self._rings[key] = self._ring(members, tp, beside)
        return self._rings[key]

    def _ring(self, members: int, tp: int, beside: int) -> Path:
        if members == 1:
            return NOWHERE
        mates = -(-self.mates(tp) // beside)
        if members <= mates:
            per_byte = min(self.inside, self.share / members, self.own_nic)
        elif mates > 1:
            per_byte = min(self.own_nic, max(self.inside, self.share / mates))
        else:
            per_byte = self.own_nic
        turn, hops = 0.0, members
        for tier in range(len(self.blocks)):  # hops that stay below a tier, by the blocks that the ring must visit
            room = mates if tier == 0 else self.mates(tp, tier)
            leaving = -(-members // room) if members > room else 0
            turn += (hops - leaving) * self.latency[tier]
            hops = leaving
        hop = self.latency[1] if members > mates else self.latency[0]
        return Path(per_byte, max(hop, self._hop(members, tp)), turn, NVLINK, {})

    def tensor(self, tp: int) -> Path:
        if tp == 1:
            return NOWHERE
        if not self.confined:
            return self.ring(tp, 1)
        return Path(self.inside, self.latency[0], tp * self.latency[0], NVLINK, {})

    def chain(self, members: int, tp: int, near: bool = True) -> Path:
        """Point to point with the next member, over one's own NIC where it stands elsewhere. `near`: it need not."""
        key = members, tp, near
        if key not in self._chains:
            self._chains[key] = self._chain(*key)
        return self._chains[key]

    def _chain(self, members: int, tp: int, near: bool) -> Path:
        if members == 1:
            return NOWHERE
        if members > self.mates(tp) or not near:
            return Path(self.own_nic, max(self.latency[1], self._hop(members, tp)), 0.0, NVLINK, {})
        return Path(min(self.inside, self.own_nic), self.latency[0], 0.0, NVLINK, {})

    def exchange(self, members: int, tp: int) -> Path:
        """Everyone to everyone: what does not stay in the domain goes over its NICs."""
        if members == 1:
            return NOWHERE
        outside = max(0, members - self.mates(tp)) / (members - 1)
        per_byte = outside * min(self.share, self.own_nic) if outside else min(self.inside, self.own_nic)
        return Path(per_byte, self._hop(members, tp), 0.0, NVLINK, {})

    def _hop(self, members: int, tp: int) -> float:
        """Latency of the longest hop: of the first tier whose blocks can hold the group."""
        tiers = range(len(self.blocks))
        return self.latency[next((tier for tier in tiers if members <= self.mates(tp, tier)), tiers[-1])]

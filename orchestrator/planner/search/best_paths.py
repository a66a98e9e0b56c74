"""The cheapest path that each axis could have on a cluster in any nesting order: a lower bound of its communication.

Tensor-parallel groups lie inside one NVLink domain (a rule, unless `allow_tp_across_nvlink`), so a block of G GPUs
holds at most G / tp members of any other group. A group with more members must leave the block; how often, over how
many NICs and with what latency follows from that number, tier by tier.
"""

from __future__ import annotations

from functools import cache

from orchestrator.plan.cluster import NVLINK
from orchestrator.planner.cost.fabric import NO_PATH, Fabric, Path


class BestPaths:
    def __init__(self, fabric: Fabric, confined: bool):
        """`confined`: tensor-parallel groups stay inside their NVLink domain."""
        self.confined = confined
        self.blocks = [int(gpus.max()) for gpus in fabric.gpus]  # GPUs of the largest block of each tier
        self.inside = 1.0 / float(fabric.rate[0])
        self.share = 1.0 / float(fabric.rate[1:].max())  # s/byte over one GPU's share of the NICs
        self.own_nic = self.share / max(1.0, 1.0 / fabric.nics_per_gpu)
        self.ring, self.chain = cache(self._ring), cache(self._chain)
        self.latency = [float(fabric.latency[tier:].min()) for tier in range(len(self.blocks))]  # of this tier or above

    def members_in_block(self, tp: int, tier: int = 0) -> int:
        """Most members that a group of any axis but tp can have in one block of a tier."""
        return max(1, self.blocks[tier] // tp) if self.confined else self.blocks[tier]

    def _ring(self, members: int, tp: int, sharing: int = 1) -> Path:
        """Best path of a ring: its members in one domain share the domain's NICs.

        `sharing`: members of another axis that lie in the same domain. At least one hop leaves each block that cannot
        hold the whole group.
        """
        if members == 1:
            return NO_PATH
        members_in_block = -(-self.members_in_block(tp) // sharing)
        if members <= members_in_block:
            per_byte = min(self.inside, self.share / members, self.own_nic)
        elif members_in_block > 1:
            per_byte = min(self.own_nic, max(self.inside, self.share / members_in_block))
        else:
            per_byte = self.own_nic
        turn, hops = 0.0, members
        for tier in range(len(self.blocks)):  # hops below a tier follow from the number of blocks that the ring visits
            room = members_in_block if tier == 0 else self.members_in_block(tp, tier)
            leaving = -(-members // room) if members > room else 0
            turn += (hops - leaving) * self.latency[tier]
            hops = leaving
        hop = self.latency[1] if members > members_in_block else self.latency[0]
        return Path(per_byte, max(hop, self._hop(members, tp)), turn, NVLINK, {})

    def tensor(self, tp: int) -> Path:
        if tp == 1:
            return NO_PATH
        if not self.confined:
            return self.ring(tp, 1)
        return Path(self.inside, self.latency[0], tp * self.latency[0], NVLINK, {})

    def _chain(self, members: int, tp: int, near: bool = True) -> Path:
        """Best path to the next member, over the GPU's own NIC where that is on another node.

        `near`: neighbours may lie in one domain.
        """
        if members == 1:
            return NO_PATH
        if members > self.members_in_block(tp) or not near:
            return Path(self.own_nic, max(self.latency[1], self._hop(members, tp)), 0.0, NVLINK, {})
        return Path(min(self.inside, self.own_nic), self.latency[0], 0.0, NVLINK, {})

    def exchange(self, members: int, tp: int) -> Path:
        """Best path of an all-to-all: bytes for members outside the domain go over its NICs."""
        if members == 1:
            return NO_PATH
        outside = max(0, members - self.members_in_block(tp)) / (members - 1)
        per_byte = outside * min(self.share, self.own_nic) if outside else min(self.inside, self.own_nic)
        return Path(per_byte, self._hop(members, tp), 0.0, NVLINK, {})

    def _hop(self, members: int, tp: int) -> float:
        """Latency of the longest hop: that of the lowest tier whose blocks can hold the group."""
        tiers = range(len(self.blocks))
        return self.latency[next((tier for tier in tiers if members <= self.members_in_block(tp, tier)), tiers[-1])]

"""The cheapest path that each axis could have on a cluster in any nesting order.

Such paths give a lower bound of the communication. Tensor-parallel groups lie inside one NVLink
domain (a rule, unless `allow_tp_across_nvlink`), so a block of G GPUs holds at most G / tp members
of any other group. A group with more members must leave the block; how often, over how many NICs
and with what latency follows from that number, tier by tier. Traffic that may stay inside a domain
or leave it gets the seconds of NVLink, or fewer if the network is faster.
"""

from __future__ import annotations

from functools import cache

from msgspec import structs

from orchestrator.cost.dual import value_of
from orchestrator.cost.rates import Rates
from orchestrator.cost.time.fabric import NO_PATH, Fabric, Path
from orchestrator.cost.time.traffic import DENSE_REPLICAS, PathKey
from orchestrator.plan.cluster import NVLINK
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_mesh import axes, expert_mesh, replicas
from orchestrator.plan.hierarchy import hold_groups
from orchestrator.planner.placement.lower_bound import nvlink_over_fabric

from .layout import Mesh


def _path(
    nvlink_s: float,
    fabric_s: float,
    hop_s: float,
    ring_latency_s: float = 0.0,
) -> Path:
    """Returns a path of which only the time matters, not the levels that it crosses."""
    return Path(
        nvlink_s=nvlink_s,
        fabric_s=fabric_s,
        hop_s=hop_s,
        ring_latency_s=ring_latency_s,
        worst_level=NVLINK,
        share={},
    )


class BestPaths:
    """The best paths of the groups of any mesh on one cluster."""

    def __init__(self, fabric: Fabric, rate: Rates, confined: bool):
        """`confined` keeps tensor-parallel groups inside their NVLink domain."""
        self.confined = confined
        self.links = rate.ring
        self.ratio = nvlink_over_fabric(rate)
        # GPUs of the largest block of each tier.
        self.blocks = [int(gpus.max()) for gpus in fabric.gpus]
        self.fabric = fabric
        self.inside = 1.0 / float(fabric.rate[0])
        # seconds per byte over one GPU's share of the NICs
        self.share = 1.0 / float(fabric.rate[1:].max())
        self.own_nic = self.share / max(1.0, 1.0 / fabric.nics_per_gpu)
        # The lowest latency of each tier and those above it.
        self.latency = [float(fabric.latency[tier:].min()) for tier in range(len(self.blocks))]
        self._ring = cache(self.ring)
        self._chain = cache(self.chain)
        self._exchange = cache(self.exchange)

    def possible(self, mesh: Mesh, near: bool) -> bool:
        """Reports whether stages can lie inside an NVLink domain (`near`), or outside.

        Without a pipeline one nesting is enough.
        """
        return mesh.pp <= self.members_in_block(mesh.tp) if near else mesh.pp > 1

    def paths(self, mesh: Mesh, near: bool) -> dict[PathKey, Path]:
        """Returns the best paths of a mesh.

        With `near`, stages lie inside an NVLink domain and leave less of it to other rings.
        """
        tp = mesh.tp
        cp = mesh.cp
        dense_replicas = cp * mesh.ep * mesh.dp
        etp, experts, edp = expert_mesh(mesh)
        alike = replicas(mesh)
        sharing = mesh.pp if near else 1
        return {
            (("tp",), "ring"): self.tensor(tp),
            (("cp",), "ring"): self._ring(cp, tp),
            (("cp",), "chain"): self._chain(cp, tp),
            (("cp",), "exchange"): self._exchange(cp, tp),
            (axes(mesh), "exchange"): self._exchange(experts, etp),
            (("pp",), "chain"): self._chain(mesh.pp, tp, near),
            (DENSE_REPLICAS, "ring"): self._ring(dense_replicas, tp, sharing),
            (alike, "ring"): self._ring(edp, tp, sharing),
            # Narrow gradients go straight to the rank that sums them.
            (DENSE_REPLICAS, "exchange"): self._exchange(dense_replicas, tp),
            (alike, "exchange"): self._exchange(edp, tp),
            # The rings of a bidirectional pipeline, whose two ends hold the same layers: their
            # length does not depend on the rank.
            ((*DENSE_REPLICAS, "pp"), "ring"): self._ring(2 * dense_replicas, tp),
            ((*alike, "pp"), "ring"): self._ring(2 * edp, tp),
            ((*DENSE_REPLICAS, "pp"), "exchange"): self._exchange(2 * dense_replicas, tp),
            ((*alike, "pp"), "exchange"): self._exchange(2 * edp, tp),
        }

    def per_byte(self, path: Path) -> float:
        """Returns the seconds per byte of a ring."""
        return max(
            path.nvlink_s / value_of(self.links.nvlink),
            path.fabric_s / value_of(self.links.nic),
        )

    def members_in_block(self, tp: int, tier: int = 0) -> int:
        """Returns the most members of a group of any axis but tp in one block of a tier."""
        return max(1, self.blocks[tier] // tp) if self.confined else self.blocks[tier]

    def _near(self, alone: float) -> float:
        """Returns seconds per byte on NVLink that exceed neither those inside a domain nor `alone`.

        `alone` is the time of a single GPU on the network. If no hop of any ring lies inside a
        domain, all GPUs of a domain send out of it at once.
        """
        return min(self.inside, alone * self.ratio)

    def ring(self, members: int, tp: int, sharing: int = 1) -> Path:
        """Returns the best path of a ring, whose members in one domain share the domain's NICs.

        `sharing` members of another axis lie in the same domain. At least one hop leaves each block
        that cannot hold the whole group.
        """
        if members == 1:
            return NO_PATH
        members_in_block = -(-self.members_in_block(tp) // sharing)
        turn = 0.0
        hops = members
        # The hops below a tier follow from the number of blocks that the ring visits.
        for tier in range(len(self.blocks)):
            room = members_in_block if tier == 0 else self.members_in_block(tp, tier)
            leaving = -(-members // room) if members > room else 0
            turn += (hops - leaving) * self.latency[tier]
            hops = leaving
        hop = self.latency[1] if members > members_in_block else self.latency[0]
        hop = max(hop, self._hop(members, tp))
        if members <= members_in_block:
            return _path(self._near(self.share), 0.0, hop, turn)
        if members_in_block > 1:
            fabric = min(self.own_nic, self.share / members_in_block)
            return _path(self._near(self.share), fabric, hop, turn)
        return _path(0.0, self.own_nic, hop, turn)

    def tensor(self, tp: int) -> Path:
        """Returns the best path of a tensor-parallel ring."""
        if tp == 1:
            return NO_PATH
        if not self.confined:
            return self._ring(tp, 1)
        inside = self.fabric.domain_seconds(tp)
        return _path(inside, 0.0, self.latency[0], tp * self.latency[0])

    def chain(self, members: int, tp: int, near: bool = True) -> Path:
        """Returns the best path to the next member, over the GPU's own NIC between nodes.

        With `near`, neighbours may lie in one domain.
        """
        if members == 1:
            return NO_PATH
        if members > self.members_in_block(tp) or not near:
            return _path(
                0.0,
                self.own_nic,
                max(self.latency[1], self._hop(members, tp)),
            )
        return _path(self._near(self.own_nic), 0.0, self.latency[0])

    def by_domain(self, members: int, etp: int, moe: Moe) -> list[Path]:
        """Returns the best paths of an all-to-all by domain, one per number of members inside."""
        largest = min(members, self.members_in_block(etp))
        inside = [count for count in range(1, largest + 1) if members % count == 0]
        return [
            self._parted(members, etp, count)
            for count in inside
            if hold_groups(moe, members // count)
        ]

    def _parted(self, members: int, etp: int, inside: int) -> Path:
        """Returns the path of an all-to-all with `inside` members in each domain."""
        near = (inside - 1) / (members - 1)
        hop = self._hop(members, etp)
        if inside == members:
            return self._exchange(members, etp)
        far = (1 - near) * min(self.share, self.own_nic)
        return structs.replace(
            _path(near * self.inside, far, hop),
            share={NVLINK: near},
        )

    def exchange(self, members: int, tp: int) -> Path:
        """Returns the best path of an all-to-all; bytes that leave the domain use its NICs.

        `tp` is the number of tp ranks that are in groups of their own.
        """
        if members == 1:
            return NO_PATH
        outside = max(0, members - self.members_in_block(tp)) / (members - 1)
        hop = self._hop(members, tp)
        if outside:
            return _path(0.0, outside * min(self.share, self.own_nic), hop)
        # A group in two halves sends half of its bytes out of the domain.
        return _path(self._near(self.own_nic / 2), 0.0, hop)

    def _hop(self, members: int, tp: int) -> float:
        """Returns the latency of the longest hop, on the lowest tier that can hold the group."""
        tiers = range(len(self.blocks))
        return self.latency[
            next((tier for tier in tiers if members <= self.members_in_block(tp, tier)), tiers[-1])
        ]

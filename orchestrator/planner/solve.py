"""Degrees -> the best nesting order for them, and the time and memory that they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan import document as doc
from orchestrator.plan.ranks import AXES

from .cost import step_time
from .cost.compute import Rates, rates
from .cost.profile import Profile, profile_of
from .cost.traffic import Traffic, step_traffic
from .placement.nesting import Candidate, Roads, candidates, choose


class Ground:
    """One model on one cluster: what every choice of degrees shares, computed once."""

    def __init__(self, cluster: doc.Cluster, model: doc.Model, train: doc.Train, roads: Roads | None = None):
        """`roads`: the cluster's, where somebody has them already."""
        self.cluster, self.model, self.train = cluster, model, train
        self.profile: Profile = profile_of(cluster)
        self.roads = roads or Roads(cluster, self.profile)
        self.rate: Rates = rates(cluster, self.profile, train.precision)
        self.level_names = [level.name for level in cluster.levels]


class Solution(NamedTuple):
    """Degrees with the best nesting order for them, and what they cost."""

    parallel: doc.Parallel
    best: Candidate
    traffic: list[Traffic]
    time: doc.Time


def solve(
    ground: Ground, parallel: doc.Parallel, only: Sequence[doc.Axis] | None = None, train: doc.Train | None = None
) -> Solution:
    """The cheapest order of `parallel` (or the order `only`). `train` may differ from the ground's in recompute."""
    train = train or ground.train
    traffic = step_traffic(ground.model, parallel, train)
    work = step_time.step_work(ground.model, parallel, train, ground.rate)
    best = choose(candidates(ground.roads, parallel, traffic, work, only), ground.level_names)
    parallel = structs.replace(parallel, order=list(best.order))
    outside = [axis for axis in AXES if best.outside_nvlink(axis)]
    return Solution(parallel, best, traffic, step_time.predict(work, best.exposed, parallel, outside))

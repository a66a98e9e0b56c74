"""The hub of all costs: one model on one cluster, and everything that its layouts' costs share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from msgspec import UNSET, structs

from orchestrator.cost.buckets import bucket_size
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.cost.time.compute import Compute, micro_batch_compute
from orchestrator.cost.time.imbalance import load_factor, spread_name
from orchestrator.cost.time.step_time import Work, step_work
from orchestrator.cost.workload import Workload
from orchestrator.plan.batch import suited_pieces
from orchestrator.plan.document import Cluster, Matmul, Model, Parallel, Train
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.offload import comm_buffer_of

from .dual import Number
from .path_cache import PathCache
from .profile import Profile, shipped
from .rates import Rates, rates
from .software import SOFTWARE, Software


class CostContext:
    """One model on one cluster: the values that the costs of all layouts share, computed once."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        train: Train,
        path_cache: PathCache | None = None,
        *,
        matmul: Matmul = "",
        software: Software = SOFTWARE["orch"],
        profile: Profile | None = None,
        imbalance: float | None = None,
        assumed: Mapping[str, float] | None = None,
        state: str = "",
        isolated: bool = False,
        given_buckets: bool = False,
        **job: Any,
    ):
        """`path_cache` is the cluster's, if there is one already.

        `imbalance` is the load factor of the experts' ranks, if it is given. `assumed` holds the
        values of the profile with which a plan was made, if they are not this profile's.
        `isolated`: packed documents do not see each other. `given_buckets`: the size of gradient
        buckets is not to be chosen. `job` holds task and slow_fabric, as `rates` takes them.
        """
        self.cluster = cluster
        self.model = model
        self.train = train
        self.software = software
        self.matmul = matmul
        self.profile = profile or shipped()
        self.job = job
        self.imbalance = imbalance
        self.assumed = assumed or self.profile.values
        self.state = state
        self.isolated = isolated
        self.given_buckets = given_buckets
        self.path_cache = path_cache or PathCache(cluster)
        self.level_names = [level.name for level in cluster.levels]
        #: True if the job takes the first nodes of the cluster; otherwise it may take any.
        self.nodes_are_chosen = False
        self._compute: dict[tuple[object, ...], Compute] = {}
        #: The training keys with each recomputation mode.
        self.trains = {
            mode: structs.replace(train, recompute=mode) for mode in ("none", "selective", "full")
        }

    @cached_property
    def rate(self) -> Rates:
        """The rates at the values of the profile."""
        return self.rates(self.profile.values)

    def rates(self, values: Mapping[str, Number]) -> Rates:
        """Returns the rates at these values of the profile's parameters."""
        name = self.model.moe and spread_name(self.model.moe)
        spread = values[name] / self.assumed[name] if name else 1.0
        return rates(
            self.cluster,
            values,
            self.train.precision,
            self.software,
            self.matmul,
            expert_spread=spread,
            **self.job,
        )

    def completed(self, parallel: Parallel) -> Parallel:
        """Returns `parallel` with what the context knows of it.

        That is the load of its fullest expert rank, given or from the profile, and the pieces of
        this project's tensor parallelism, unless they are given.
        """
        return self._balanced(self._in_pieces(parallel))

    def _in_pieces(self, parallel: Parallel) -> Parallel:
        if self.matmul:  # products in 8 bits take one scale from all tokens
            return structs.replace(parallel, tp_pieces=UNSET)
        is_given = parallel.tp_pieces is not UNSET
        if is_given or self.cluster.device == "cpu" or not self.software.tp_pieces:
            return parallel
        tokens = parallel.micro_batch_size * self.train.seq_len // parallel.cp
        pieces = suited_pieces(parallel.tp, tokens, self.model.hidden)
        return structs.replace(parallel, tp_pieces=pieces) if pieces > 1 else parallel

    def _balanced(self, parallel: Parallel) -> Parallel:
        moe = self.model.moe
        if moe is None or expert_mesh(parallel).ep == 1:
            return parallel
        factor = self.imbalance or load_factor(
            self.model,
            parallel,
            self.profile.values[spread_name(moe)],
        )
        return structs.replace(
            parallel, expert_imbalance=UNSET if factor == 1 else float(f"{factor:.4g}")
        )

    def with_buckets(self, parallel: Parallel) -> Parallel:
        """Returns `parallel` with gradient buckets that suit it, unless their size is given."""
        if self.given_buckets:
            return parallel
        width = DTYPE_BYTES[self.train.grad_dtype]
        buckets = bucket_size(self.model, parallel, width, comm_buffer_of(self.train))
        return structs.replace(parallel, bucket_bytes=buckets.size)

    def on(self, cluster: Cluster, path_cache: PathCache | None = None) -> CostContext:
        """Returns the context of the same job on another cluster."""
        return CostContext(
            cluster,
            self.model,
            self.train,
            path_cache,
            matmul=self.matmul,
            software=self.software,
            profile=self.profile,
            imbalance=self.imbalance,
            assumed=self.assumed,
            state=self.state,
            isolated=self.isolated,
            given_buckets=self.given_buckets,
            **self.job,
        )

    def training(self, train: Train) -> CostContext:
        """Returns the context of the same job with its training keys resolved."""
        context = copy.copy(self)
        context.train = train
        return context

    def workload(self, parallel: Parallel, train: Train | None = None) -> Workload:
        """Returns the model in a layout, with the context's training keys or `train`."""
        return Workload(
            self.model,
            parallel,
            train or self.train,
            self.software,
            self.isolated,
        )

    def work(self, parallel: Parallel, train: Train, rate: Rates | None = None) -> Work:
        """Returns the compute of a step in this layout, at the context's rates or `rate`."""
        return step_work(
            self.workload(parallel, train),
            rate or self.rate,
            self.cluster.gpus_per_node,
            compute=None if rate else self.compute(parallel),
            cluster=self.cluster,
            state=self.state,
        )

    def compute(self, parallel: Parallel) -> Compute:
        """Returns the compute of a micro-batch, once for all layouts with equal shards of it."""
        tokens = parallel.micro_batch_size / parallel.cp
        ring = parallel.cp_method == "ring"
        experts = *expert_mesh(parallel)[:2], parallel.expert_imbalance
        key = (
            parallel.tp,
            experts,
            parallel.sp,
            tokens,
            parallel.cp if ring else min(parallel.cp, 2),
        )
        if key not in self._compute:
            self._compute[key] = micro_batch_compute(self.workload(parallel), self.rate)
        return self._compute[key]

    def with_chosen_nodes(self) -> CostContext:
        """Returns the context of a job whose nodes are chosen: the first ones of the cluster."""
        context = copy.copy(self)
        context.nodes_are_chosen = True
        return context

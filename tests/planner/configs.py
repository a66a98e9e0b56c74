"""Typed configs made by hand, so that planner tests need no Hydra."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import structs

from orchestrator.cluster.resolve import resolve
from orchestrator.config.schema import ClusterSpec, Config, ModelSpec
from orchestrator.cost.context import CostContext
from orchestrator.cost.path_cache import PathCache
from orchestrator.cost.time.step_time import Work
from orchestrator.cost.time.traffic import Traffic, step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan import Plan
from orchestrator.plan.cluster import NVLINK
from orchestrator.plan.document import Cluster, Model, Parallel
from orchestrator.planner import build
from orchestrator.planner.search.search import Search

from . import shapes

SOURCE = "test"
H100 = {
    "name": "H100-SXM5-80GB",
    "memory_gib": 79.6,
    "peak_tflops": {"fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
    "hbm_gb_per_s": 3350,
    "source": SOURCE,
}


def cluster(
    nodes: int = 8,
    gpus: int = 8,
    levels: list[tuple[str, int | list[int], float]] | None = None,
    domain_nodes: int = 1,
    **fields: Any,
) -> ClusterSpec:
    """DGX H100 nodes. levels: (name, nodes per switch, oversubscription), innermost first; default
    as h100x64."""
    levels = [("leaf", 4, 1.0), ("spine", nodes, 1.0)] if levels is None else levels
    return msgspec.convert(
        {
            "name": f"h100x{nodes * gpus}",
            "device": "cuda",
            "nodes": nodes,
            "gpus_per_node": gpus,
            "gpu": H100,
            "nvlink": {
                "domain_nodes": domain_nodes,
                "gb_per_s": 450,
                "latency_us": 3.4,
                "source": SOURCE,
            },
            "nic": {
                "per_node": gpus,
                "rails": gpus,
                "gbit_per_s": 400,
                "latency_us": 9.6,
                "source": SOURCE,
            },
            "levels": [
                {
                    "name": name,
                    "nodes_per_switch": per_switch,
                    "oversubscription": over,
                    "gbit_per_s": 400,
                }
                | {"latency_us": 9.6 + 0.5 * index, "source": SOURCE}
                for index, (name, per_switch, over) in enumerate(levels)
            ],
            **fields,
        },
        ClusterSpec,
    )


def config(
    cluster_spec: ClusterSpec, model: Model, parallel: dict[str, Any] | None = None, **train: Any
) -> Config:
    """A whole job; `train` holds keys of `TrainSpec`."""
    values = {"steps": 100, "seq_len": 8192, "global_batch_samples": 1024, **train}
    shape = structs.asdict(model)
    del shape["parameters"]
    if "global_batch_tokens" in values:
        del values["global_batch_samples"]
    return msgspec.convert(
        {
            "cluster": cluster_spec,
            "model": ModelSpec(**shape),
            "parallel": parallel or {},
            "data": {
                "name": "stdlib",
                "paths": ["stdlib"],
                "extensions": [".py"],
                "demo": True,
                "cache_dir": "data",
            },
            "optim": {"lr": 3e-4},
            "train": values,
            "checkpoint": {},
            "metrics": {},
            "backend": {"name": "local"},
        },
        Config,
        from_attributes=True,
    )


def build_plan(config: Config) -> Plan:
    """Builds the plan on the cluster as its entry or file describes it, without measured
    figures."""
    return build.build_plan(config, resolve(config.cluster))


def planned(
    model: Model, parallel: dict[str, Any], spec: ClusterSpec | None = None, **train: Any
) -> Plan:
    """The plan of such a job, on h100x64 unless told otherwise."""
    return build_plan(config(spec or cluster(), model, parallel, **train))


@cache
def main_line() -> Plan:
    return planned(shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 1})


@cache
def largest() -> Plan:
    """A plan on the largest cluster of the catalogue, with a ragged last pod."""
    spec = cluster(
        2048, 8, [("rack", 2, 1.0), ("pod", [384] * 5 + [128], 7.0), ("core", 2048, 1.0)]
    )
    return planned(
        shapes.llama3_405b(), {"tp": 8, "pp": 16, "zero": 1}, spec, global_batch_samples=2048
    )


def search(config: Config, any_layout: bool = False) -> Search:
    return Search(config, resolve(config.cluster), any_layout)


def level_between(cluster: Cluster, node_a: int, node_b: int) -> str:
    """Name of the tier on which two nodes meet: "nvlink" inside one domain, else the lowest common
    switch's level."""
    for name, blocks in [
        (NVLINK, cluster.nvlink_domains),
        *((lv.name, lv.switches) for lv in cluster.levels),
    ]:
        if any(node_a in block and node_b in block for block in blocks):
            return name
    raise ValueError(f"nodes {node_a} and {node_b} have no common switch")


def costing(plan: Plan, cluster: Cluster) -> tuple[PathCache, Parallel, list[list[Traffic]], Work]:
    """What the costs of a plan's degrees on a cluster follow from: the arguments of `candidates`
    and `place_nodes`."""
    context = CostContext(cluster, plan.model, plan.job.train)
    train = plan.job.train
    traffic = step_traffic(Workload(plan.model, plan.parallel, train, context.software))
    return context.path_cache, plan.parallel, traffic, context.work(plan.parallel, train)

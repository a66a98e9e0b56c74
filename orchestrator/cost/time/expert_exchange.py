"""The effect of the hierarchical all-to-all (`orchestrator.plan.hierarchy`) on the bytes sent.

It sends less on the network and more inside a domain. In a direct exchange, a rank sends each copy
of a token to its expert's rank: L - 1 of the n - 1 others are in its NVLink domain. By domain, a
rank sends each token once to every domain that holds some of its experts, and all copies that land
in a domain are spread over its L ranks. All choices are taken to be equally likely.
"""

from __future__ import annotations

from msgspec import structs

from orchestrator.plan.cluster import NVLINK
from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.hierarchy import landings

from .fabric import Path
from .layer_traffic import Carried


def phases(
    path: Path,
    model: Model,
    parallel: Parallel,
    carried: Carried = "rows",
) -> list[Path]:
    """Returns the consecutive phases of an exchange.

    A direct exchange has one. By domain, the bytes go between domains and then inside them. Their
    `share` is relative to the bytes of the direct exchange.
    """
    factors = level_factors(path, model, parallel)
    if factors is None:
        return [] if carried == "names" else [path]
    nvlink, network = factors
    if carried != "rows":  # each copy has its own label
        nvlink = nvlink if carried == "copies" else 0.0
        network = 1.0
    spread = {level: share * network for level, share in path.share.items() if level != NVLINK}
    between = structs.replace(
        path,
        nvlink_s=0.0,
        fabric_s=path.fabric_s * network,
        share=spread,
    )
    within = {NVLINK: path.share.get(NVLINK, 0.0) * nvlink}
    inside = structs.replace(
        path,
        fabric_s=0.0,
        nvlink_s=path.nvlink_s * nvlink,
        share=within,
        stretch={},
    )
    return [between, inside] if path.nvlink_s else [between]


def level_factors(
    path: Path,
    model: Model,
    parallel: Parallel,
) -> tuple[float, float] | None:
    """Returns the factors of the direct exchange's bytes: (on NVLink, on the network).

    Returns None if the exchange is direct.
    """
    if parallel.expert_all_to_all != "hierarchical" or model.moe is None:
        return None
    ranks = expert_mesh(parallel).ep
    inside = round(1 + path.share.get(NVLINK, 0.0) * (ranks - 1))
    domains = ranks // inside
    if domains == 1:
        return None
    network = landings(model.moe, domains) / model.moe.top_k
    return float(domains), network

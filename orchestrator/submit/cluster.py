"""What planning needs from this machine: the user's home folder, measured records and the site's
profile, bad nodes, the running clusters."""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.cluster.measured import site_profile_path
from orchestrator.cluster.resolve import Sources, resolve
from orchestrator.config.schema import ClusterSpec, Config
from orchestrator.plan.document import Cluster

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.cluster.measured import Record
    from orchestrator.cluster.model import Topology
    from orchestrator.planner.cost.profile import Profile


def at_home(config: Config, home: Path) -> Config:
    """The configuration with the folder of token files, where none was given."""
    if config.data.cache_dir is not None:
        return config
    return structs.replace(config, data=structs.replace(config.data, cache_dir=str(home / "data")))


class ClusterResolver:
    """Resolves the cluster entries of one command. Each running cluster is asked once, bad nodes
    are named once."""

    def __init__(self, home: Path):
        self._home = home
        self._bad: dict[str, list[str]] = {}
        self._sources = Sources(
            measured=self._measured, live=cache(_live), bad_nodes=self.bad_nodes
        )

    def __call__(self, spec: ClusterSpec) -> Cluster:
        """`resolve` with this machine's sources. OrchError: 65, 76 as there; 76, 78 from the
        running cluster."""
        return resolve(spec, self._sources)

    def bad_nodes(self, cluster: str) -> list[str]:
        """Nodes of the cluster that earlier runs of this user have found bad (`orch nodes`), named
        on stderr."""
        if cluster not in self._bad:
            from orchestrator.run.bad_nodes import NodeMemory

            bad_nodes = [entry.node for entry in NodeMemory(self._home).read(time.time(), cluster)]
            if bad_nodes:
                print(
                    f"orch: without {', '.join(bad_nodes)}, found bad by earlier runs (orch nodes)",
                    file=sys.stderr,
                )
            self._bad[cluster] = bad_nodes
        return self._bad[cluster]

    def leave_out(self, config: Config, backend: Backend) -> Config:
        """The configuration with the bad nodes of its cluster excluded, where the backend can
        exclude nodes."""
        from orchestrator.backends.base import NodeExclusion, without_nodes

        if not isinstance(backend, NodeExclusion):
            return config
        options = without_nodes(config.backend.options, self.bad_nodes(config.cluster.name))
        return structs.replace(config, backend=structs.replace(config.backend, options=options))

    def profile(self, config: Config) -> Profile | None:
        """The cost model's parameters: `cost.profile`, else the site's own for this cluster, else
        None: the shipped ones. OrchError (65) for a file that is not a profile."""
        site_path = site_profile_path(config.cluster, self._home)
        path = (
            Path(config.cost.profile).expanduser()
            if config.cost.profile
            else site_path
            if site_path.exists()
            else None
        )
        if path is None:
            return None
        from orchestrator.planner.cost.profile import read_profile

        return read_profile(path)

    def _measured(self, spec: ClusterSpec) -> Record | None:
        if not (self._home / "bench").is_dir():
            return None
        from orchestrator.cluster.measured import read

        return read(spec, self._home)


def _live(backend: str, which: str) -> Topology:
    from orchestrator.backends.base import TopologySource, get_backend

    source = get_backend(backend)
    assert isinstance(source, TopologySource)
    return source.live_topology(which)

"""The inputs of planning from this machine: the user's home folder, measured records, the profile
of the site, bad nodes and running clusters."""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from orchestrator.cluster.measured import site_profile_path
from orchestrator.cluster.resolve import Sources, resolve
from orchestrator.config.schema import ClusterSpec, Config
from orchestrator.errors import OrchError
from orchestrator.plan.document import Cluster
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.cluster.measured import Record
    from orchestrator.cluster.model import Topology
    from orchestrator.cost.profile import Profile


def with_token_folder(config: Config, home: Path) -> Config:
    """Returns the configuration with the user's folder of token files, unless it names one."""
    if config.data.cache_dir is not None:
        return config
    data = structs.replace(config.data, cache_dir=str(home / "data"))
    return structs.replace(config, data=data)


def expanded(path: str, key: str) -> Path:
    """Returns the path of a key with its `~` replaced. OrchError (65) if that is the home of an
    unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = path.partition("/")[0].removeprefix("~")
        raise OrchError(f"{key}={path}: there is no user {user!r} here", Exit.CONFIG) from None


def with_backend_options(config: Config, options: dict[str, Any]) -> Config:
    """Returns the configuration with other `backend.options`."""
    backend = structs.replace(config.backend, options=options)
    return structs.replace(config, backend=backend)


class ClusterResolver:
    """Resolves the cluster entries of one command. Each running cluster is queried once, and bad
    nodes are reported once."""

    def __init__(self, home: Path):
        self._home = home
        self._bad_nodes: dict[str, list[str]] = {}
        self._sources = Sources(
            measured=self._measured,
            live=cache(_live),
            bad_nodes=self.bad_nodes,
        )

    def __call__(self, spec: ClusterSpec) -> Cluster:
        """Resolves a cluster entry with the sources of this machine. Raises OrchError: 65 and 76 as
        `resolve` does; 76 and 78 for errors of the running cluster."""
        return resolve(spec, self._sources)

    def bad_nodes(self, cluster: str) -> list[str]:
        """Returns the nodes of the cluster that earlier runs of this user have recorded as bad
        (`orch nodes`), and prints them on stderr."""
        if cluster not in self._bad_nodes:
            from orchestrator.run.bad_nodes import NodeMemory

            entries = NodeMemory(self._home).read(time.time(), cluster)
            bad_nodes = [entry.node for entry in entries]
            if bad_nodes:
                print(
                    f"orch: without {', '.join(bad_nodes)}, found bad by earlier runs (orch nodes)",
                    file=sys.stderr,
                )
            self._bad_nodes[cluster] = bad_nodes
        return self._bad_nodes[cluster]

    def without_bad_nodes(self, config: Config, backend: Backend) -> Config:
        """Returns the configuration without the bad nodes of its cluster, if the backend can
        exclude nodes."""
        from orchestrator.backends.base import NodeExclusion, without_nodes

        if not isinstance(backend, NodeExclusion):
            return config
        bad_nodes = self.bad_nodes(config.cluster.name)
        options = without_nodes(config.backend.options, bad_nodes)
        return with_backend_options(config, options)

    def profile(self, config: Config) -> Profile | None:
        """Reads the parameters of the cost model: those of `cost.profile`, else those of the site
        for this cluster. Returns None for the shipped ones. Raises OrchError (65) for a file that
        is not a profile."""
        if config.cost.profile:
            path = expanded(config.cost.profile, "cost.profile")
        else:
            path = site_profile_path(config.cluster, self._home)
            if not path.exists():
                return None
        from orchestrator.cost.profile import read_profile

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

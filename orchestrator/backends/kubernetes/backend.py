"""The kubernetes backend: renders a plan as objects, sends them, and watches them through the API
server alone.

The run folder on the submitter's machine is a cache: the key, the record of what was sent, and what
the pods have reported. The run itself is in the cluster, with its checkpoints on a
PersistentVolumeClaim.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.backends.base import (
    Backend,
    LogMirroring,
    NodeExclusion,
    NodeExec,
    NodeRemoval,
    Prefetching,
    Rendering,
    Resizing,
    RunDiscovery,
    TopologySource,
    read_record,
    write_record,
)
from orchestrator.errors import OrchError, check_installed
from orchestrator.plan import Exit, Plan
from orchestrator.plan.codec import from_json
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, SubmissionBundle
from orchestrator.run.state import RunState, read_state

from . import train_run_client as train_runs
from .api.client import Cluster, in_background
from .cluster_view import ClusterSnapshot, read_snapshot
from .names import CONTAINER, RUNS, JsonObject
from .objects.code_maps import MOST_BYTES, code_maps
from .options import places_itself, read_options
from .record import KubernetesRecord

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.backends.base import FoundRun
    from orchestrator.cluster.model import Topology
    from orchestrator.config.schema import Config

    from .api.exec import PodCommand
    from .direct_runs import DirectRuns
    from .observer import RunObserver
    from .options import KubernetesOptions
    from .train_run_client import ControlledRuns

_FRESH_S = 15.0  # a snapshot that is older than this is read once more


class KubernetesBackend(
    Backend,
    NodeExclusion,
    Prefetching,
    RunDiscovery,
    Rendering,
    Resizing,
    LogMirroring,
    TopologySource,
    NodeExec,
    NodeRemoval,
):
    name = "kubernetes"
    agent_is_init = True
    shares_folders = False
    most_code_bytes = MOST_BYTES
    replaces_lost_nodes = True

    def __init__(self) -> None:
        self._clusters: dict[tuple[str | None, str | None], Cluster] = {}
        # (when its reading began, the snapshot)
        self._ahead: tuple[float, Future[ClusterSnapshot]] | None = None
        self._controlled: Future[bool] | None = None  # whether the cluster has a controller

    @cached_property
    def _observer(self) -> RunObserver:
        from .observer import RunObserver  # not for those who only submit

        return RunObserver(self._cluster)

    def on_nodes(self, request: LaunchRequest, plan: Plan) -> LaunchRequest:
        from .objects.render import pod_request

        return pod_request(request, plan, read_options(request.backend_options))

    def check(self, request: LaunchRequest) -> None:
        """Checks that a cluster answers and that the options are valid."""
        options = read_options(request.backend_options)
        self._cluster(options.context, options.namespace).version()

    def script(self, request: LaunchRequest, plan: Plan) -> str:
        """Returns the objects of a run as `submit` sends them, except for the key, which `submit`
        generates."""
        from .objects.render import to_yaml
        from .submission import draft_objects

        return to_yaml([*_code_maps(request), *draft_objects(request, plan)])

    def look_ahead(self, config: Config) -> None:
        """Starts to read, in the background, what `submit` needs of the cluster, while the job is
        planned."""
        with contextlib.suppress(OrchError):  # `submit` raises the same error
            options = read_options(config.backend.options)
            orch_places = places_itself(options) and config.cluster.device != "cpu"
            cluster = self._cluster(options.context, options.namespace)
            self._controlled = in_background(lambda: train_runs.has_controller(cluster, options))
            self._ahead = (
                time.monotonic(),
                in_background(lambda: read_snapshot(cluster, options, orch_places)),
            )

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        from .submission import draft_objects

        request = bundle.request
        check_installed("kubernetes", "submitting to Kubernetes")
        plan = from_json(bundle.contents["plan.json"])
        # before the folder exists: what cannot be rendered leaves none
        drafts = draft_objects(request, plan)
        options = read_options(request.backend_options)
        controlled = self._is_controlled(options)
        with create_run_folder(bundle, self.name) as folder:
            if controlled:
                train_runs.submit(
                    self._cluster(options.context, options.namespace),
                    folder,
                    bundle,
                    _plans(bundle),
                    code=_code_maps(request, folder),
                    environ=environ,
                )
            else:
                self._direct.start(folder, request, plan, environ, drafts)
        return request.handle

    def render(self, bundle: SubmissionBundle) -> str:
        """Does everything that `submit` does except sending. It needs no cluster, and uses nothing
        of one."""
        from .objects.render import render, to_yaml
        from .submission import draft_objects, manifest_of, record_of

        request = bundle.request
        options = read_options(bundle.request.backend_options)
        plan = from_json(bundle.contents["plan.json"])
        namespace = options.namespace or ""
        draft_objects(request, plan)
        if options.controller == "always":
            with create_run_folder(bundle, self.name) as folder:
                write_record(folder, train_runs.record(request, options, namespace), durable=True)
                train_run = train_runs.document(bundle, _plans(bundle), namespace)
                return to_yaml([*_code_maps(request, folder), train_run])
        with create_run_folder(bundle, self.name) as folder:
            manifest = manifest_of(
                folder,
                request,
                plan,
                options,
                os.environ,
                namespace=namespace,
            )
            record = record_of(request, options, namespace)
            # with its record the run is found once somebody has applied the objects
            write_record(folder, record, durable=True)
            return to_yaml([*_code_maps(request, folder), *render(manifest)])

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
    ) -> str:
        """Starts the run's next generation: deletes the old objects and sends new ones, on nodes
        that are free now."""
        record = read_record(folder, KubernetesRecord)
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        self._path(record).resume(folder, request, record, environ)
        return request.handle

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        nodes: int,
        environ: Mapping[str, str],
    ) -> str:
        """Starts the next generation under the plan that was submitted for that many nodes. A
        running run saves and exits first."""
        record = read_record(folder, KubernetesRecord)
        self._path(record).resize(folder, request, record, nodes, environ)
        return request.handle

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Deletes the run's Job: its pods get SIGTERM and their grace period to save, or none with
        `force`."""
        record = read_record(folder, KubernetesRecord)
        if record is None:
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        self._path(record).cancel(folder, record, force)
        self._observer.clear()

    def is_alive(self, folder: RunFolder) -> bool:
        record = read_record(folder, KubernetesRecord)
        return record is not None and self._path(record).is_alive(folder, record)

    def state(self, folder: RunFolder) -> RunState:
        """Reads the state from the cluster's objects and the coordinator's status lines; from the
        run folder alone if no cluster answers."""
        record = read_record(folder, KubernetesRecord)
        if record is None:
            return read_state(folder)
        try:
            return self._path(record).state(folder, record)
        except OrchError as error:
            state = read_state(folder)
            if state.is_final:
                return state
            reason = f"last known state: {state.state}; unknown now: {error.message}"
            return structs.replace(state, reason=reason)

    def exec_on_node(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        node: str,
        argv: Callable[[str, int], list[str]],
    ) -> PodCommand:
        """Returns a command that `pods/exec` runs in the node's pod."""
        cluster, pod = self._pod_of(folder, node)
        python = [read_options(request.backend_options).python, "-P"]
        return cluster.command(
            pod,
            CONTAINER,
            [*python, *argv(f"{RUNS}/{folder.run_id}", 1)],
        )

    def why_not_removed(self, request: LaunchRequest) -> str:
        """Says why nodes cannot be removed from the run, "" if they can."""
        if read_options(request.backend_options).claim is None:
            return (
                "without backend.options.claim no checkpoint outlives its pods, so nothing could be"
                " resumed"
            )
        return ""

    def remove_node(self, folder: RunFolder, node: str, grace_s: int | None) -> None:
        """Deletes the node's pod at once, or evicts it with `grace_s`, as a drain does."""
        cluster, pod = self._pod_of(folder, node)
        if grace_s is None:
            cluster.delete("Pod", pod, grace_s=0)
        else:
            cluster.evict(pod, grace_s)

    @contextlib.contextmanager
    def mirror(self, folder: RunFolder, follow: bool) -> Iterator[None]:
        """Copies the pods' logs into the run folder, once, or with `follow` for as long as the body
        runs."""
        from .log_mirror import (
            copy_logs,
            follow_logs,
        )  # imports asyncio, which `submit` does without
        from .observer import save_last_report

        record = read_record(folder, KubernetesRecord)
        if record is None or not self._observer.observe(record, folder.run_id).pods:
            yield
            return
        save_last_report(folder, self._observer.last_report(record, folder.run_id))
        cluster = self._cluster_of(record)
        if follow:
            with follow_logs(
                folder,
                cluster,
                lambda: self._observer.observe(record, folder.run_id),
            ):
                yield
        else:
            copy_logs(folder, cluster, self._observer.observe(record, folder.run_id))
            yield

    def live_topology(self, which: str) -> Topology:
        """Reads the cluster's topology. `which`: a profile of node labels, or "" to detect it."""
        from .cluster_view import live_topology, profile_named

        return live_topology(Cluster(), profile_named(which or "auto"))

    def everyone(self) -> list[FoundRun]:
        from .adoption import everyone

        return everyone(self._cluster(None, None))

    def adopt(self, name: str, home: Path) -> RunFolder | None:
        from .adoption import adopt

        return adopt(self._cluster(None, None), name, home, self.name)

    # ---------------------------------------------------------------------------------- parts

    def _pod_of(self, folder: RunFolder, node: str) -> tuple[Cluster, str]:
        """Returns the run's cluster, and the name of the pod that is this node of the run now."""
        from .log_mirror import pod_node_names
        from .phases import index_of

        record = read_record(folder, KubernetesRecord)
        if record is None:
            raise OrchError(f"run {folder.run_id} has no pods", Exit.USAGE)
        pods = self._observer.observe(record, folder.run_id).pods
        names = pod_node_names(pods)
        on_node = [pod["metadata"]["name"] for pod in pods if names[index_of(pod)] == node]
        if not on_node:
            raise OrchError(f"node {node} of run {folder.run_id} has no pod now", Exit.CAPACITY)
        return self._cluster_of(record), on_node[0]

    def _cluster(self, context: str | None, namespace: str | None) -> Cluster:
        return self._clusters.setdefault((context, namespace), Cluster(context, namespace))

    def _cluster_of(self, record: KubernetesRecord) -> Cluster:
        return self._cluster(record.context, record.namespace)

    def _path(self, record: KubernetesRecord | None) -> DirectRuns | ControlledRuns:
        """Returns what manages the run: its controller, or the commands of this machine."""
        if record is not None and record.train_run:
            return train_runs.ControlledRuns(self._cluster_of, lambda: self._observer)
        return self._direct

    def _is_controlled(self, options: KubernetesOptions) -> bool:
        if self._controlled is not None:
            return self._controlled.result()
        return train_runs.has_controller(self._cluster(options.context, options.namespace), options)

    @cached_property
    def _direct(self) -> DirectRuns:
        from .direct_runs import DirectRuns

        return DirectRuns(
            lambda context, namespace: self._cluster(context, namespace),
            lambda: self._observer,
            self._fresh_snapshot,
        )

    def _fresh_snapshot(self) -> Future[ClusterSnapshot] | None:
        """Returns the snapshot that `look_ahead` started, once, and only if it is not too old."""
        ahead = self._ahead
        self._ahead = None
        self.__dict__.pop("_observer", None)  # its observations are older than this command
        return ahead[1] if ahead and time.monotonic() < ahead[0] + _FRESH_S else None


def _code_maps(request: LaunchRequest, folder: RunFolder | None = None) -> list[JsonObject]:
    """Returns the ConfigMaps of a program that travels; without the run folder, which has its
    archive, as a dry run shows them."""
    packed = request.code.packed
    if not packed:
        return []
    archive = folder.packed_code.read_bytes() if folder else None
    return code_maps(packed, archive, read_options(request.backend_options).namespace or "")


def _plans(bundle: SubmissionBundle) -> list[Plan]:
    """Returns the bundle's plans, one per size, largest first."""
    sizes = bundle.request.sizes
    names = [f"plan.nodes{nodes}.json" for nodes in sizes] or ["plan.json"]
    return [from_json(bundle.contents[name]) for name in names]
